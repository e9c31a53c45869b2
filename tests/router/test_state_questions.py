"""States of streamed turns, which a router has to ask a vLLM instance for on its side channel."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq.auth

from core.golden_messages import OFFER
from core.test_inquiry import ABOUT
from kvcourier.core import inquiry
from kvcourier.core.inquiry import HistoryQuestion
from kvcourier.errors import KVCourierError
from kvcourier.ids import EngineId, InstanceAddress, TransferId
from kvcourier.router import state_questions
from kvcourier.router.config import (
    DEFAULT_ENGINE_ID,
    ConversationLimits,
    Coordinates,
    InstanceSpec,
    Timeouts,
)
from kvcourier.router.conversations import Conversations
from kvcourier.router.instances import Instance
from kvcourier.router.state_questions import Asked, StateQuestions
from kvcourier.runtime.channel_keys import read_keys
from kvcourier.runtime.handshake_server import HandshakeServer
from router.fake_instance import (
    CHUNKS,
    DONE,
    Connection,
    FakeInstance,
    Received,
    World,
    bounded,
    event,
    prompt,
    world,
)

pytestmark = pytest.mark.anyio
STATE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_block_ids": [[4, 5]],
    "remote_engine_id": "d0",
    "remote_ttl_s": 60.0,
}
PATIENT = Timeouts(state_s=60.0)
"""The outcome is awaited, so nobody else gives up."""


class SideChannel:
    """A vLLM instance's, that says of every turn but the unknown ones what `state` is."""

    def __init__(self, keys: Any = None, knows: bool = True) -> None:
        self.state: str | None = json.dumps(STATE)
        self.asked: list[str] = []
        answerers = {HistoryQuestion: self._tell} if knows else {}
        self._server = HandshakeServer(
            "127.0.0.1",
            0,
            lambda payload: inquiry.answer(payload, OFFER, ABOUT, answerers),
            1 << 20,
            keys,
        )
        self._server.start()
        self.close = self._server.close

    def _tell(self, asked: HistoryQuestion) -> inquiry.HistoryTold:
        self.asked.append(asked.transfer_id)
        return inquiry.tell_history(self.state)

    def spec(self, fake: FakeInstance) -> InstanceSpec:
        place = Coordinates(EngineId(fake.engine_id), "127.0.0.1", self._server.port)
        return InstanceSpec(fake.url, place)


@pytest.fixture
def channel() -> Iterator[SideChannel]:
    with contextlib.closing(SideChannel()) as channel:
        yield channel


def untold(fakes: list[FakeInstance]) -> None:
    """None of them tells of itself: they are vLLM's."""
    for fake in fakes:
        fake.tells = False


async def turn(here: World, conversation: str = "a", **fields: Any) -> Any:
    """One call, and all that the router does after it."""
    fields.setdefault("stream", True)
    answer = await here.post(prompt(**fields), x_conversation_id=conversation)
    assert answer.status_code == 200
    await asyncio.gather(*here.services.background)
    return answer


def outcomes(here: World) -> dict[str, float]:
    counted = {
        each: here.count("kvcourier_router_states_asked_total", outcome=each) for each in Asked
    }
    return {each: count for each, count in counted.items() if count}


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_the_turn_after_a_streamed_one_takes_along_what_d_says_when_asked(
    channel: SideChannel, mode: str
) -> None:
    def place(fake: FakeInstance) -> InstanceSpec:
        return InstanceSpec(fake.url, Coordinates(EngineId(fake.engine_id), "h", 1))

    settings = {"mode": mode, "timeouts": PATIENT, "specs": place, "decode_specs": channel.spec}
    async with world(prepare=untold, **settings) as here, bounded():
        first = await turn(here)
        assert first.content == b"".join((*CHUNKS, DONE))
        assert channel.asked == [first.headers["x-kv-transfer-id"]]
        assert outcomes(here) == {Asked.TOLD: 1}
        await turn(here)
        told = here.prefill[0].legs[-1].params
        assert told["remote_block_ids"] == [[4, 5]] and told["remote_engine_id"] == "d0"
        assert here.count("kvcourier_router_turns_total", state="sent") == 1
        await turn(here, "another")
        assert here.prefill[0].legs[-1].params["remote_block_ids"] is None


@pytest.mark.parametrize(
    "state",
    [None, "{", "[]", '{"do_remote_decode": true}', "[" * 5000, json.dumps([STATE])],
    ids=str,
)
async def test_what_is_no_state_is_not_kept(channel: SideChannel, state: str | None) -> None:
    channel.state = state
    settings = {"timeouts": PATIENT, "decode_specs": channel.spec}
    async with world(prepare=untold, **settings) as here, bounded():
        await turn(here)
        assert outcomes(here) == {Asked.NONE if state is None else Asked.FAILED: 1}
        assert len(here.services.conversations) == 0


async def torn(_leg: Received, connection: Connection) -> None:
    await connection.head()
    await connection.chunk(event("a"))
    await connection.end()


async def telling(_leg: Received, connection: Connection) -> None:
    """A stream as that of an instance of ours."""
    await connection.head()
    await connection.chunk(event("a"))
    last = {"choices": [], "kv_transfer_params": STATE}
    await connection.chunk(b"data: " + json.dumps(last).encode() + b"\n\n" + DONE)
    await connection.end()


