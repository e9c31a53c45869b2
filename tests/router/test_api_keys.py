"""Keys at the router: the clients', and its own towards the instances."""

import pytest

from kvcourier.api_keys import api_keys
from router.fake_instance import MODES, bounded, prompt, world

pytestmark = pytest.mark.anyio
OWN = api_keys(["client-key"])
CLIENT = {"authorization": "Bearer client-key"}


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_shows_its_key_and_the_router_another(mode: str) -> None:
    async with world(api_keys=OWN, instance_api_key="instance-key") as here, bounded():
        headers = CLIENT | {"x-kv-mode": mode}
        answer = await here.client.post("/v1/completions", json=prompt(), headers=headers)
        assert answer.status_code == 200
        for fake in (*here.prefill, *here.decode):
            (leg,) = fake.legs
            assert leg.header("authorization") == "Bearer instance-key"


async def test_who_has_no_key_reaches_no_instance() -> None:
    async with world(api_keys=OWN, instance_api_key="instance-key") as here, bounded():
        for headers in ({}, {"authorization": "Bearer instance-key"}):
            for path in ("/v1/completions", "/v1/chat/completions"):
                answer = await here.client.post(path, json=prompt(), headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            for path in ("/v1/models", "/kvcourier/instances"):
                assert (await here.client.get(path, headers=headers)).status_code == 401
        assert not any(fake.legs for fake in (*here.prefill, *here.decode))
        assert (await here.client.get("/metrics")).status_code == 200
        assert (await here.client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("settings", "passed_on"),
    [
        ({}, "Bearer client-key"),
        ({"api_keys": OWN}, None),
        ({"instance_api_key": "instance-key"}, "Bearer instance-key"),
    ],
)
async def test_a_clients_key_ends_at_a_router_that_has_keys(settings, passed_on) -> None:
    async with world(**settings) as here, bounded():
        answer = await here.client.post("/v1/completions", json=prompt(), headers=CLIENT)
        assert answer.status_code == 200
        for fake in (*here.prefill, *here.decode):
            (leg,) = fake.legs
            assert leg.header("authorization") == passed_on
