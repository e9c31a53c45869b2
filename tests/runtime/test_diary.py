"""Stories of a server: their clock, their names, their bounds."""

from kvcourier.config import Limits
from kvcourier.runtime.diary import CLOCK_HEADER, Diary


class Ticks:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_entries_and_the_header_are_on_one_even_clock() -> None:
    ticks = Ticks()
    diary = Diary(Limits(), ticks)
    began = float(diary.clock_header()[CLOCK_HEADER])
    diary.note("r", "queued", prompt_tokens=3)
    ticks.now += 2.5
    diary.note("r", "scheduled")
    queued, scheduled = diary.story("r")
    assert (queued["what"], queued["prompt_tokens"]) == ("queued", 3)
    assert abs(queued["at_unix_s"] - began) < 1e-5
    assert scheduled["at_unix_s"] - queued["at_unix_s"] == 2.5
    assert abs(float(diary.clock_header()[CLOCK_HEADER]) - began - 2.5) < 1e-5


def test_an_alias_finds_the_same_story_and_strangers_none() -> None:
    diary = Diary(Limits())
    diary.alias("t", "r")
    diary.note("r", "queued")
    assert diary.story("t") == diary.story("r") != []
    assert diary.story("x") == []


def test_only_the_latest_stories_are_kept() -> None:
    diary = Diary(Limits(max_stories=2, max_story_entries=4))
    for name in "abc":
        for index in range(6):
            diary.note(name, str(index))
    assert diary.story("a") == []
    assert [each["what"] for each in diary.story("c")] == ["0", "1", "4", "5"]
