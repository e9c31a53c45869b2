"""Whatever a client, a peer or an operator gets wrong is named, and harms nobody else."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.cluster import (
    BLOCK_SIZE,
    CHUNK_TOKENS,
    MODEL,
    MODES,
    NUM_BLOCKS,
    NUM_TOKENS,
    WAIT_S,
    Cluster,
    Server,
    body_of,
    instance_flags,
    mode_header,
    running_servers,
    until,
    wait_known,
)
from e2e.pairs import Zoo
from engine.rig import generate, random_prompt, submit
from kvcourier.config import TransferMode
from kvcourier.core.params import HoldIntent
from kvcourier.engine.engine import Engine
from kvcourier.ids import TransferId
from ports import free_port

CONTEXT = 8192
VOCABULARY = 258
_NUMBERS = itertools.count()


def fresh_prompt(length: int) -> tuple[int, ...]:
    """One that no cache knows."""
    return random_prompt(length, seed=f"bad-{next(_NUMBERS)}")


@pytest.fixture
def unharmed(cluster: Cluster, single: Engine) -> Iterator[Cluster]:
    """The cluster; at the end of the test it must be idle and serve both modes."""
    yield cluster
    cluster.wait_idle()
    for mode in MODES:
        prompt = fresh_prompt(2 * BLOCK_SIZE)
        (expected,) = generate(single, [prompt], max_tokens=NUM_TOKENS)
        assert cluster.router.ask(prompt, mode).token_ids == expected
    cluster.wait_idle()


# Start-up.


@dataclass(frozen=True)
class BadStart:
    """Flags that an instance must refuse, and what its one sentence must say."""

    flags: tuple[str, ...]
    said: tuple[str, ...]


def bad_starts(cluster: Cluster) -> dict[str, BadStart]:
    taken = cluster.prefill.info()["side_channel_port"]
    fine = f"--model={MODEL}"
    return {
        "unknown model": BadStart(("--model=no-such-model",), ("no-such-model",)),
        "unshareable heads": BadStart((fine, "--tp-size=3"), ("tp", "3")),
        "tiny cache": BadStart((fine, "--num-blocks=0"), ("--num-blocks",)),
        "unknown mode": BadStart((fine, "--kv-modes=shove"), ("shove", "pull, push")),
        "port taken": BadStart(
            (fine, f"--port={cluster.prefill.port}"), (str(cluster.prefill.port), "in use")
        ),
        "side channel port taken": BadStart(
            (fine, f"--side-channel-port={taken}"), (str(taken), "side channel")
        ),
        "unknown backend": BadStart((fine, "--nixl-backend=WARP"), ("WARP",)),
    }


def test_start_up(unharmed: Cluster) -> None:
    cases = bad_starts(unharmed)
    base = [sys.executable, "-m", "kvcourier", "serve", "--port=0", "--side-channel-port=0"]
    running = {
        name: subprocess.Popen(
            [*base, *case.flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, case in cases.items()
    }
    problems = []
    for name, process in running.items():
        try:
            _, log = process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            problems.append(f"{name}: it did not end")
            continue
        missing = [word for word in cases[name].said if word.lower() not in log.lower()]
        if process.returncode != 2 or missing or "Traceback" in log:
            problems.append(f"{name}: exit code {process.returncode}, no {missing} in: {log}")
    assert not problems, "\n".join(problems)


# What any client may send.


@dataclass(frozen=True)
class BadBody:
    """A body that must be refused with this status, and words of the message."""

    body: Any
    status: int
    said: str


TOO_LONG_FOR_CACHE = NUM_BLOCKS * BLOCK_SIZE + 1
BAD_BODIES = {
    "unknown model": BadBody(body_of([1, 2], model="gpt-17"), 404, "'gpt-17'"),
    "empty text": BadBody({**body_of([]), "prompt": ""}, 400, "prompt"),
    "empty list": BadBody(body_of([]), 400, "prompt"),
    "no prompt": BadBody({"model": "tiny"}, 400, "prompt"),
    "too long for the cache": BadBody(body_of([1] * TOO_LONG_FOR_CACHE), 400, "KV cache"),
    "too long for the context": BadBody(body_of([1] * (CONTEXT + 1)), 400, "context"),
    "just too long for the context": BadBody(body_of([1] * CONTEXT), 400, "context"),
    "not in the vocabulary": BadBody(body_of([1, VOCABULARY]), 400, str(VOCABULARY)),
    "negative token": BadBody(body_of([1, -1]), 400, "-1"),
    "temperature": BadBody(body_of([1, 2], temperature=-1), 400, "temperature"),
    "no JSON": BadBody(b'{"model": "tiny", "prompt": ', 400, "JSON"),
    "no UTF-8": BadBody(b'{"prompt": "\xff\xfe"}', 400, "JSON"),
    "no object": BadBody([1, 2, 3], 400, "object"),
    "wrong type": BadBody(body_of([1, 2], temperature="hot"), 400, "temperature"),
}


@pytest.mark.parametrize("target", [*MODES, "prefill", "decode"])
@pytest.mark.parametrize("case", BAD_BODIES)
def test_bodies(cluster: Cluster, case: str, target: str) -> None:
    bad = BAD_BODIES[case]
    server: Server = cluster.router if target in MODES else getattr(cluster, target)
    mode = target if target in MODES else None
    response = server.post(bad.body, headers=mode_header(mode))
    error = response.json()["error"]
    assert response.status_code == bad.status, error
    assert bad.said in error["message"]


@pytest.mark.parametrize("mode", MODES)
def test_good_request_after_bad_ones(unharmed: Cluster, mode: str) -> None:
    for bad in BAD_BODIES.values():
        unharmed.router.post(bad.body, headers=mode_header(mode))


# kv_transfer_params that are wrong by themselves.

PULL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p",
    "remote_host": "localhost",
    "remote_port": 9,
    "remote_request_id": "r",
    "remote_block_ids": [[0, 1]],
    "remote_num_tokens": 32,
    "tp_size": 1,
    "pp_size": 1,
}
WRONG_FIELDS: tuple[tuple[str, Any], ...] = (
    ("do_remote_prefill", "yes"),
    ("do_remote_prefill", 1),
    ("do_remote_decode", "no"),
    ("remote_engine_id", None),
    ("remote_engine_id", ""),
    ("remote_engine_id", 5),
    ("remote_engine_id", "x" * 1000),
    ("remote_engine_id", "a\nb"),
    ("remote_host", None),
    ("remote_host", ["127.0.0.1"]),
    ("remote_port", None),
    ("remote_port", "5600"),
    ("remote_port", 0),
    ("remote_port", 65536),
    ("remote_port", True),
    ("remote_port", 5600.0),
    ("remote_request_id", None),
    ("remote_request_id", 7),
    ("remote_block_ids", "0, 1"),
    ("remote_block_ids", []),
    ("remote_block_ids", [[]]),
    ("remote_block_ids", [["0"]]),
    ("remote_block_ids", [[-1]]),
    ("remote_block_ids", [[2**31]]),
    ("remote_block_ids", [[*range(1 << 17), 0]]),
    ("remote_num_tokens", 0),
    ("remote_num_tokens", 31),
    ("remote_num_tokens", "32"),
    ("tp_size", 0),
    ("tp_size", 10**9),
    ("tp_size", 10**30),
    ("tp_size", "1"),
    ("pp_size", 10**9),
    ("pp_size", -1),
    ("transfer_id", 7),
    ("transfer_id", ""),
    ("remote_hold_id", 7),
    ("remote_incarnation", 7),
    ("part", 10**9),
)


def at_prefill(cluster: Cluster) -> dict[str, Any]:
    """Params that name P's true address: nobody has to wait for an answer when D declines."""
    return {**PULL, "remote_port": cluster.prefill.info()["side_channel_port"]}


