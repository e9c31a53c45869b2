"""Every byte that real processes have moved over NIXL is compared, and the tokens are the right
ones."""

from collections.abc import Iterator

import pytest

from e2e.cluster import CHUNK_TOKENS, MODES, NUM_TOKENS, Cluster, running_cluster
from e2e.test_token_equality import LENGTHS, prompt_of
from engine.rig import generate
from kvcourier.engine.engine import Engine


@pytest.fixture(scope="module", params=["direct", "packed"])
def checked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster whose D compares everything, over another layout and other ranks than P's."""
    flags = {
        "prefill": ("--tp-size=2", f"--path={request.param}"),
        "decode": ("--kv-layout=HND", "--kv-integrity=all"),
    }
    with running_cluster(tmp_path_factory.mktemp("checked"), flags_by_role=flags) as cluster:
        yield cluster


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_right_and_everything_was_compared(
    checked: Cluster, single: Engine, mode: str
) -> None:
    prompts = [prompt_of(length, f"integrity-{mode}") for length in (*LENGTHS, 5 * CHUNK_TOKENS)]
    expected = generate(single, prompts, max_tokens=NUM_TOKENS)
    names = ("kvcourier_integrity_checks_total", "kvcourier:kv_received_total")
    before = [checked.decode.metric(name) for name in names]
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert checked.router.ask(prompt, mode).token_ids == tokens
    checked.wait_idle()
    compared, received = (
        checked.decode.metric(name) - count for name, count in zip(names, before, strict=True)
    )
    # A single token is computed, all else was moved.
    assert compared == received == len(prompts) - 1
    assert checked.decode.metric("kvcourier_integrity_failures_total") == 0
