"""Instances that come and go while the router runs: by a file, and by whoever has the key."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourier.api_keys import api_keys
from kvcourier.errors import ConfigError
from kvcourier.router.config import InstanceSpec
from kvcourier.router.events import LegName
from kvcourier.router.membership import (
    InstancesFile,
    Membership,
    changes_of,
    parse_roster,
)
from kvcourier.router.sides import Side
from router.fake_instance import FakeInstance, World, bounded, holding_until, world

ADMIN = {"authorization": "Bearer admin"}
SPECS = st.lists(
    st.builds(InstanceSpec, st.sampled_from([f"http://h{n}:1" for n in range(5)])), unique=True
)


@settings(derandomize=True, deadline=None)
@given(SPECS, SPECS)
def test_changes_turn_one_roster_into_the_other(before: Any, after: Any) -> None:
    changes = changes_of(before, after)
    left = [spec for spec in before if spec.name not in changes.removed]
    assert sorted(spec.name for spec in (*left, *changes.added)) == sorted(
        spec.name for spec in after
    )


def test_a_roster() -> None:
    text = 'prefill = ["http://p:1,engine_id=p"]\ndecode = ["http://d:1", "http://d:2"]\n'
    roster = parse_roster(text)
    assert [spec.name for spec in roster[LegName.DECODE]] == ["http://d:1", "http://d:2"]
    assert roster[LegName.PREFILL][0].coordinates is not None
    assert parse_roster("") == {LegName.PREFILL: [], LegName.DECODE: []}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefill = [", "TOML"),
        ("prefil = []", "prefil"),
        ('prefill = "http://p:1"', "list"),
        ("decode = [1]", "list"),
        ('decode = ["d"]', "http://host:port"),
        ('decode = ["http://d:1", "http://d:1"]', "once"),
    ],
)
def test_a_bad_roster_says_what_is_expected(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_roster(text)


class Stub:
    """An instance that only has a name."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.name = spec.name
        self.is_drained = False


def sides() -> dict[LegName, Side]:
    return {leg: Side([], "round_robin") for leg in LegName}


def test_a_file_is_followed_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    here = sides()
    errors: list[int] = []
    members = Membership(here, Stub)  # type: ignore[arg-type]
    own = InstanceSpec("http://own:1")
    members.add(LegName.DECODE, own)
    path = tmp_path / "instances.toml"
    file = InstancesFile(path, members, lambda: errors.append(1))

    def names() -> list[str]:
        return [each.name for each in here[LegName.DECODE].instances]

    file.look()
    file.look()
    assert len(errors) == 1, "a file that is not there is told once"
    path.write_text('decode = ["http://d:1", "http://own:1"]')
    file.look()
    assert names() == ["http://own:1", "http://d:1"]
    replacement = tmp_path / "new.toml"
    replacement.write_text('decode = ["http://d:2"]')
    os.replace(replacement, path)
    file.look()
    assert "http://d:1" not in names() and "http://d:2" in names()
    path.write_text("decode = [broken")
    file.look()
    file.look()
    assert "http://d:2" in names() and len(errors) == 2


async def act(here: World, what: str, role: str, instance: object, **key: str) -> httpx.Response:
    headers = key or ADMIN
    body = {"role": role, "instance": instance}
    return await here.client.post(f"/kvcourier/admin/{what}", json=body, headers=headers)


@pytest.mark.anyio
async def test_instances_are_added_drained_and_removed_under_load() -> None:
    async with world(1, 1, admin_keys=api_keys(["admin"])) as here, bounded():
        old, new = here.decode[0], FakeInstance("d-new")
        await new.server.start()
        try:
            gate = asyncio.Event()
            old.script = holding_until(gate, old.serve)
            running = asyncio.create_task(here.post())
            await old.arrived.wait()
            assert (await act(here, "add", "decode", new.url)).status_code == 201
            assert (await act(here, "add", "decode", new.url)).status_code == 409
            drained = (await act(here, "drain", "decode", old.url)).json()
            assert (drained["draining"], drained["in_flight"], drained["empty"]) == (True, 1, False)
            for _ in range(3):
                assert (await here.post()).headers["x-kv-decode"] == new.url
            gate.set()
            assert (await running).headers["x-kv-decode"] == old.url, "what runs there runs on"
            assert (await act(here, "drain", "decode", old.url)).json()["empty"] is True
            assert (await act(here, "resume", "decode", old.url)).json()["draining"] is False
            assert (await act(here, "remove", "decode", old.url)).status_code == 200
            assert (await act(here, "remove", "decode", old.url)).status_code == 404
            assert (await here.post()).headers["x-kv-decode"] == new.url
            listed = (await here.client.get("/kvcourier/instances")).json()["decode"]
            assert [each["name"] for each in listed] == [new.url]
        finally:
            await new.server.stop()


@pytest.mark.anyio
async def test_a_drained_prefill_instance_is_empty_when_d_has_begun() -> None:
    async with world(2, 1, admin_keys=api_keys(["admin"])) as here, bounded():
        decode, gate = here.decode[0], asyncio.Event()
        decode.script = holding_until(gate, decode.serve)
        running = asyncio.create_task(here.post(mode="pull"))
        await decode.arrived.wait()
        name = here.prefill[0].url
        owing = (await act(here, "drain", "prefill", name)).json()
        assert (owing["in_flight"], owing["empty"]) == (1, False), "D has yet to collect"
        gate.set()
        await running
        assert (await act(here, "drain", "prefill", name)).json()["empty"] is True


@pytest.mark.anyio
async def test_who_may_change_instances() -> None:
    async with world(api_keys=api_keys(["user"]), admin_keys=api_keys(["admin"])) as here:
        spare = "http://127.0.0.1:9"
        assert (
            await act(here, "add", "decode", spare, authorization="Bearer user")
        ).status_code == (401)
        assert (await act(here, "add", "decode", spare)).status_code == 201
        assert (await here.post(authorization="Bearer admin")).status_code == 401
        assert (await here.post(authorization="Bearer user")).status_code in (200, 503)
    async with world() as here:
        closed = await act(here, "add", "decode", spare)
        assert closed.status_code == 403
        assert "--admin-key-file" in closed.json()["error"]["message"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("role", "instance", "says"),
    [
        ("decoder", "http://d:1", "prefill or decode"),
        ("decode", 7, "its address"),
        ("decode", "d:1", "http://host:port"),
        ("decode", "http://d:1,engine=x", "KEY=VALUE"),
    ],
)
async def test_a_bad_change_says_what_is_expected(role: str, instance: Any, says: str) -> None:
    async with world(admin_keys=api_keys(["admin"])) as here, bounded():
        refused = await act(here, "add", role, instance)
        assert refused.status_code == 400
        assert says in refused.json()["error"]["message"]
        raw = await here.client.post("/kvcourier/admin/add", content=b"[", headers=ADMIN)
        assert raw.status_code == 400


@pytest.mark.anyio
async def test_a_router_may_begin_with_nobody(tmp_path: Path) -> None:
    path = tmp_path / "instances.toml"
    path.write_text("")
    async with world(0, 0, instances_file=path) as here, bounded():
        assert (await here.post()).status_code == 503
        assert (await here.client.get("/v1/models")).status_code == 503
        assert (await here.client.get("/health")).status_code == 503
