"""`make soak MINUTES=2`: mixed traffic on real processes, one of which is killed each minute.

    python -m soak.run [--minutes N] [--seed N] [--clients N] [--json FILE]

A prefill instance, a decode instance and a router serve clients that push and pull, stream or
not, and leave when they like; P and D are killed in turn and started again at the same ports. At
the end every answer is compared with that of a single instance, computed before, and all memory
must be back. Exit code 0 if nothing was found; otherwise there is a sentence for each finding.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from e2e.cluster import (
    IDLE_GAUGES,
    Cluster,
    Server,
    instance_flags,
    running_cluster,
    running_servers,
    sum_samples,
    until,
    wait_known,
)
from soak import memory, plan
from soak.traffic import LONGEST_CALL_S, Traffic
from soak.verdict import Evidence, Restart, summary, violations

FLAGS: Mapping[str, tuple[str, ...]] = {
    # P's WRITEs go through staging memory and D's READs do not, so both paths are in use.
    "prefill": ("--path=packed", "--staging-mib=2", "--staging-slot-mib=1"),
    "decode": ("--staging-mib=2", "--staging-slot-mib=1"),
}
QUIET_S = 90.0
"""Longer than any deadline that gives something back, but for a quarantine's: that is a finding."""
SAMPLE_S = 0.5
SHOW_S = 5.0
ALSO_ZERO = (
    "kvcourier_watched_peers",
    "kvcourier_leases_expired_total",
    "kvcourier_registrations_expired_total",
    "kvcourier_quarantines_expired_total",
)
"""Who is idle watches nobody; and nothing was given back only because its time was over."""


class Soak:
    """One run.

    Args:
        cluster: ready, and not used yet.
        expected: what a single instance answers to each prompt of the pool.
    """

    def __init__(
        self,
        cluster: Cluster,
        prompts: Sequence[Sequence[int]],
        expected: Sequence[Sequence[int]],
        seed: int,
        minutes: float,
        num_clients: int,
    ) -> None:
        self._servers: dict[str, Server] = {each.name: each for each in cluster.servers}
        self._cluster = cluster
        self._prompts, self._expected = prompts, expected
        self._seed, self._minutes = seed, minutes
        urls = {name: server.url for name, server in self._servers.items()}
        self._traffic = Traffic(urls, prompts, seed, num_clients)
        self._samples: list[memory.Sample] = []
        self._restarts: list[Restart] = []
        self._errors: dict[str, list[str]] = {name: [] for name in self._servers}
        self._began = self._shown = 0.0

    def run(self) -> Evidence:
        """Let it run for its time, wait until all is quiet, and look."""
        self._traffic.start()
        self._began = self._shown = time.monotonic()
        for after_s, whom in plan.restarts(self._seed, self._minutes):
            self._watch_until(self._began + after_s)
            self._restart(whom)
        self._watch_until(self._began + self._minutes * 60)
        self._traffic.stop()
        self._traffic.join(LONGEST_CALL_S + 5)
        if self._traffic.error is not None or self._traffic.is_alive():
            raise AssertionError("the clients have not ended well") from self._traffic.error
        leftovers = self._wait_quiet()
        last_answers = self._ask_last() if not any(leftovers.values()) else {}
        for name, server in self._servers.items():
            self._read_log(name, server)
        return Evidence(
            self._seed,
            self._minutes,
            self._traffic.outcomes,
            self._restarts,
            self._expected,
            leftovers,
            self._samples,
            {
                name: memory.growth(each for each in self._samples if each.name == name)
                for name in self._servers
            },
            self._errors,
            last_answers,
            self._began,
            os.getloadavg()[0],
        )

    def last_words(self) -> list[str]:
        """The end of each process's log, as long as the processes are there."""
        return [f"{name}, {each.child.log_tail()}" for name, each in self._servers.items()]

    def _watch_until(self, at: float) -> None:
        while (now := time.monotonic()) < at:
            assert self._traffic.is_alive(), self._traffic.error
            self._cluster.router.children.check()
            for name, server in self._servers.items():
                sample = memory.look(name, server.child.process.pid)
                if sample is not None:
                    self._samples.append(sample)
            if now - self._shown >= SHOW_S:
                self._shown = now
                self._show()
            time.sleep(SAMPLE_S)

    def _show(self) -> None:
        counts = self._traffic.counts()
        latest = {each.name: each for each in self._samples[-len(self._servers) :]}
        sizes = ", ".join(f"{name} {each.resident_mib:.0f} MiB" for name, each in latest.items())
        print(
            f"{time.monotonic() - self._began:5.0f} s: {counts['answered']} answered, "
            f"{counts['left']} left, {counts['failed']} failed, {self._traffic.in_flight} in "
            f"flight; {sizes}",
            flush=True,
        )

    def _restart(self, whom: str) -> None:
        server = self._servers[whom]
        killed = time.monotonic()
        server.send_signal(signal.SIGKILL)
        server.wait_end()
        # The next life writes a log of its own.
        self._read_log(whom, server)
        server.start()
        server.wait_ready()
        # Not before the router knows the new life: both lives have the same address.
        wait_known(self._cluster.router)
        until(
            lambda: (
                server.info()["incarnation"]
                in self._cluster.router.get("/kvcourier/instances").text
            ),
            f"the router still knows the old life of {whom}",
        )
        self._restarts.append(Restart(whom, killed, time.monotonic()))
        print(f"        {whom} was killed and is back after {time.monotonic() - killed:.1f} s")

    def _read_log(self, name: str, server: Server) -> None:
        lines = server.log().splitlines()
        self._errors[name] += [
            " | ".join(lines[index : index + 12])
            for index, line in enumerate(lines)
            if line.startswith("Traceback")
        ]

    def _wait_quiet(self) -> dict[str, dict[str, float]]:
        """What is not zero, as soon as all is, or at the latest after a while."""
        deadline = time.monotonic() + QUIET_S
        while any((found := self._leftovers()).values()) and time.monotonic() < deadline:
            time.sleep(SAMPLE_S)
        return found

    def _leftovers(self) -> dict[str, dict[str, float]]:
        found = {}
        for name in ("prefill", "decode"):
            text = self._servers[name].get("/metrics").text
            sums = {gauge: sum_samples(text, gauge, {}) for gauge in (*IDLE_GAUGES, *ALSO_ZERO)}
            # One other instance, in one life.
            sums["kvcourier_peers above 1"] = max(0, sum_samples(text, "kvcourier_peers", {}) - 1)
            found[name] = {gauge: value for gauge, value in sums.items() if value}
        in_flight = self._servers["router"].metric("kvcourier_router_in_flight")
        found["router"] = {"kvcourier_router_in_flight": in_flight} if in_flight else {}
        return found

    def _ask_last(self) -> dict[str, bool]:
        router = self._cluster.router
        return {
            mode: router.ask(prompt, mode, 8).token_ids == list(self._expected[index][:8])
            for index, mode in enumerate(plan.MODES)
            for prompt in [self._prompts[index]]
        }


