"""Inputs for a decoder: noise, damaged bytes of good examples, and good trees with bad leaves.

Decides how a good input is spoilt. Refuses to know decoders.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st

_MAX_EDITS = 4
_MAX_BYTES = 1 << 20
_DEEP = (10, 200, 5_000, 100_000)
_LONG = 5_000
_HEADERS = (0xC0, 0xC1, 0xC6, 0xC9, 0xCF, 0xCB, 0xDB, 0xDD, 0xDF, 0xFF, 0x80, 0x90)
"""msgpack's beginnings of everything long, of a map and a list without entries, and of nothing."""


@dataclass(frozen=True)
class Codec:
    """How trees become bytes.

    Attributes:
        decode, encode: encode raises ValueError, TypeError or OverflowError for what it has not.
        nests: bytes that open a list, a map and a map's value, each again and again.
    """

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    nests: tuple[bytes, ...]


JSON = Codec(json.loads, lambda tree: json.dumps(tree).encode(), (b"[", b'{"x":', b'[{"":'))
MSGPACK = Codec(
    msgspec.msgpack.decode, msgspec.msgpack.encode, (b"\x91", b"\x81\xa1x", b"\x81", b"\xc7")
)

_NUMBERS = st.sampled_from(
    [
        sign * ((1 << bits) + off)
        for bits in (0, 7, 15, 16, 31, 32, 53, 62, 63, 64)
        for off in (-1, 0, 1)
        for sign in (1, -1)
    ]
)
_TEXTS = st.sampled_from(
    [
        "",
        "\x00",
        "x" * 256,
        "x" * 257,
        "x" * _LONG,
        "y" * 100_000,
        "\U0001f600" * 256,
        "\ud800",
        "../..",
        "%s{0}",
    ]
) | st.text(max_size=8)
_LEAVES = (
    st.none()
    | st.booleans()
    | _NUMBERS
    | st.sampled_from([10**25, -(10**400)])
    | st.floats()
    | _TEXTS
)
VALUES = st.one_of(
    _LEAVES,
    st.recursive(
        _LEAVES,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=6,
    ),
    st.integers(0, _LONG).flatmap(lambda size: st.just([0] * size)),
    st.integers(0, 300).flatmap(lambda size: st.just([[1]] * size)),
    st.integers(0, _LONG).flatmap(lambda size: st.just({str(key): key for key in range(size)})),
)
"""What is put in the place of a leaf or a branch."""


def inputs(examples: Sequence[bytes], codec: Codec | None) -> st.SearchStrategy[bytes]:
    """Bytes for a decoder whose good inputs are like the examples."""
    kinds = [st.binary(max_size=300), _damaged(examples, codec)]
    if codec is not None:
        # Most of what bytes can be is refused by the first look; trees get further.
        kinds += [_altered(examples, codec)] * 3
    return st.one_of(kinds)


@st.composite
def _damaged(draw: st.DrawFn, examples: Sequence[bytes], codec: Codec | None) -> bytes:
    """A good example with bytes flipped, cut off, doubled, moved from others, or deeply nested."""
    payload = bytearray(draw(st.sampled_from(examples)))
    nests = codec.nests if codec is not None else (b"[",)
    for _ in range(draw(st.integers(1, _MAX_EDITS))):
        at, to = sorted(draw(st.integers(0, len(payload))) for _ in range(2))
        match draw(st.integers(0, 7)):
            case 0:
                del payload[at:]
            case 1:
                del payload[at:to]
            case 2:
                payload[at:at] = payload[at:to]
            case 3:
                payload[at:to] = draw(st.binary(max_size=16))
            case 4:
                other = draw(st.sampled_from(examples))
                payload[at:to] = other[draw(st.integers(0, len(other))) :]
            case 5:
                payload[at:to] = draw(st.sampled_from(nests)) * draw(st.sampled_from(_DEEP))
            case 6 if payload:
                at = min(at, len(payload) - 1)
                payload[at] ^= 1 << draw(st.integers(0, 7))
            case 7 if payload:
                payload[min(at, len(payload) - 1)] = draw(st.sampled_from(_HEADERS))
    return bytes(payload)


@st.composite
def _altered(draw: st.DrawFn, examples: Sequence[bytes], codec: Codec) -> bytes:
    """A good example with anything in some places, places left out, or doubled under a new name."""
    example = draw(st.sampled_from(examples))
    tree = codec.decode(example)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(tree))
        if not places:
            break
        branch, key = draw(st.sampled_from(places))
        match draw(st.integers(0, 5)):
            case 0:
                del branch[key]
            case 1:
                other, place = draw(st.sampled_from(places))
                branch[key] = other[place] if other is not branch[key] else None
            case 2 if isinstance(branch, dict):
                branch[draw(st.text(max_size=6))] = branch[key]
            case 3 if isinstance(branch, list) and len(branch) < _LONG:
                branch *= draw(st.sampled_from((0, 2, 70, 600)))
            case _:
                branch[key] = draw(VALUES)
        # Encoded and decoded again: what is now in two places must not become a circle.
        try:
            spoilt = codec.encode(tree)
            if len(spoilt) <= _MAX_BYTES:
                example = spoilt
            tree = codec.decode(example)
        except (ValueError, TypeError, OverflowError, RecursionError):
            # The encoder has no such value; the other edits stand.
            tree = codec.decode(example)
    return example


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (branch, key) of a tree; bounded, as a spoilt tree can be large."""
    stack = [tree]
    found = 0
    while stack and found < 400:
        branch = stack.pop()
        keys: Any = ()
        if isinstance(branch, Mapping):
            keys = list(branch)
        elif isinstance(branch, list):
            keys = range(min(len(branch), 8))
        for key in keys:
            found += 1
            yield branch, key
            stack.append(branch[key])
