"""A push is prepared while the prompt is computed, and no engine's step waits for it."""

from typing import Any

import pytest

from e2e.cluster import BLOCK_SIZE, CHUNK_TOKENS, MODES, Cluster, until
from engine.rig import random_prompt

NUM_PROMPT_TOKENS = 100 * CHUNK_TOKENS


def test_registration_comes_before_prefill_ends(cluster: Cluster) -> None:
    answer = cluster.router.ask(random_prompt(NUM_PROMPT_TOKENS, seed="early"), "push")
    cluster.wait_idle()
    story = cluster.prefill.story(answer.response.headers["x-kv-transfer-id"])
    times = {entry["what"]: entry["at_unix_s"] for entry in reversed(story)}
    # Of each the first: tiles are posted while the prompt is computed.
    order = ("hold_begun", "registered", "posted", "prefill_finished", "sent")
    assert [times[what] for what in order] == sorted(times[what] for what in order)
    (registered,) = entries(story, "registered")
    assert registered["while_computing"] is True
    assert registered["first_token"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_couriers_post_and_engines_do_not(cluster: Cluster, mode: str) -> None:
    answer = cluster.router.ask(random_prompt(13 * BLOCK_SIZE, seed=f"courier-{mode}"), mode)
    transfer_id = answer.response.headers["x-kv-transfer-id"]
    cluster.wait_idle()
    poster, other = cluster.prefill, cluster.decode
    if mode == "pull":
        poster, other = other, poster
    until(lambda: poster.story(transfer_id), "no story of the transfer")
    posted = entries(poster.story(transfer_id), "posted")
    assert {entry["operation"] for entry in posted} == {"WRITE" if mode == "push" else "READ"}
    assert all(entry["posting_thread"].startswith("kv-courier") for entry in posted)
    assert sum(entry["bytes"] for entry in posted) == 13 * BLOCK_SIZE * bytes_per_token()
    assert entries(other.story(transfer_id), "posted") == []


def entries(story: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    """The entries of one kind."""
    return [entry for entry in story if entry["what"] == what]


def bytes_per_token() -> int:
    """2 layers, K and V, 2 heads of 16 lanes of float32."""
    return 2 * 2 * 2 * 16 * 4
