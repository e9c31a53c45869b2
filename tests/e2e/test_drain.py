"""`kvcourier drain` against real processes."""

import subprocess
import sys

from e2e.cluster import Cluster, body_of, until


def drain(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvcourier", "drain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_an_instance_is_emptied_and_taken_back(cluster: Cluster) -> None:
    cluster.router.ask([3, *range(50)], "push")
    done = drain(cluster.decode.url)
    assert done.returncode == 0, done.stderr
    try:
        assert cluster.decode.get("/drain").json()["empty"] is True
        assert cluster.decode.post(body_of([1, 2, 3], 2)).status_code == 503
    finally:
        assert drain(cluster.decode.url, "--resume").returncode == 0
    assert cluster.decode.post(body_of([1, 2, 3], 2)).status_code == 200


def test_what_still_runs_is_waited_for(cluster: Cluster) -> None:
    with cluster.prefill.streaming(range(200), num_tokens=3000) as stream:
        stream.read(1)
        assert drain(cluster.prefill.url, "--timeout=0").returncode == 1
    try:
        # The client has left, so the request ends.
        assert drain(cluster.prefill.url).returncode == 0
    finally:
        assert drain(cluster.prefill.url, "--resume").returncode == 0


def test_a_router_is_waited_for_until_it_has_answered_everybody(cluster: Cluster) -> None:
    # It looks at its instances now and then, and they were drained before.
    until(lambda: cluster.router.post(body_of([1, 2, 3], 2)).status_code == 200, "no instance")
    assert drain(cluster.router.url, "--only-wait").returncode == 0
    with cluster.router.streaming(range(200), "pull", num_tokens=3000) as stream:
        stream.read(1)
        assert stream.token_ids, stream.error
        # However long the command takes to start, the answer is not over by then.
        with cluster.decode.stopped():
            done = drain(cluster.router.url, "--only-wait", "--timeout=0")
        assert done.returncode == 1
        assert "1 calls being served" in done.stderr
    assert drain(cluster.router.url, "--only-wait").returncode == 0
    cluster.wait_idle()
