"""Incremental text: whole characters, stop strings over token borders, any batching."""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvcourier.engine.text import Detokenizer, StopFinder, TextStream

BROKEN = "\N{REPLACEMENT CHARACTER}"
deterministic = settings(derandomize=True, deadline=None, max_examples=300)

# Letters of one, two, three and four bytes, spaces, and pieces that are starts of each other.
TEXT = st.text(st.sampled_from("ab c\n.é€😀"), max_size=30)


def byte_level(tokens: list[bytes]) -> str:
    return b"".join(tokens).decode("utf-8", "replace")


def sentencepiece_like() -> Tokenizer:
    """Words with a space marker, bytes for the rest; decoding drops the first space."""
    words = ["▁a", "a", "▁", "b", "▁bc", "▁▁", ".", "<unk>"]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


SENTENCEPIECE = sentencepiece_like()
NUM_WORDS = 7
SPECIAL = SENTENCEPIECE.token_to_id("</s>")


@functools.cache
def byte_id(byte: int) -> int:
    return SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>")


def pieces(decode, tokens):
    detokenizer = Detokenizer(decode)
    result = [detokenizer.push(token) for token in tokens]
    return [*result, detokenizer.flush()]


@deterministic
@given(st.lists(st.binary(min_size=1, max_size=5), max_size=40))
def test_any_bytes_come_out_as_if_decoded_at_once(tokens):
    assert "".join(pieces(byte_level, tokens)) == byte_level(tokens)


@deterministic
@given(TEXT, st.data())
def test_valid_text_is_never_shown_broken(text, data):
    encoded = text.encode()
    cuts = data.draw(st.lists(st.integers(0, len(encoded)), max_size=30).map(sorted))
    bounds = [0, *cuts, len(encoded)]
    tokens = [encoded[a:b] for a, b in itertools.pairwise(bounds)]
    shown = pieces(byte_level, tokens)
    assert not any(BROKEN in piece for piece in shown)
    assert shown[-1] == ""  # nothing had to wait for the end
    assert "".join(shown) == text


@deterministic
@given(
    st.lists(
        st.one_of(
            st.integers(0, NUM_WORDS - 1).map(lambda word: [word]),
            st.just([SPECIAL]),
            st.sampled_from("é€😀").map(lambda char: [byte_id(byte) for byte in char.encode()]),
        ),
        max_size=30,
    )
)
def test_space_markers_and_byte_fallback(groups):
    tokens = [token for group in groups for token in group]
    decode = functools.partial(SENTENCEPIECE.decode, skip_special_tokens=True)
    shown = pieces(decode, tokens)
    assert "".join(shown) == decode(tokens)
    assert not any(BROKEN in piece for piece in shown)


def test_a_special_token_does_not_eat_the_next_space():
    decode = functools.partial(SENTENCEPIECE.decode, skip_special_tokens=True)
    ids = [SENTENCEPIECE.token_to_id("▁a"), SPECIAL, SENTENCEPIECE.token_to_id("▁bc")]
    assert "".join(pieces(decode, ids)) == "a bc"


def test_endless_garbage_is_shown_with_bounded_work():
    longest = 0

    def decode(tokens):
        nonlocal longest
        longest = max(longest, len(tokens))
        return byte_level(tokens)

    assert "".join(pieces(decode, [b"\xff"] * 2000)) == BROKEN * 2000
    assert longest < 200


def cut_naively(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first stop complete, the longest of those."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


STOPS = st.lists(st.text(st.sampled_from("ab \n"), min_size=1, max_size=4), max_size=4)


@deterministic
@given(st.lists(st.text(st.sampled_from("ab \n"), max_size=5), max_size=12), STOPS)
def test_stop_strings_are_found_wherever_the_pieces_end(parts, stops):
    finder = StopFinder(stops)
    shown = ""
    for part in parts:
        shown += finder.push(part)
        if finder.found:
            break
    shown += finder.flush()
    assert (shown, finder.found) == cut_naively("".join(parts), stops)


@deterministic
@given(TEXT, STOPS)
def test_stream_stops_at_the_first_stop_string(text, stops):
    tokens = [bytes([byte]) for byte in text.encode()]
    stream = TextStream(byte_level, stops)
    shown = "".join(stream.push(token) for token in tokens) + stream.finish()
    assert (shown, stream.stopped) == cut_naively(text, stops)


@pytest.mark.parametrize(
    ("text", "stop", "held"), [("xSTO", "STOP", "STO"), ("aab", "aac", ""), ("aaa", "aab", "aa")]
)
def test_only_a_possible_start_is_held_back(text, stop, held):
    finder = StopFinder([stop])
    assert finder.push(text) == text.removesuffix(held)
    assert finder.flush() == held


def test_min_tokens_hides_stop_strings_from_the_search():
    stream = TextStream(byte_level, ["b"], min_tokens=2)
    assert [stream.push(token) for token in (b"a", b"b", b"a", b"b")] == ["a", "b", "a", ""]
    assert stream.stopped
