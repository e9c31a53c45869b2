"""Whether an engine goes on before its transfer is posted: the order of both, as it happened."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from endpoint_rig import DIRECT, WAIT_S
from engine.rig import LLAMA, Listener, random_prompt, submit, tiny_model
from kvcourier.config import EndpointConfig, Posting
from kvcourier.core.params import HolderAddress, HoldIntent, PushIntent
from kvcourier.engine.api import FinishReason
from kvcourier.engine.config import EngineConfig, make_cache
from kvcourier.engine.engine import Engine
from kvcourier.ids import EngineId, TransferId
from kvcourier.runtime.endpoint import KvEndpoint
from kvcourier.runtime.reports import Outcome
from kvcourier.transport.interface import Operation
from kvcourier.transport.memory import Fate, InFlight
from runtime.courier_world import ONE_PARCEL, SOURCE, STOP, TARGET, World, want

EXPECTED = {Posting.THREAD: ["went on", "posted"], Posting.INLINE: ["posted", "went on"]}
PATIENCE_S = {Posting.THREAD: WAIT_S, Posting.INLINE: 0.2}
"""How long a post waits for the engine to go on: until it does, or, where it must not, long enough
to catch it if it does."""


class Order:
    """What happened first: every post lets the engine go on before it, if that does not wait."""

    def __init__(self, world: World, posting: Posting) -> None:
        self.events: list[str] = []
        self._went_on = threading.Event()
        self._patience_s = PATIENCE_S[posting]
        world.network.fault_plan = self._plan

    def went_on(self) -> None:
        self.events.append("went on")
        self._went_on.set()

    def _plan(self, item: InFlight) -> Fate:
        if item.operation in (Operation.READ, Operation.WRITE):
            self._went_on.wait(self._patience_s)
            self.events.append("posted")
        return Fate.DELIVER


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, DIRECT)


@pytest.mark.parametrize("posting", Posting)
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_call_returns_before_or_after_the_post(world: World, mode: str, posting: Posting) -> None:
    prefill, decode = (world.rig(name, posting=posting) for name in ("p", "d"))
    world.still_works(prefill, decode)  # so that both are connected
    prefill.hold("p-1", "t-1")
    if mode == "push":
        want(prefill, decode, "1")
        decode.wait_until(lambda: "registered" in decode.whats("d-1"))
        order = Order(world, posting)
        prefill.prefill("p-1", "hello", SOURCE, STOP)
    else:
        decode.expect("d-1", prefill.prefill("p-1", "hello", SOURCE, STOP))
        order = Order(world, posting)
        decode.receive("d-1", TARGET, 0, STOP)
    order.went_on()
    decode.wait_for("d-1", Outcome.RECEIVED, Outcome.RELEASED)
    assert order.events == EXPECTED[posting]
    assert not decode.wrong("hello", TARGET, 0, STOP)


def test_of_the_packed_path_the_opening_is_waited_for() -> None:
    with ExitStack() as stack:
        world = World(stack, ONE_PARCEL)
        prefill, decode = (world.rig(name, posting=Posting.INLINE) for name in ("p", "d"))
        prefill.hold("p-1", "t-1")
        want(prefill, decode, "1")
        decode.wait_until(lambda: "registered" in decode.whats("d-1"))
        prefill.prefill("p-1", "hello", SOURCE, STOP)
        assert "posted" in prefill.whats("p-1")
        decode.wait_for("d-1", Outcome.RECEIVED, Outcome.RELEASED)


def test_a_peer_that_has_not_registered_is_not_waited_for(world: World) -> None:
    prefill, decode = world.rig("p", posting=Posting.INLINE), world.rig("d")
    prefill.hold("p-1", "t-1")
    prefill.prefill("p-1", "hello", SOURCE, STOP)
    assert "posted" not in prefill.whats("p-1")
    want(prefill, decode, "1")
    decode.wait_for("d-1", Outcome.RECEIVED, Outcome.RELEASED)


def test_a_dead_courier_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = world.rig("p", posting=Posting.INLINE)
    (courier,) = prefill.endpoint._couriers.values()

    def die(*args: object) -> None:
        raise RuntimeError("broken")

    prefill.hold("p-1", "t-1")
    monkeypatch.setattr(courier.endpoint, "handle", die)
    prefill.prefill("p-1", "hello", SOURCE, STOP)
    assert courier.error is not None
    assert courier.flush().is_set()


class Serving:
    """An engine with a real endpoint, on the memory network."""

    def __init__(self, stack: ExitStack, world: World, name: str, posting: Posting) -> None:
        config = EngineConfig(model=LLAMA, granularity="request", dtype="float32", num_blocks=16)
        model = tiny_model()
        cache = make_cache(model, config)
        self.endpoint = KvEndpoint(
            EndpointConfig(
                EngineId(name), LLAMA, side_channel_host="127.0.0.1", side_channel_port=0
            ),
            cache.rank_caches(),
            world.make_transport,
            posting=posting,
        )
        self.engine = Engine(model, config, self.endpoint, cache=cache)
        stack.callback(self.engine.close)
        self.engine.start()

    def want(self, name: str, prompt: tuple[int, ...], holder: "Serving") -> Listener:
        """Register for a prompt of the holder, and wait until it has taken note."""
        info = holder.endpoint.instance_info()
        address = HolderAddress(
            EngineId(info["engine_id"]), info["side_channel_host"], info["side_channel_port"], 1, 1
        )
        intent = PushIntent(address, None, TransferId(name))
        listener = submit(self.engine, f"d-{name}", prompt, intent=intent, max_tokens=2)
        until(lambda: "registered" in self.whats(f"d-{name}"))
        return listener

    def whats(self, key: str) -> list[str]:
        return [entry["what"] for entry in self.endpoint.story(key) or ()]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("posting", Posting)
def test_an_engine_answers_before_or_after_the_post(world: World, posting: Posting) -> None:
    with ExitStack() as stack:
        prefill, decode = (Serving(stack, world, name, posting) for name in ("p", "d"))
        prompt = random_prompt(40)
        wanted = decode.want("t", prompt, prefill)
        order = Order(world, posting)
        answered = submit(
            prefill.engine,
            "p-t",
            prompt,
            intent=HoldIntent(TransferId("t")),
            on_event=lambda event: order.went_on(),
            max_tokens=1,
        )
        assert answered.finish().finish_reason is FinishReason.LENGTH
        assert wanted.finish().finish_reason is FinishReason.LENGTH
        assert order.events == EXPECTED[posting]
