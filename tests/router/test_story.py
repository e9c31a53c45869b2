"""What the router tells of a dispatch."""

import asyncio
from typing import Any

import pytest

from kvcourier.router.config import Timeouts
from kvcourier.runtime.diary import CLOCK_HEADER
from router.fake_instance import MODES, World, answering, bounded, die, prompt, world

pytestmark = pytest.mark.anyio
SOON = Timeouts(connect_s=5, prefill_s=5, first_byte_s=5, total_s=10)
ORDER = {
    "pull": ["dispatched", "prefill_sent", "prefill_answered", "decode_sent", "decode_streaming"],
    "push": ["dispatched", "prefill_sent", "decode_sent"],
}


async def story(here: World, key: str) -> list[dict[str, Any]]:
    answer = await here.client.get(f"/kvcourier/story/{key}")
    assert CLOCK_HEADER in answer.headers
    entries: list[dict[str, Any]] = answer.json()
    return entries


@pytest.mark.parametrize("mode", MODES)
async def test_a_good_call_is_told_from_its_dispatch_to_its_end(mode: str) -> None:
    async with world(timeouts=SOON) as here, bounded():
        answer = await here.post(prompt(stream=True), mode)
        await asyncio.gather(*here.services.background)
        entries = await story(here, answer.headers["x-kv-transfer-id"])
        names = [each["what"] for each in entries]
        assert names[: len(ORDER[mode])] == ORDER[mode]
        assert {"prefill_answered", "decode_streaming", "decode_ended", "finished"} <= set(names)
        assert entries[0]["mode"] == mode
        sent = {each["what"]: each.get("to") for each in entries}
        assert sent["prefill_sent"] == here.prefill[0].url
        assert sent["decode_sent"] == here.decode[0].url
        (finished,) = [each for each in entries if each["what"] == "finished"]
        assert finished["outcome"] == "ok"
        moments = [each["at_unix_s"] for each in entries]
        assert moments == sorted(moments)
        assert await story(here, answer.headers["x-request-id"]) == entries


async def test_a_failed_leg_is_told_with_its_reason() -> None:
    async with world(timeouts=SOON) as here, bounded():
        here.decode[0].script = die
        answer = await here.post(mode="pull")
        entries = await story(here, answer.headers["x-kv-transfer-id"])
        lost, finished = entries[-2:]
        assert (lost["what"], lost["kind"]) == ("decode_lost", "dropped")
        assert (finished["what"], finished["outcome"]) == ("finished", "failed")


async def test_what_instances_answered_is_told_by_its_status_only() -> None:
    async with world(timeouts=SOON) as here, bounded():
        here.prefill[0].script = answering(400, b'{"error": {"message": "a secret"}}')
        answer = await here.post(mode="pull")
        entries = await story(here, answer.headers["x-kv-transfer-id"])
        assert {"what": "prefill_answered", "status": 400}.items() <= entries[2].items()
        assert "secret" not in str(entries)


async def test_an_unknown_id_is_not_found_and_the_clock_is_told() -> None:
    async with world(timeouts=SOON) as here, bounded():
        answer = await here.client.get("/kvcourier/story/no/such")
        assert answer.status_code == 404
        assert CLOCK_HEADER in answer.headers
        assert "'no/such'" in answer.json()["error"]["message"]
