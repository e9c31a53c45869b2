"""Stories stay within bounds and keep what explains a failure: the start and the latest."""

from hypothesis import given
from hypothesis import strategies as st

from kvcourier.config import Limits
from kvcourier.core.stories import StoryBook, StoryEntry

SMALL = Limits(max_story_entries=6, max_stories=3)


def whats(book: StoryBook, name: str) -> list[str]:
    return [entry.what for entry in book.story(name) or ()]


def test_entries_come_back_in_order_with_their_details():
    book = StoryBook(Limits())
    book.note("r1", 1.0, "posted", peer="d/pp0tp0", bytes=32)
    book.note("r1", 2.5, "written")
    assert book.story("r1") == [
        StoryEntry(1.0, "posted", {"peer": "d/pp0tp0", "bytes": 32}),
        StoryEntry(2.5, "written", {}),
    ]


def test_an_unknown_story_is_none():
    assert StoryBook(Limits()).story("nobody") is None


def test_a_story_is_found_by_its_alias_and_the_alias_can_move():
    book = StoryBook(Limits())
    book.note("r1", 1.0, "one")
    book.note("r2", 1.0, "two")
    book.alias("t1", "r1")
    assert whats(book, "t1") == ["one"]
    book.alias("t1", "r2")
    assert whats(book, "t1") == ["two"]


def test_what_is_handed_out_is_a_copy():
    book = StoryBook(Limits())
    book.note("r1", 1.0, "one")
    story = book.story("r1")
    assert story is not None
    story.clear()
    assert whats(book, "r1") == ["one"]


@given(num_notes=st.integers(1, 60), limit=st.integers(1, 9))
def test_an_overlong_story_loses_its_middle(num_notes, limit):
    book = StoryBook(Limits(max_story_entries=limit))
    for index in range(num_notes):
        book.note("r", float(index), str(index))
    kept = [int(what) for what in whats(book, "r")]
    assert len(kept) == min(num_notes, limit)
    assert kept == sorted(kept)
    assert kept[-1] == num_notes - 1
    head = min(num_notes, limit // 2)
    assert kept[:head] == list(range(head))


def test_the_stories_untouched_for_longest_are_dropped():
    book = StoryBook(SMALL)
    for name in ("a", "b", "c"):
        book.note(name, 0.0, "begun")
    book.note("a", 1.0, "again")
    book.note("d", 2.0, "begun")
    assert book.story("b") is None
    assert [name for name in "acd" if book.story(name)] == ["a", "c", "d"]


def test_aliases_are_bounded_too():
    book = StoryBook(SMALL)
    book.note("r", 0.0, "begun")
    for index in range(10):
        book.alias(f"t{index}", "r")
    found = [index for index in range(10) if book.story(f"t{index}")]
    assert found == [7, 8, 9]


def test_an_alias_of_a_dropped_story_finds_nothing():
    book = StoryBook(SMALL)
    book.note("r", 0.0, "begun")
    book.alias("t", "r")
    for name in ("a", "b", "c"):
        book.note(name, 1.0, "begun")
    assert book.story("t") is None


def test_a_repeated_alias_is_as_good_as_a_new_one():
    book = StoryBook(SMALL)
    book.note("r", 0.0, "begun")
    book.alias("t0", "r")
    for index in range(1, 4):
        book.alias("t0", "r")
        book.alias(f"t{index}", "r")
    assert whats(book, "t0") == ["begun"]
