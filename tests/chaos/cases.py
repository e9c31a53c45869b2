"""What can happen to a pair of real processes, and how it is seen from outside.

Decides where a request stands when something happens to an instance, and what is measured then.
Refuses to know how the findings are shown. Nothing here waits for a length of time: a request
stands still at its phase (`chaos.instance`) until what was done has been seen.
"""

import contextlib
import dataclasses
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from chaos import paths
from e2e.cluster import Cluster, Server, running_cluster, until, wait_known
from engine.rig import random_prompt

TESTS = Path(__file__).resolve().parents[1]

NUM_TOKENS = 8
PROMPT_TOKENS = 600
LONG = 400
SEIZED_S = 2.0
SILENCE_S = 1.0
SEEN_S = 60.0
_ENDS = (
    *("delivery_failed", "receive_failed", "send_failed"),
    *("quarantined", "released", "wanter_silent"),
)
_NUMBERS = itertools.count()
ROLES = {"P": "prefill", "D": "decode"}


@dataclasses.dataclass(frozen=True)
class Phase:
    """Where a request stands.

    Attributes:
        holds: per role, the point that is held.
        until_known: whether the point is held until the other side has seen what happened.
        watching: which sides watch each other then; what else belongs to the phase, such as
            acknowledgements, is there when they do.
        is_streaming: whether the client has had tokens before.
    """

    holds: Mapping[str, str]
    watching: str = "PD"
    until_known: bool = True
    is_streaming: bool = False