def test_wrong_fields(unharmed: Cluster) -> None:
    problems = []
    right = at_prefill(unharmed)
    for name, value in WRONG_FIELDS:
        params = {**right, name: value}
        if value is None:
            del params[name]
        response = unharmed.decode.post(body_of([1] * 32, kv_transfer_params=params))
        message = response.json()["error"]["message"] if response.is_error else response.text
        if response.status_code != 400 or name not in message or len(message) > 1000:
            problems.append(f"{name}={str(value)[:40]}: {response.status_code} {message[:300]}")
    assert not problems, "\n".join(problems)


def test_two_cache_groups(unharmed: Cluster) -> None:
    params = {**at_prefill(unharmed), "remote_block_ids": [[0], [1]]}
    response = unharmed.decode.post(body_of([1] * 32, kv_transfer_params=params))
    assert "remote_block_ids" in response.json()["error"]["message"]
    assert response.status_code == 400


def test_transfer_id_in_use(unharmed: Cluster) -> None:
    params = {"do_remote_decode": True, "transfer_id": "twice"}
    with unharmed.prefill.sent(fresh_prompt(3000), num_tokens=500, kv_transfer_params=params):
        until(lambda: unharmed.prefill.metric("kvcourier_holds") == 1, "P holds nothing")
        response = unharmed.prefill.post(body_of([1] * 32, kv_transfer_params=params))
    assert "transfer_id" in response.json()["error"]["message"]
    assert response.status_code == 400


