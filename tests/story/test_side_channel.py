"""Asking an instance's ranks on its side channel: real sockets, between real couriers' looks."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from endpoint_rig import DIRECT, Rig
from kvcourier.cli.app import app
from kvcourier.config import ChannelKeys
from kvcourier.errors import ConfigError
from kvcourier.ids import EngineId, InstanceAddress
from kvcourier.runtime.reports import Outcome
from kvcourier.story.accounts import Asked, Part
from kvcourier.story.ask import Place, ask_all, find_instances, read_place
from kvcourier.story.side_channel import OWN_ID, Keys, ask_ranks, read_address, url_of
from loopback import Handler, Listener
from ports import free_port
from runtime.courier_world import World, dropped, transfer
from side_channel_keys import make_keys

WAIT_S = 20.0
STRANGER = EngineId("stranger")
MakeKeys = Callable[..., ChannelKeys]


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, DIRECT)


@pytest.fixture
def keys(tmp_path: Path) -> MakeKeys:
    """The keys of somebody who knows some others."""

    def make(name: str, *knows: str) -> ChannelKeys:
        secrets = tmp_path / "secrets"
        secrets.mkdir(exist_ok=True)
        return make_keys(secrets, tmp_path / f"known to {name}", name, *knows)

    return make


def address_of(rig: Rig) -> InstanceAddress:
    info = rig.endpoint.instance_info()
    return InstanceAddress(
        EngineId(info["engine_id"]), info["side_channel_host"], info["side_channel_port"]
    )


def ask(rig: Rig, key: str, keys: Keys | None = None) -> list[Asked]:
    return ask_ranks(Part.PREFILL, address_of(rig), key, keys or Keys(), 3, WAIT_S)


def moved(prefill: Rig, decode: Rig) -> None:
    transfer(prefill, decode, "pull", "x")
    for rig, name, outcome in ((decode, "d-x", Outcome.RECEIVED), (prefill, "p-x", Outcome.SENT)):
        rig.wait_for(name, outcome, Outcome.RELEASED)


def test_each_rank_tells_its_part_by_a_clock_of_its_own(world: World) -> None:
    prefill = world.rig("p", tp_size=2, tells_stories=True)
    moved(prefill, world.rig("d", tp_size=2))
    found = ask(prefill, "t-x")
    assert [each.place.rsplit(" ", 1)[1] for each in found] == ["pp0tp0", "pp0tp1"]
    for each in found:
        assert each.account is not None and each.account.clock is not None, each.problem
        whats = [entry.what for entry in each.account.entries]
        assert whats[0] == "hold_begun" and whats[-1] == "released"
        assert each.account.entries[0].details["rank"] == each.place.rsplit(" ", 1)[1]
        clock = each.account.clock
        assert abs(clock.offset_s) <= clock.uncertainty_s + 1e-3, "one machine, one clock"


def test_who_keeps_them_to_itself_is_not_asked(world: World) -> None:
    prefill = world.rig("p")
    (asked,) = ask(prefill, "t-x")
    assert "keeps its stories to itself" in asked.problem
    assert dropped(prefill, "malformed") == 0


def test_who_does_not_know_it_and_who_is_not_there(world: World) -> None:
    (asked,) = ask(world.rig("p", tells_stories=True), "t-x")
    assert asked.problem == "does not know it, or has forgotten it"
    nobody = InstanceAddress(EngineId("p"), "127.0.0.1", free_port())
    (asked,) = ask_ranks(Part.DECODE, nobody, "t-x", Keys(), 3, WAIT_S)
    assert "nobody listens" in asked.problem


def test_with_keys_only_who_is_known_is_told(world: World, keys: MakeKeys) -> None:
    prefill = world.rig("p", keys=keys("p", "d", OWN_ID), tells_stories=True)
    moved(prefill, world.rig("d", keys=keys("d", "p")))
    (asked,) = ask(prefill, "t-x", Keys(OWN_ID, keys(OWN_ID, "p")))
    assert asked.account is not None, asked.problem
    (asked,) = ask(prefill, "t-x", Keys(STRANGER, keys(STRANGER, "p")))
    assert "does not let our key in" in asked.problem
    (asked,) = ask(prefill, "t-x")
    assert asked.account is None and "keys" in asked.problem


class NoStories(Handler):
    """A router that knows instances, or an API server of vLLM."""

    known: object = None

    def do_GET(self) -> None:
        if self.known is None or self.path != "/kvcourier/instances":
            self.answer(404, b"{}", {})
        else:
            self.answer(200, json.dumps(self.known).encode(), {})


def test_an_instance_without_stories_at_its_api_is_asked_at_the_channel_that_a_router_knows(
    world: World,
) -> None:
    prefill = world.rig("p", tells_stories=True)
    moved(prefill, world.rig("d"))
    vllm = Listener(NoStories)
    where = address_of(prefill)
    told = {"engine_id": where.engine_id, "host": where.host, "port": where.port}
    known = {
        "prefill": [{"url": vllm.url, "coordinates": told}],
        "decode": [
            {"url": vllm.url, "coordinates": None},
            {"url": vllm.url, "coordinates": {"engine_id": 7, "host": "h", "port": 1}},
        ],
    }
    router = Listener(type("Router", (NoStories,), {"known": known}))
    try:
        places = asyncio.run(find_instances(Place(Part.ROUTER, router.url), None, WAIT_S))
        found = asyncio.run(ask_all("t-x", places, WAIT_S))
    finally:
        vllm.close()
        router.close()
    assert [each.part for each in found if each.account is not None] == [Part.PREFILL]
    assert [each.problem[:18] for each in found if each.account is None] == [
        "keeps no stories a"
    ] * 2


def test_the_command_asks_a_side_channel_by_its_name(world: World) -> None:
    prefill = world.rig("p", tells_stories=True)
    moved(prefill, world.rig("d"))
    url = url_of(address_of(prefill))
    done = CliRunner().invoke(app, ["story", "t-x", f"--prefill={url}", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {each["who"] for each in told["moments"]} == {"P"}
    assert [each["place"] for each in told["asked"]] == [f"{url} pp0tp0"]


@pytest.mark.parametrize("url", ["kv://", "kv://h", "kv://h:0", "kv://h:99999", "kv://h:1/x"])
def test_a_side_channel_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--decode: expected a side channel like kv://"):
        read_place(Part.DECODE, url, "--decode", None)


def test_a_side_channel_is_no_router() -> None:
    with pytest.raises(ConfigError, match="--router: expected an address"):
        read_place(Part.ROUTER, "kv://p@h:1", "--router", None)


@pytest.mark.parametrize("url", ["kv://p0@10.0.0.1:5600", "kv://p0@[::1]:5600"])
def test_addresses_come_back(url: str) -> None:
    assert url_of(read_address(url, "--prefill")) == url
