"""When the decode instance is bound: early, late or near, with real embedded instances.

Two prefill and four decode instances with a small random model, as processes of this machine. One
decode instance is slow: it is stopped for four fifths of the time. Another place among the decode
instances drops every request after a moment; breakers are off, so that it goes on being tried.
There is a router for each row in front of the same instances. In each round every row gets the
same number of calls, at the same random times, in an order that changes.

    python benchmarks/binding.py --rounds 5 --calls 24 --json binding.json

On two cores the figures show what the choice costs, not what hardware would do. Times are from the
call to the first bytes of its answer; a call that fails counts as the longest.
"""

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from kvcourier.demo.processes import Child, Children

MODEL = "random-llama:layers=4,hidden=256,heads=4,kv_heads=2,head_dim=64,max_position=4096"
ROWS = {
    "pull (late)": ("--mode=pull", "--binding=late"),
    "push, early": ("--mode=push", "--binding=early"),
    "push, near": ("--mode=push", "--binding=near", "--rebinds=3"),
}
SHARED = (
    *("--retries=3", "--breaker-failures=0", "--load-interval=0.2", "--near-lead=0.15"),
    *("--prefill-policy=prefix_aware", "--decode-policy=least_loaded"),
)
CALLS_PER_S = 1.5
PROMPT_TOKENS = (300, 1200)
ANSWER_TOKENS = 16
WAIT_S = 120.0


class _Dropping(BaseHTTPRequestHandler):
    """Takes a request and closes the connection a moment later."""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(0.05)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def dropping_instance() -> Iterator[str]:
    """The address of a decode instance that fails every request."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Dropping)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def slowed(child: Child) -> Iterator[None]:
    """A process that runs for a fifth of the time only."""
    over = threading.Event()

    def slow() -> None:
        while not over.wait(0.02):
            child.process.send_signal(signal.SIGSTOP)
            over.wait(0.08)
            child.process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=slow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class Sample:
    """One call: seconds to its first bytes, or None if it failed."""

    row: str
    number: int
    ttft_s: float | None


def call(url: str, prompt: Sequence[int]) -> float | None:
    """One streamed answer; seconds to its first bytes, None if it does not end well."""
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    began_s, first_s, tail = time.perf_counter(), None, b""
    try:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, timeout=WAIT_S, trust_env=False
        ) as response:
            for chunk in response.iter_raw():
                first_s = first_s or time.perf_counter() - began_s
                tail = (tail + chunk)[-64:]
    except httpx.HTTPError:
        return None
    return first_s if tail.rstrip().endswith(b"[DONE]") else None


def run_round(url: str, row: str, number: int, num_calls: int) -> list[Sample]:
    """The calls of one round; a round of the same number has the same prompts' lengths and times
    for all rows, and other tokens, so that no row finds another's in a cache."""
    times, tokens = random.Random(f"round-{number}"), random.Random(f"{row}-{number}")
    at, plan = 0.0, []
    for _ in range(num_calls):
        at += times.expovariate(CALLS_PER_S)
        length = times.randint(*PROMPT_TOKENS)
        plan.append((at, [tokens.randrange(256) for _ in range(length)]))
    begin = time.perf_counter()

    def one(planned: tuple[float, list[int]]) -> Sample:
        time.sleep(max(0.0, begin + planned[0] - time.perf_counter()))
        return Sample(row, number, call(url, planned[1]))

    with ThreadPoolExecutor(num_calls) as pool:
        return list(pool.map(one, plan))


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[tuple[dict[str, str], Child]]:
    """The routers' addresses by row, and the decode instance that is to be slow."""
    program = (sys.executable, "-m", "kvcourier")
    with Children(folder) as children, dropping_instance() as dropping:
        started = []
        for role, count in (("prefill", 2), ("decode", 3)):
            for number in range(count):
                flags = (
                    *("--port=0", "--side-channel-port=0", f"--role={role}", f"--model={MODEL}"),
                    *("--served-model-name=tiny", "--dtype=float32", "--cpu-threads=1"),
                    *("--num-blocks=512", "--max-batch-tokens=128"),
                )
                child = children.start(f"{role}-{number}", [*program, "serve", *flags])
                started.append((role, child))
        named = [f"--{role}={children.wait_ready(child)}" for role, child in started]
        named.append(f"--decode={dropping}")
        routers = {
            row: children.start(
                f"router-{number}", [*program, "route", "--port=0", *named, *SHARED, *flags]
            )
            for number, (row, flags) in enumerate(ROWS.items())
        }
        slow = next(child for role, child in started if role == "decode")
        yield {row: children.wait_ready(child) for row, child in routers.items()}, slow


def quantile_ms(samples: Sequence[Sample], part: float) -> float:
    """Of the times to first bytes."""
    times = sorted(WAIT_S if each.ttft_s is None else each.ttft_s for each in samples)
    return 1000 * times[min(len(times) - 1, int(part * len(times)))]


def metric(url: str, name: str) -> float:
    """Sum of a counter of a router."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def table(samples: Sequence[Sample], moved: dict[str, tuple[float, float]]) -> str:
    """A row each: medians over all calls, the spread of p99 over rounds, what was repeated."""
    lines = [
        "| router | TTFT p50, ms | TTFT p99, ms | p99 by round | failed | retries | rebinds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        own = [each for each in samples if each.row == row]
        rounds = sorted({each.number for each in own})
        spread = [quantile_ms([s for s in own if s.number == number], 0.99) for number in rounds]
        lines.append(
            f"| {row} | {quantile_ms(own, 0.5):.0f} | {quantile_ms(own, 0.99):.0f} "
            f"| {statistics.median(spread):.0f} ({min(spread):.0f}-{max(spread):.0f}) "
            f"| {sum(each.ttft_s is None for each in own)} of {len(own)} "
            f"| {moved[row][0]:.0f} | {moved[row][1]:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print; exit code 1 if a call failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=24, help="of each row in each round")
    parser.add_argument("--json", type=Path, help="also write the samples here")
    given = parser.parse_args()
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as (urls, slow):
        for row, url in urls.items():
            run_round(url, row, -1, 4)  # agents connect, paces are learned
        with slowed(slow):
            for number in range(given.rounds):
                rows = list(ROWS)
                random.Random(number).shuffle(rows)
                for row in rows:
                    samples += run_round(urls[row], row, number, given.calls)
        counters = ("kvcourier_router_retries_total", "kvcourier_router_rebinds_total")
        moved = {row: tuple(metric(url, each) for each in counters) for row, url in urls.items()}
    print(table(samples, moved))
    if given.json is not None:
        rows = [{"row": s.row, "round": s.number, "ttft_s": s.ttft_s} for s in samples]
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    raise SystemExit(any(each.ttft_s is None for each in samples))


if __name__ == "__main__":
    main()