@pytest.mark.parametrize("params", ["pull", [PULL], 5, {**PULL, "do_remote_decode": True}])
def test_params_of_no_known_form(unharmed: Cluster, params: Any) -> None:
    response = unharmed.decode.post(body_of([1] * 32, kv_transfer_params=params))
    assert response.status_code == 400
    assert "kv_transfer_params" in response.json()["error"]["message"]


def test_several_answers_cannot_share_one_transfer(unharmed: Cluster) -> None:
    for fields in ({"n": 2}, {"prompt": [[1, 2], [3, 4]]}):
        body = {**body_of([1] * 32, kv_transfer_params=at_prefill(unharmed)), **fields}
        response = unharmed.decode.post(body)
        assert response.status_code == 400
        assert "kv_transfer_params" in response.json()["error"]["message"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": [[1, 2], [3, 4]]}], ids=["n", "prompts"])
def test_several_answers_through_the_router(
    unharmed: Cluster, fields: dict[str, Any], mode: str
) -> None:
    body = {**body_of([1] * 32), **fields}
    response = unharmed.router.post(body, headers=mode_header(mode))
    assert response.status_code == 400
    assert "transfer of its own" in response.json()["error"]["message"]


def test_push_needs_a_name(unharmed: Cluster) -> None:
    params = {name: PULL[name] for name in PULL if name not in NOT_FOR_PUSH}
    response = unharmed.decode.post(body_of([1] * 32, kv_transfer_params=params))
    assert response.status_code == 400
    assert "transfer_id" in response.json()["error"]["message"]


NOT_FOR_PUSH = ("remote_block_ids", "remote_num_tokens", "remote_request_id")


# kv_transfer_params that only the peer can know to be wrong.


def hand_off(cluster: Cluster, prompt: tuple[int, ...]) -> dict[str, Any]:
    """Have P compute a prompt and keep it: the params for D."""
    params = {"do_remote_decode": True, "transfer_id": f"t-{next(_NUMBERS)}"}
    response = cluster.prefill.post(body_of(prompt, 1, kv_transfer_params=params))
    assert response.status_code == 200, response.text
    handoff: dict[str, Any] = response.json()["kv_transfer_params"]
    return handoff


@dataclass(frozen=True)
class StaleField:
    """A field of good params is replaced, and the error must say so."""

    changed: dict[str, Any]
    said: str


STALE_FIELDS = {
    "block out of range": StaleField({"remote_block_ids": [[0, 1, NUM_BLOCKS]]}, "block"),
    "too few blocks": StaleField({"remote_block_ids": [[0]]}, "block"),
    "unknown hold": StaleField({"remote_hold_id": "life:99"}, "not held any more"),
    "unknown request": StaleField(
        {"remote_request_id": "nobody", "remote_hold_id": None, "transfer_id": "nobody"},
        "not held any more",
    ),
    "another life": StaleField({"remote_incarnation": "before"}, "restarted"),
    "another engine": StaleField({"remote_engine_id": "somebody"}, "somebody"),
    "nobody there": StaleField({"remote_port": 9}, "localhost:9"),
}


@pytest.mark.parametrize("case", STALE_FIELDS)
def test_stale_fields(unharmed: Cluster, single: Engine, case: str) -> None:
    prompt = fresh_prompt(3 * BLOCK_SIZE)
    good = hand_off(unharmed, prompt)
    try:
        params = {**good, **STALE_FIELDS[case].changed}
        response = unharmed.decode.post(body_of(prompt, kv_transfer_params=params))
        assert response.status_code == 503, response.text
        error = response.json()["error"]
        assert STALE_FIELDS[case].said in error["message"]
        assert error["code"] == "kv_transfer_failed"
    finally:
        # Whether or not the good one is still held, D gives right tokens or says that it is not.
        response = unharmed.decode.post(body_of(prompt, kv_transfer_params=good))
    (expected,) = generate(single, [prompt], max_tokens=NUM_TOKENS)
    if response.status_code == 200:
        assert response.json()["choices"][0]["token_ids"] == expected
    else:
        assert response.status_code == 503, response.text


def test_blocks_of_another_prompt(unharmed: Cluster, single: Engine) -> None:
    """A hold of one's own, and the block ids of somebody else's: nothing of that is ever used."""
    secret, prompt = fresh_prompt(3 * BLOCK_SIZE), fresh_prompt(3 * BLOCK_SIZE)
    others, good = hand_off(unharmed, secret), hand_off(unharmed, prompt)
    before = unharmed.prefill.metric("kvcourier_references_refused_total")
    forged = {**good, "remote_block_ids": others["remote_block_ids"]}
    response = unharmed.decode.post(body_of(prompt, kv_transfer_params=forged))
    assert response.status_code == 503, response.text
    assert "does not hold this KV in the blocks" in response.json()["error"]["message"]
    assert unharmed.prefill.metric("kvcourier_references_refused_total") > before
    # Both prompts are still held, for those who name them right.
    for own, params in ((secret, others), (prompt, good)):
        response = unharmed.decode.post(body_of(own, kv_transfer_params=params))
        (expected,) = generate(single, [own], max_tokens=NUM_TOKENS)
        assert response.json()["choices"][0]["token_ids"] == expected


def test_a_hold_that_is_yet_to_come(unharmed: Cluster) -> None:
    good = hand_off(unharmed, fresh_prompt(3 * BLOCK_SIZE))
    life, _, serial = good["remote_hold_id"].rpartition(":")
    named = {"remote_hold_id": f"{life}:{int(serial) + 1000}", "remote_request_id": "nobody"}
    forged = {**good, **named, "transfer_id": "nobody"}
    body = body_of(fresh_prompt(3 * BLOCK_SIZE), kv_transfer_params=forged)
    response = unharmed.decode.post(body)
    assert response.status_code == 503, response.text
    assert "not held any more" in response.json()["error"]["message"]
    let_go(unharmed, good)


def let_go(cluster: Cluster, params: dict[str, Any]) -> None:
    """Nobody will collect it; the cluster is to be idle again."""
    server = cluster.prefill
    server.client.delete(f"{server.url}/kvcourier/transfers/{params['transfer_id']}")


def test_the_handshake_knows_the_shape_better(unharmed: Cluster, single: Engine) -> None:
    prompt = fresh_prompt(3 * BLOCK_SIZE)
    params = {**hand_off(unharmed, prompt), "tp_size": 2, "pp_size": 3}
    response = unharmed.decode.post(body_of(prompt, kv_transfer_params=params))
    (expected,) = generate(single, [prompt], max_tokens=NUM_TOKENS)
    assert response.json()["choices"][0]["token_ids"] == expected


def test_what_was_collected_is_gone(unharmed: Cluster, single: Engine) -> None:
    prompt = fresh_prompt(3 * BLOCK_SIZE)
    params = hand_off(unharmed, prompt)
    other = fresh_prompt(3 * BLOCK_SIZE)  # not D's cache may answer the second time
    first = unharmed.decode.post(body_of(prompt, kv_transfer_params=params))
    (expected,) = generate(single, [prompt], max_tokens=NUM_TOKENS)
    assert first.json()["choices"][0]["token_ids"] == expected
    second = unharmed.decode.post(body_of(other, kv_transfer_params=params))
    assert second.status_code == 503
    assert "not held any more" in second.json()["error"]["message"]


def test_push_of_a_prompt_that_never_comes(unharmed: Cluster) -> None:
    params = unharmed.prefill.early_params("never")
    with unharmed.decode.sent(fresh_prompt(CHUNK_TOKENS), kv_transfer_params=params):
        until(
            lambda: unharmed.prefill.metric("kvcourier_waiting_registrations") == 1,
            "P does not know the registration",
        )


# Instances that do not fit together, or are not there.


@dataclass(frozen=True)
class Misfits:
    """Routers in front of instances with something wrong."""

    pull_only: Server
    in_front_of_pull_only: Server
    without_prefill: Server
    without_decode: Server


@pytest.fixture(scope="module")
def misfits(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Misfits]:
    with running_servers(tmp_path_factory.mktemp("misfits")) as start:
        pull_only = start(
            "pull-only",
            "serve",
            *instance_flags("pull-only", "prefill"),
            "--kv-modes=pull",
            "--kv-lease-duration=1",
        )
        nobody = f"http://127.0.0.1:{free_port()}"

        def router(name: str, prefill: str, decode: str) -> Server:
            return start(name, "route", f"--prefill={prefill}", f"--decode={decode}")

        found = Misfits(
            pull_only,
            router("in-front-of-pull-only", pull_only.url, cluster.decode.url),
            router("without-prefill", nobody, cluster.decode.url),
            router("without-decode", pull_only.url, nobody),
        )
        for server in (pull_only, found.without_prefill, found.without_decode):
            server.wait_ready()
        found.in_front_of_pull_only.wait_ready()
        wait_known(found.in_front_of_pull_only)
        yield found


def test_push_router_in_front_of_a_pull_only_instance(
    unharmed: Cluster, misfits: Misfits, single: Engine
) -> None:
    prompt = fresh_prompt(3 * BLOCK_SIZE)
    response = misfits.in_front_of_pull_only.post(body_of(prompt), headers=mode_header("push"))
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "No prefill instance takes part in push."
    (expected,) = generate(single, [prompt], max_tokens=NUM_TOKENS)
    assert misfits.in_front_of_pull_only.ask(prompt, "pull").token_ids == expected
    misfits.pull_only.wait_idle()


def test_push_from_a_pull_only_instance(unharmed: Cluster, misfits: Misfits) -> None:
    params = misfits.pull_only.early_params("wrong-mode")
    body = body_of(fresh_prompt(3 * BLOCK_SIZE), kv_transfer_params=params)
    response = unharmed.decode.post(body)
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert "mode" in message and "push" in message and "pull" in message
    misfits.pull_only.wait_idle()


@pytest.mark.parametrize("mode", MODES)
def test_no_prefill_instance(unharmed: Cluster, misfits: Misfits, mode: str) -> None:
    router = misfits.without_prefill
    response = router.post(body_of(fresh_prompt(40)), headers=mode_header(mode))
    assert response.status_code in (502, 503)
    assert instance_of(router, "prefill") in response.json()["error"]["message"]


def test_prefill_is_freed_when_only_decode_refuses(unharmed: Cluster, misfits: Misfits) -> None:
    before = misfits.pull_only.metric("kvcourier_leases_expired_total")
    body = body_of(fresh_prompt(3 * BLOCK_SIZE), num_tokens=0)
    response = misfits.in_front_of_pull_only.post(body)
    assert response.status_code == 400
    assert "max_tokens" in response.json()["error"]["message"]
    misfits.pull_only.wait_idle()
    assert misfits.pull_only.metric("kvcourier_leases_expired_total") == before


def test_no_decode_instance(misfits: Misfits) -> None:
    router = misfits.without_decode
    response = router.post(body_of(fresh_prompt(40)), headers=mode_header("pull"))
    assert response.status_code in (502, 503)
    assert instance_of(router, "decode") in response.json()["error"]["message"]
    misfits.pull_only.wait_idle()


def instance_of(router: Server, side: str) -> str:
    """The address of the router's only instance of this side."""
    (instance,) = router.get("/kvcourier/instances").json()[side]
    return str(instance["url"])


@pytest.mark.parametrize("mode", MODES)
def test_prefill_with_another_model(unharmed: Cluster, zoo: Zoo, mode: str) -> None:
    other = zoo.instance("other-model")
    prompt = fresh_prompt(3 * BLOCK_SIZE)
    transfer_id = TransferId(f"other-{mode}")
    listener = submit(
        other.engine, f"r-{mode}", prompt, intent=HoldIntent(transfer_id), max_tokens=1
    )
    params = listener.finish().kv_transfer_params
    assert params is not None
    if mode == TransferMode.PUSH:
        params = {name: params[name] for name in params if name not in NOT_FOR_PUSH}
    response = unharmed.decode.post(body_of(prompt, kv_transfer_params=params))
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert "model" in message and other.endpoint.config.model in message
    assert json.loads(response.content)["error"]["code"] == "kv_transfer_failed"