PHASES: Mapping[tuple[str, str], Phase] = {
    ("push", "before registration"): Phase({"D": "receive"}, "P", until_known=False),
    ("push", "registered, not written"): Phase({"P": "finish"}),
    ("push", "in mid-write"): Phase({"P": "WRITE"}),
    ("push", "after the write"): Phase({}, "", is_streaming=True),
    ("pull", "before the READ"): Phase({"D": "receive"}, "P", until_known=False),
    ("pull", "in mid-READ"): Phase({"D": "READ"}),
    ("pull", "after the READ"): Phase({}, "", is_streaming=True),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that happens in one phase, to P, D or the way between."""

    mode: str
    phase: str
    what: str
    whom: str

    def __str__(self) -> str:
        return f"{self.what} {self.whom}: {self.mode}, {self.phase}"


@dataclasses.dataclass
class Finding:
    """What came of it; seconds since it happened, None where there is nothing to see.

    Attributes:
        known_s: until the other side's story of the request says so; P's, where the way broke, in
            `known_by_p_s`.
        reason: what that story says.
        client: what the client got.
        client_s: when.
        blocks_s: until both sides, or the one that lives, had all blocks. Of a process that was
            stopped, or a way that was broken, since it goes on.
        next_is_right: whether the next requests of both modes were answered with the right tokens.
    """

    case: Case
    known_s: float | None = None
    reason: str = ""
    client: str = ""
    client_s: float = 0.0
    blocks_s: float = 0.0
    next_is_right: bool = False


class Client(threading.Thread):
    """Asks once, and notes what comes and when."""

    def __init__(self, router: Server, mode: str, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self._ask = (router, mode, num_tokens)
        self.has_tokens = threading.Event()
        self.said = ""
        self.at = 0.0

    def run(self) -> None:
        router, mode, num_tokens = self._ask
        prompt = random_prompt(PROMPT_TOKENS, seed=f"chaos-{next(_NUMBERS)}")
        try:
            with router.streaming(prompt, mode, num_tokens) as stream:
                stream.read(2)
                self.has_tokens.set()
                stream.read()
                self.said = _said(stream.response.status_code, stream.is_done, stream.error)
        except httpx.HTTPError as error:
            self.said = repr(error)
        self.at = time.time()


def _said(status: int, is_done: bool, error: dict[str, Any] | None) -> str:
    if error is None and is_done:
        return "its answer"
    return f"an error ({status})" if status != 200 else "an error in its stream"


class Scene:
    """A cluster whose requests can be made to stand still."""

    def __init__(self, cluster: Cluster, folders: Mapping[str, Path]) -> None:
        self.cluster = cluster
        self._folders = folders
        self._expected = {
            mode: (prompt, cluster.decode.ask(prompt).token_ids)
            for mode in ("push", "pull")
            for prompt in [random_prompt(75, seed=f"chaos-next-{mode}")]
        }
        assert self._is_next_right(), "it is not well before anything has happened"

    def side(self, whom: str) -> Server:
        """P's or D's process."""
        server: Server = getattr(self.cluster, ROLES[whom])
        return server

    def play(self, case: Case) -> Finding:
        """Bring a request to its phase, let it happen, and look."""
        phase = PHASES[case.mode, case.phase]
        for whom, point in phase.holds.items():
            self.hold(whom, point)
        client = Client(self.cluster.router, case.mode, LONG if phase.is_streaming else NUM_TOKENS)
        client.start()
        self._wait_for(phase, client)
        finding = Finding(case)
        try:
            _HAPPENINGS[case.what](self, case, phase, client, finding)
        finally:
            self.let_go()
        client.join(SEEN_S)
        finding.client = client.said or "nothing"
        finding.next_is_right = self._is_next_right()
        return finding

    def _wait_for(self, phase: Phase, client: Client) -> None:
        for whom, point in phase.holds.items():
            reached = self._folders[whom] / f"{point}.reached"
            until(reached.exists, f"{whom} does not come to {point}: {client.said}")
        if phase.is_streaming:
            assert client.has_tokens.wait(SEEN_S), client.said
        for server in map(self.side, phase.watching):
            until(lambda server=server: server.metric("kvcourier_watched_peers"), "no watch")

    def hold(self, whom: str, point: str) -> None:
        """Whoever comes to this point stands still there from now on."""
        (self._folders[whom] / point).touch()

    def wait_reached(self, whom: str, point: str) -> None:
        """Until somebody stands still there."""
        reached = self._folders[whom] / f"{point}.reached"
        until(reached.exists, f"{whom} does not come to {point}")

    def let_go(self, *sides: str) -> None:
        """Nothing stands still any more."""
        for whom in sides or ROLES:
            for path in self._folders[whom].glob("*"):
                if path.name != "request":
                    path.unlink()

    def wait_known(self, whom: str, since: float, finding: Finding) -> None:
        """Until a side's story of the request has an end."""
        server, name = self.side(whom), (self._folders[whom] / "request").read_text()

        def ends() -> list[dict[str, Any]]:
            return [
                entry
                for entry in server.story(name)
                if entry["what"] in _ENDS and entry["at_unix_s"] >= since
            ]

        until(ends, f"{whom} does not know: {server.story(name)}", SEEN_S)
        finding.known_s = ends()[0]["at_unix_s"] - since
        finding.reason = next((e["reason"] for e in ends() if e.get("reason")), "")

    def wait_blocks(self, since: float, *sides: str) -> float:
        """Until these have all of their blocks; how long that took."""
        for whom in sides:
            self.side(whom).wait_idle()
        return time.time() - since

    def _is_next_right(self) -> bool:
        answers = {
            mode: self.cluster.router.ask(prompt, mode).token_ids
            for mode, (prompt, _) in self._expected.items()
        }
        return answers == {mode: tokens for mode, (_, tokens) in self._expected.items()}


def _kill(scene: Scene, case: Case, phase: Phase, client: Client, finding: Finding) -> None:
    other, victim = _other(case.whom), scene.side(case.whom)
    at = time.time()
    victim.send_signal(signal.SIGKILL)
    if not phase.until_known:
        # Only now what follows comes too late for certain.
        until(lambda: victim.child.exit_code() is not None, "it lives on")
    _look(scene, other, phase, at, finding)
    if phase.is_streaming:
        client.join(SEEN_S)
        finding.blocks_s = scene.wait_blocks(client.at, other)
    else:
        finding.blocks_s = scene.wait_blocks(at, other)
        client.join(SEEN_S)
    finding.client_s = client.at - at
    victim.wait_end()
    victim.start()
    victim.wait_ready()
    wait_known(scene.cluster.router)
    until(
        lambda: (
            victim.info()["incarnation"] in scene.cluster.router.get("/kvcourier/instances").text
        ),
        "the router still knows the old life",
    )


def _stop(scene: Scene, case: Case, phase: Phase, client: Client, finding: Finding) -> None:
    at = time.time()
    with scene.side(case.whom).stopped():
        _look(scene, _other(case.whom), phase, at, finding)
        if case.whom == "P":
            client.join(SEEN_S)
    goes_on = time.time()
    client.join(SEEN_S)
    finding.client_s = client.at - at
    finding.blocks_s = scene.wait_blocks(goes_on, *ROLES)


def _seize(scene: Scene, case: Case, phase: Phase, client: Client, finding: Finding) -> None:
    """A step that keeps P's interpreter from all of its threads."""
    folder = scene._folders["P"]
    (folder / "seize").write_text(str(SEIZED_S))
    at = time.time()
    (folder / "finish").unlink()
    client.join(SEEN_S)
    finding.client_s = client.at - at
    finding.blocks_s = scene.wait_blocks(at, *ROLES)


def _drop(scene: Scene, case: Case, phase: Phase, client: Client, finding: Finding) -> None:
    at = time.time()
    with paths.dropped(case.whom, [each.port for each in scene.cluster.servers]):
        if case.whom == "data path":
            # Only what moves shows it.
            scene.let_go()
        scene.wait_known("D", at, finding)
        client.join(SEEN_S)
        scene.let_go()
    goes_on = time.time()
    finding.client_s = client.at - at
    finding.blocks_s = scene.wait_blocks(goes_on, *ROLES)


_HAPPENINGS: Mapping[str, Callable[[Scene, Case, Phase, Client, Finding], None]] = {
    "kill": _kill,
    "stop": _stop,
    "seize": _seize,
    "drop": _drop,
}


def _look(scene: Scene, other: str, phase: Phase, at: float, finding: Finding) -> None:
    """See what the side that lives knows, and let it go on."""
    if not phase.until_known:
        scene.let_go()
    if not phase.is_streaming:
        scene.wait_known(other, at, finding)
    scene.let_go()


def _other(whom: str) -> str:
    return "D" if whom == "P" else "P"


@contextlib.contextmanager
def staged(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Scene]:
    """A cluster that runs, to play cases on."""
    folders = {whom: folder / f"holds-{whom}" for whom in ROLES}
    for each in folders.values():
        each.mkdir()
    # pytest finds the tests' own modules by its settings, which instances do not read.
    python_path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environments = {
        role: {
            "CHAOS_HOLDS": str(folders[whom]),
            "PYTHONPATH": python_path,
            **(environment or {}),
        }
        for whom, role in ROLES.items()
    }
    flags = (
        *("--granularity=request", "--path=direct", "--fragment=1"),
        f"--peer-silence-s={SILENCE_S:g}",
    )
    with running_cluster(
        folder, *flags, module="chaos.instance", environments=environments
    ) as cluster:
        yield Scene(cluster, folders)