@pytest.mark.parametrize(
    ("case", "num_known"),
    [
        ({"conversation": ""}, 0),
        ({"stream": False}, 0),
        ({"script": torn}, 0),
        ({"script": telling}, 1),
        ({"tells": True}, 0),
        ({"limits": ConversationLimits(max_conversations=0)}, 0),
    ],
    ids=["no conversation", "whole", "torn", "told", "ours", "off"],
)
async def test_who_is_not_asked(channel: SideChannel, case: dict[str, Any], num_known: int) -> None:
    def prepare(fakes: list[FakeInstance]) -> None:
        untold(fakes)
        fakes[1].tells = case.get("tells", False)
        fakes[1].script = case.get("script", fakes[1].script)

    settings = {
        "conversations": case.get("limits", ConversationLimits()),
        "decode_specs": channel.spec,
    }
    async with world(prepare=prepare, **settings) as here, bounded():
        await here.decode[0].asked.wait()
        while case.get("tells") and here.services.sides["decode"].instances[0].info is None:
            await asyncio.sleep(0)
        await turn(here, case.get("conversation", "a"), stream=case.get("stream", True))
        assert (channel.asked, outcomes(here)) == ([], {})
        assert len(here.services.conversations) == num_known


async def test_where_nobody_says_where_the_side_channel_is_turns_are_as_before() -> None:
    async with world(prepare=untold) as here, bounded():
        await turn(here)
        assert outcomes(here) == {}


async def test_an_instance_that_does_not_answer_is_left_alone_for_a_while() -> None:
    with contextlib.closing(SideChannel(knows=False)) as channel:
        settings = {"timeouts": PATIENT, "decode_specs": channel.spec}
        async with world(prepare=untold, **settings) as here, bounded():
            for _ in range(3):
                await turn(here)
            assert outcomes(here) == {Asked.FAILED: 1, Asked.SKIPPED: 2}


@pytest.mark.parametrize("has_key", [True, False])
async def test_where_the_side_channel_has_keys_the_router_needs_one(
    tmp_path: Path, has_key: bool
) -> None:
    if not zmq.has("curve"):
        pytest.skip("this ZMQ has no CURVE")
    peers = tmp_path / "keys"
    peers.mkdir()
    for name in ("d0", DEFAULT_ENGINE_ID):
        public, _ = zmq.auth.create_certificates(tmp_path, name)
        Path(public).rename(peers / f"{name}.key")
    keys = {
        name: read_keys(tmp_path / f"{name}.key_secret", peers, EngineId(name))
        for name in ("d0", DEFAULT_ENGINE_ID)
    }
    own = {"channel_keys": keys[DEFAULT_ENGINE_ID]} if has_key else {}
    with contextlib.closing(SideChannel(keys["d0"])) as channel:
        settings = {"timeouts": PATIENT, "decode_specs": channel.spec, **own}
        async with world(prepare=untold, **settings) as here, bounded():
            await turn(here)
            assert outcomes(here) == {Asked.TOLD if has_key else Asked.FAILED: 1}


# Without sockets: how many, and how often.


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Asking:
    """Answers when it is let, and counts how many are asked at the same time."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.lock = threading.Lock()
        self.num_asked = self.num_now = self.most = 0
        self.error: KVCourierError | None = None

    def __call__(self, _address: InstanceAddress, _transfer_id: TransferId) -> str:
        with self.lock:
            self.num_asked += 1
            self.num_now += 1
            self.most = max(self.most, self.num_now)
        self.gate.wait(60)
        with self.lock:
            self.num_now -= 1
        if self.error is not None:
            raise self.error
        return json.dumps(STATE)


@pytest.fixture
def decode() -> Instance:
    place = Coordinates(EngineId("d"), "h", 5600)
    return Instance(InstanceSpec("http://d:1", place), None)  # type: ignore[arg-type]


def questions(ask: Asking, clock: Callable[[], float]) -> tuple[StateQuestions, list[Asked]]:
    counted: list[Asked] = []
    kept = Conversations(ConversationLimits(), clock)
    return StateQuestions(ask, kept, counted.append, clock), counted


async def test_few_are_asked_at_once_and_too_many_are_not_asked(
    decode: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_questions, "MAX_WAITING", 10)
    ask = Asking()
    states, counted = questions(ask, Clock())
    async with bounded():
        tasks = [
            asyncio.create_task(states.learn(f"c{each}", TransferId(f"t{each}"), decode))
            for each in range(12)
        ]
        while len(counted) < 2:
            await asyncio.sleep(0)
        assert counted == [Asked.SKIPPED] * 2
        ask.gate.set()
        await asyncio.gather(*tasks)
    assert ask.num_asked == 10 and ask.most <= state_questions.MAX_AT_ONCE
    assert counted.count(Asked.TOLD) == 10


async def test_who_failed_is_asked_again_after_a_pause(decode: Instance) -> None:
    ask, clock = Asking(), Clock()
    ask.gate.set()
    ask.error = KVCourierError("nobody is there")
    states, counted = questions(ask, clock)
    async with bounded():
        for later in (0.0, state_questions.PAUSE_S - 1, 2.0):
            clock.now += later
            await states.learn("a", TransferId("t"), decode)
            ask.error = None
    assert counted == [Asked.FAILED, Asked.SKIPPED, Asked.TOLD]
