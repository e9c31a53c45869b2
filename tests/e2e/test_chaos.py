"""A few of the cases of `make chaos`: real processes that die or stand still in mid-transfer."""

from collections.abc import Iterator

import pytest

from chaos.cases import Case, Scene, staged

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with staged(tmp_path_factory.mktemp("chaos")) as ready:
        yield ready


@pytest.mark.parametrize(
    ("whom", "phase"), [("P", "in mid-write"), ("D", "registered, not written")]
)
def test_killed(scene: Scene, whom: str, phase: str) -> None:
    finding = scene.play(Case("push", phase, "kill", whom))
    assert finding.known_s is not None and "gone" in finding.reason, finding
    assert finding.client.startswith("an error"), finding
    assert finding.next_is_right, finding


def test_a_stopped_instance_keeps_blocks_until_it_goes_on(scene: Scene) -> None:
    finding = scene.play(Case("push", "in mid-write", "stop", "P"))
    assert "silent" in finding.reason, finding
    assert finding.client.startswith("an error"), finding
    assert finding.next_is_right, finding


def test_a_busy_interpreter_is_no_death(scene: Scene) -> None:
    finding = scene.play(Case("push", "registered, not written", "seize", "P"))
    assert finding.client == "its answer", finding
    assert finding.next_is_right, finding
