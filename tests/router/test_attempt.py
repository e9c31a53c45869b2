"""One attempt, with everything around it faked: what cannot be timed from outside."""

import asyncio
import json
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from kvcourier.config import Binding, Limits, TransferMode
from kvcourier.ids import RequestId
from kvcourier.router.attempt import Attempt
from kvcourier.router.client_call import ClientCall
from kvcourier.router.config import Timeouts
from kvcourier.router.events import Answer, CallOutcome, ClientLeft, LegName, PrefillAnswered
from kvcourier.router.pace import Pace
from kvcourier.runtime.diary import Diary

pytestmark = pytest.mark.anyio

HANDOFF = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_block_ids": [[0]],
    "remote_request_id": "r-p",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}


class Quiet:
    """Takes any metric, and any note of an answer."""

    def __getattr__(self, name: str) -> "Quiet":
        return self

    def __call__(self, *args: object, **named: object) -> "Quiet":
        return self


def instance(name: str) -> SimpleNamespace:
    spec = SimpleNamespace(url=f"http://{name}", dp_rank=None)
    return SimpleNamespace(
        name=name,
        spec=spec,
        coordinates=None,
        info=None,
        work=SimpleNamespace(num_kept=0, backlog=0, pace=Pace()),
        begin=lambda prompt: 0,
        end=lambda missing: None,
        judge=lambda is_well: None,
        check_handoff=lambda handoff: None,
    )


async def test_a_leg_that_is_cancelled_before_it_begins_leaves_nothing_behind():
    """The client leaves when P has answered: D's leg has a task that never takes a step."""
    made: list[str] = []
    begun: list[str] = []

    def never(name: str) -> Coroutine[Any, Any, None]:
        async def run() -> None:
            begun.append(name)
            await asyncio.Event().wait()

        made.append(name)
        return run()

    services = SimpleNamespace(
        config=SimpleNamespace(timeouts=Timeouts(), rebinds=0),
        sides={LegName.DECODE: SimpleNamespace(pick=lambda *args: instance("d"))},
        upstream=SimpleNamespace(
            prefill=lambda *args: never("prefill"), decode=lambda *args: never("decode")
        ),
        metrics=Quiet(),
        running=set(),
        background=set(),
        diary=Diary(Limits()),
        tracing=None,
    )
    call = ClientCall(
        "/v1/completions",
        {"prompt": "x", "max_tokens": 1},
        (),
        TransferMode.PULL,
        Binding.LATE,
        RequestId("r"),
        receive=None,
        send=None,
        total_s=Timeouts().total_s,
    )
    left = asyncio.create_task(asyncio.Event().wait())
    attempt = Attempt(services, call, instance("p"), set(), left)
    content = json.dumps({"choices": [], "kv_transfer_params": HANDOFF}).encode()
    attempt._post(PrefillAnswered(Answer(200, "application/json", content)))
    attempt._post(ClientLeft())
    assert await attempt.run() is CallOutcome.CLIENT_LEFT
    assert all(attempt._legs.get(name) for name in LegName)
    assert "decode" not in begun
    assert made == begun, "a coroutine was made that nobody will ever await"
    left.cancel()