def answers(folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What a single instance, which ends with this call, answers to each prompt."""
    with running_servers(folder) as start:
        single = start("single", "serve", *instance_flags("s", "decode"))
        single.wait_ready()
        return [single.ask(prompt, num_tokens=plan.LONGEST_ANSWER).token_ids for prompt in prompts]


@contextlib.contextmanager
def prepared(folder: Path, seed: int, minutes: float, num_clients: int) -> Iterator[Soak]:
    """A soak that is ready to run; its processes end with the block."""
    prompts = plan.pool(seed)
    expected = answers(folder, prompts)
    with running_cluster(folder, flags_by_role=FLAGS) as cluster:
        yield Soak(cluster, prompts, expected, seed, minutes, num_clients)


def as_json(evidence: Evidence, found: Sequence[str]) -> str:
    """Everything but the tokens."""
    fields = {
        field.name: getattr(evidence, field.name)
        for field in dataclasses.fields(evidence)
        if field.name not in ("outcomes", "expected")
    }
    calls = [
        {**dataclasses.asdict(each), "tokens": [len(tokens) for tokens in each.tokens]}
        for each in evidence.outcomes
    ]
    fields |= {"summary": summary(evidence), "violations": list(found), "calls": calls}
    return json.dumps(fields, indent=1, default=dataclasses.asdict)


def main() -> int:
    """Run, show, and say by the exit code whether all held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long clients call")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, calls and restarts")
    parser.add_argument("--clients", type=int, default=6, help="calls at a time")
    parser.add_argument("--json", type=Path, help="file for what was seen")
    options = parser.parse_args()
    if options.minutes < 0.5 or options.clients < 1:
        parser.error("expected at least half a minute and one client")
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        prepared(Path(folder), options.seed, options.minutes, options.clients) as soak,
    ):
        evidence = soak.run()
    found = violations(evidence)
    print(*summary(evidence), sep="\n")
    print(*found, f"{len(found)} violations", sep="\n")
    if options.json:
        options.json.write_text(as_json(evidence, found) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
