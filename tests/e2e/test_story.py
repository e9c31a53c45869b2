"""`kvcourier story` against real processes: one timeline of router, P and D."""

import json
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from e2e.cluster import MODES, Cluster, until
from ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(300)]

# What must come before what, whatever else is told.
ORDER = {
    "pull": [
        ("router", "dispatched"),
        ("P", "queued"),
        ("P", "scheduled"),
        ("P", "prefill_finished"),
        ("router", "prefill_answered"),
        ("router", "decode_sent"),
        ("D", "queued"),
        ("D", "posted"),
        ("D", "received"),
        ("D", "first_token"),
        ("D", "answered"),
        ("router", "finished"),
    ],
    "push": [
        ("router", "decode_sent"),
        ("D", "queued"),
        ("D", "registered"),
        ("D", "received"),
        ("D", "first_token"),
        ("router", "finished"),
    ],
}


def story(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvcourier", "story", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def told(cluster: Cluster, transfer_id: str) -> dict[str, Any]:
    done = story(transfer_id, f"--router={cluster.router.url}", "--json")
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    return content


@pytest.mark.parametrize("mode", MODES)
def test_router_and_both_instances_tell_one_story_in_order(cluster: Cluster, mode: str) -> None:
    stream = cluster.router.ask([7, *range(3, 90)], mode)
    cluster.wait_idle()
    transfer_id = stream.response.headers["x-kv-transfer-id"]
    until(
        lambda: cluster.router.story(transfer_id)[-1]["what"] == "finished",
        "the router has not ended the story",
    )
    content = told(cluster, transfer_id)
    asked = {each["who"]: each for each in content["asked"]}
    assert asked.keys() == {"router", "P", "D"}
    at = {(each["who"], each["what"]): each["at_ms"] for each in reversed(content["moments"])}
    for earlier, later in pairwise(ORDER[mode]):
        # Two processes may be as far apart as both of their clocks are uncertain.
        one_clock = earlier[0] == later[0]
        slack = (
            0
            if one_clock
            else sum(asked[who]["clock_uncertainty_ms"] for who in (earlier[0], later[0]))
        )
        assert at[earlier] <= at[later] + slack, (earlier, later, content)
    moments = [each["at_ms"] for each in content["moments"]]
    assert moments == sorted(moments) and moments[0] == 0
    for each in asked.values():
        # One machine has one clock; what is off is within what the round trip leaves open.
        assert abs(each["clock_offset_ms"]) <= each["clock_uncertainty_ms"] + 1, each


def test_a_table_for_people_and_the_request_id_will_do(cluster: Cluster) -> None:
    headers = {"X-Request-Id": "who-asked"}
    body = {"model": "tiny", "prompt": [5, *range(60)], "max_tokens": 4}
    assert cluster.router.post(body, headers=headers).status_code == 200
    done = story("who-asked", f"--router={cluster.router.url}")
    assert done.returncode == 0, done.stderr
    assert "dispatched" in done.stdout and "give or take" in done.stdout
    # Instances know it by the transfer's id only, which the router tells.
    assert "prefill_finished" in done.stdout and "first_token" in done.stdout


def test_an_unknown_id_says_who_was_asked(cluster: Cluster) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    done = story(
        "no-such-transfer",
        f"--router={cluster.router.url}",
        f"--prefill={cluster.prefill.url}",
        f"--decode={nobody}",
    )
    assert done.returncode == 1
    assert done.stdout == ""
    for each in (cluster.router.url, cluster.prefill.url, nobody):
        assert each in done.stderr
    assert done.stderr.count("does not know it") == 2
    assert "cannot be reached" in done.stderr
    assert done.stderr.count("\n") == 1
