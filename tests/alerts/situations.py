"""What happens to a cluster while a Prometheus looks, and which alerts are to fire.

Decides what is done and what it should lead to. Refuses to know rules and how long they take.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import zmq

from chaos.cases import Scene
from e2e.cluster import wait_known
from engine.rig import random_prompt
from soak.plan import pool
from soak.traffic import LONGEST_CALL_S, Traffic

SEED = 0
NUM_CLIENTS = 4
_PROMPT = random_prompt(600, seed="alerts")


@dataclass(frozen=True)
class Situation:
    """Something that is so while its block runs.

    Attributes:
        expected: alerts that must fire; others may, as one thing leads to another.
        is_healthy: none may fire.
    """

    what: str
    expected: frozenset[str]
    happens: Callable[[Scene], AbstractContextManager[object]]
    is_healthy: bool = False


@contextlib.contextmanager
def _traffic(scene: Scene) -> Iterator[None]:
    """Mixed calls, some of which the clients leave."""
    urls = {each.name: each.url for each in scene.cluster.servers}
    traffic = Traffic(urls, pool(SEED), SEED, NUM_CLIENTS)
    traffic.start()
    try:
        yield
    finally:
        traffic.stop()
        traffic.join(LONGEST_CALL_S + 5)
        assert traffic.error is None and not traffic.is_alive(), traffic.error


def _killed(whom: str) -> Callable[[Scene], AbstractContextManager[None]]:
    @contextlib.contextmanager
    def happens(scene: Scene) -> Iterator[None]:
        victim = scene.side(whom)
        with _traffic(scene):
            victim.send_signal(signal.SIGKILL)
            victim.wait_end()
            yield
            victim.start()
            victim.wait_ready()
        wait_known(scene.cluster.router)

    return happens


def _stopped(whom: str) -> Callable[[Scene], AbstractContextManager[None]]:
    @contextlib.contextmanager
    def happens(scene: Scene) -> Iterator[None]:
        with _traffic(scene), scene.side(whom).stopped():
            yield

    return happens


@contextlib.contextmanager
def _stopped_in_mid_write(scene: Scene) -> Iterator[None]:
    """P stands still with a WRITE half posted; D gives up on it, and its blocks stay out of use."""
    scene.hold("P", "WRITE")
    with scene.cluster.router.sent(_PROMPT, "push", 4):
        scene.wait_reached("P", "WRITE")
        with scene.side("P").stopped():
            yield
        scene.let_go()


@contextlib.contextmanager
def _uncollected(scene: Scene) -> Iterator[None]:
    """A router asks P for a prompt, and nobody ever comes for it."""
    for number in range(3):
        prompt = random_prompt(100, seed=f"uncollected-{number}")
        scene.cluster.prefill.ask(
            prompt, num_tokens=1, kv_transfer_params={"do_remote_decode": True}
        )
    yield


@contextlib.contextmanager
def _never_sent(scene: Scene) -> Iterator[None]:
    """A router tells D of a prompt that it never sends to P."""
    with contextlib.ExitStack() as stack:
        for number in range(3):
            params = scene.cluster.prefill.early_params(f"never-{number}")
            prompt = random_prompt(100, seed=f"never-{number}")
            stack.enter_context(
                scene.cluster.decode.sent(prompt, num_tokens=2, kv_transfer_params=params)
            )
        yield


@contextlib.contextmanager
def _garbage(scene: Scene) -> Iterator[None]:
    """Something that is no peer speaks to P's side channel."""
    info = scene.cluster.prefill.info()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 1000)
    try:
        socket.connect(f"tcp://{info['side_channel_host']}:{info['side_channel_port']}")
        for _ in range(5):
            socket.send(b"\x93 no message of ours")
        yield
    finally:
        socket.close()
        context.term()


SITUATIONS = (
    Situation("all is well: mixed traffic", frozenset(), _traffic, is_healthy=True),
    Situation(
        "P is killed",
        frozenset({"KVCourierDown", "KVCourierRouterLegsFail", "KVCourierRouterCallsFail"}),
        _killed("P"),
    ),
    Situation(
        "D is killed",
        frozenset({"KVCourierDown", "KVCourierRouterLegsFail", "KVCourierRouterCallsFail"}),
        _killed("D"),
    ),
    Situation(
        "P stands still", frozenset({"KVCourierDown", "KVCourierPeersSilent"}), _stopped("P")
    ),
    Situation(
        "P stands still in mid-write",
        frozenset({"KVCourierPeersSilent", "KVCourierQuarantineGrows"}),
        _stopped_in_mid_write,
    ),
    Situation("nobody collects a prompt", frozenset({"KVCourierLeasesExpired"}), _uncollected),
    Situation(
        "D waits for a prompt that P never gets",
        frozenset({"KVCourierRegistrationsExpired", "KVCourierKVDoesNotCome"}),
        _never_sent,
    ),
    Situation(
        "a stranger speaks to the side channel", frozenset({"KVCourierMessagesDropped"}), _garbage
    ),
)
