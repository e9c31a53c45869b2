"""`kvcourier doctor` against real vLLM: a healthy pair, a connector that is not ours, and a pair of
which nobody has said where its side channels are."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .models import write_qwen3
from .servers import Vllm, needs_vllm, spec_of, started, tokens, visit, wait_until

pytestmark = [*needs_vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the model that all of them serve."""
    folder = tmp_path_factory.mktemp("vllm")
    write_qwen3(folder / "model")
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[Vllm, Vllm]]:
    """P and D with our connector."""
    servers = (
        Vllm("p", "kv_producer", folder / "model", folder),
        Vllm("d", "kv_consumer", folder / "model", folder),
    )
    with started(*servers):
        yield servers


@pytest.fixture(scope="module")
def theirs(pair: tuple[Vllm, Vllm], folder: Path) -> Iterator[Vllm]:
    """A D with vLLM's connector; started when the pair is up, as starting takes all cores."""
    server = Vllm("theirs", "kv_consumer", folder / "model", folder, own="NixlConnector")
    with started(server):
        yield server


@pytest.mark.parametrize("told", [True, False], ids=["as the router is told", "by URL alone"])
def test_a_healthy_pair_has_no_trouble(pair: tuple[Vllm, Vllm], told: bool) -> None:
    prefill, decode = (spec_of(one) if told else one.url for one in pair)
    code, found = visit(
        f"--prefill={prefill}",
        f"--decode={decode}",
        "--client-timeout=600",
        "--answer-timeout=60",
    )
    assert {key: told for key, told in found.items() if key[1] in ("warning", "error")} == {}
    assert code == 0
    assert found["connector", "ok"] == ["vLLM with CourierConnector"] * 2
    assert len(found["side-channel", "ok"]) == 2
    assert sum("brought the same" in each for each in found["fetch", "ok"]) == 2
    assert len(found["answers", "ok"]) == 2
    for server in pair:
        assert server.metric("vllm:nixl_num_failed_transfers_total") == 0
        wait_until(lambda server=server: server.metric("vllm:kv_cache_usage_perc") == 0, 10)
        # What was learnt from a prompt is let go of once NIXL is loaded, which on a machine that is
        # busy enough takes as long as a lease.
        assert server.metric("vllm:nixl_num_kv_expired_reqs_total") <= (0 if told else 1)


def test_without_prompts_what_was_not_asked_is_said(pair: tuple[Vllm, Vllm]) -> None:
    prefill, decode = pair
    code, found = visit(f"--prefill={prefill.url}", f"--decode={decode.url}", "--no-prompts")
    assert code == 0
    assert len(found["side-channel", "note"]) == 2


def test_vllms_own_connector_is_named_and_left_alone(pair: tuple[Vllm, Vllm], theirs: Vllm) -> None:
    prefill, _ = pair
    code, found = visit(f"--prefill={spec_of(prefill)}", f"--decode={spec_of(theirs)}")
    assert code == 1
    (evidence,) = found["connector", "error"]
    assert "vLLM with its own NixlConnector" in evidence
    assert ("side-channel", "error") not in found
    assert theirs.process.poll() is None
    prompt = list(range(5, 40))
    assert tokens(theirs.url, prompt) == tokens(prefill.url, prompt)
    assert "Traceback" not in theirs.log.read_text()
