"""Real processes that let in only whom they know: by address, by key, and by key of the API."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import zmq.auth

from e2e.cluster import MODES, NUM_TOKENS, Server, body_of, instance_flags, running_servers, until
from engine.rig import generate, random_prompt
from kvcourier.engine.engine import Engine

CLIENT = {"Authorization": "Bearer client-key"}


@dataclass(frozen=True)
class Guarded:
    """P and D with all guards, a router in front, and an instance that none of them knows."""

    router: Server
    prefill: Server
    stranger: Server
    prefill_side_port: int


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys"
    keys.mkdir()
    for name in ("p", "d"):
        zmq.auth.create_certificates(keys, name)
    client_keys, instance_keys = folder / "client-keys", folder / "instance-keys"
    client_keys.write_text("client-key\n")
    instance_keys.write_text("instance-key\n")

    def flags(name: str, role: str) -> tuple[str, ...]:
        return (
            *instance_flags(name, role),
            f"--api-key-file={instance_keys}",
            f"--side-channel-key={keys / name}.key_secret",
            f"--side-channel-peer-keys={keys}",
            "--side-channel-host=127.0.0.1",
            "--allow-peer=127.0.0.0/8",
        )

    with running_servers(folder) as start:
        of_prefill = flags("p", "prefill")
        prefill, decode = (
            start("prefill", "serve", *of_prefill),
            start("decode", "serve", *flags("d", "decode")),
        )
        stranger = start("stranger", "serve", *instance_flags("x", "decode"))
        router = start(
            "router",
            "route",
            f"--prefill={prefill.url}",
            f"--decode={decode.url}",
            f"--api-key-file={client_keys}",
            f"--instance-api-key-file={instance_keys}",
        )
        for each in (prefill, decode, stranger, router):
            each.wait_ready()
        (port,) = (f.split("=")[1] for f in of_prefill if f.startswith("--side-channel-port="))

        def knows_prefill() -> bool:
            answer = router.client.get(f"{router.url}/kvcourier/instances", headers=CLIENT)
            return bool(answer.json()["prefill"][0]["incarnation"])

        until(knows_prefill, "the router does not know its instances")
        yield Guarded(router, prefill, stranger, int(port))


@pytest.mark.parametrize("mode", MODES)
def test_who_is_let_in_gets_the_same_tokens_as_ever(
    guarded: Guarded, single: Engine, mode: str
) -> None:
    prompt = random_prompt(100, seed=f"guarded-{mode}")
    answer = guarded.router.post(body_of(prompt), headers=CLIENT | {"X-KV-Mode": mode})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    (expected,) = generate(single, [prompt], max_tokens=NUM_TOKENS)
    assert choice["token_ids"] == expected


def test_who_has_no_api_key_is_not(guarded: Guarded) -> None:
    for server in (guarded.router, guarded.prefill):
        for headers in (None, {"Authorization": "Bearer another"}):
            answer = server.post(body_of([1, 2, 3]), headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert server.get("/health").status_code == 200
        assert server.get("/metrics").status_code == 200


def test_an_instance_without_a_key_gets_no_kv(guarded: Guarded) -> None:
    """Where its client names P, whose address it may well know."""
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_host": "127.0.0.1",
        "remote_port": guarded.prefill_side_port,
        "transfer_id": "stolen",
    }
    prompt = random_prompt(100, seed="stolen")
    answer = guarded.stranger.post(body_of(prompt, kv_transfer_params=params))
    assert answer.status_code >= 500
    assert "side-channel keys, and this instance has none" in answer.json()["error"]["message"]
