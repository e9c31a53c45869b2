"""Messages survive their bytes, and no bytes get anything but a message or a refusal."""

import math
import random
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.golden_messages import MESSAGES, folder, payloads
from core.wire_strategies import wire
from kvcourier.config import Limits
from kvcourier.core.messages import (
    PROTOCOL_VERSION,
    REGISTRATION_PREFIX,
    AnyMessage,
    Fenced,
    HoldName,
    Landed,
    Register,
    Renewed,
    RenewItem,
    decode,
    encode,
    hold_name,
    sender_fields,
)
from kvcourier.errors import RemoteProtocolError
from kvcourier.ids import (
    EngineId,
    HoldId,
    Incarnation,
    PeerRank,
    Rank,
    RequestId,
    TransferId,
    TransferKey,
)

KINDS = get_args(AnyMessage)
LIMITS = Limits()
FUZZ = settings(max_examples=300)


def is_taken(payload: bytes, limits: Limits = LIMITS) -> bool:
    """Whether the bytes are a message; anything but a message or a refusal escapes."""
    try:
        message = decode(payload, limits)
    except RemoteProtocolError as error:
        assert str(error)
        return False
    assert isinstance(message, KINDS)
    assert decode(encode(message), limits) == message
    return True


# Round trips.


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_decode_undoes_encode(kind):
    @given(message=wire(kind))
    @settings(max_examples=60)
    def check(message):
        decoded = decode(encode(message), LIMITS)
        assert decoded == message
        assert type(decoded) is kind

    check()


def test_a_registration_starts_like_vllms():
    assert encode(MESSAGES["register"]).startswith(b"PUSH_REG:")
    assert not encode(MESSAGES["landed"]).startswith(b"PUSH_REG:")
    bare = encode(MESSAGES["register"]).removeprefix(REGISTRATION_PREFIX)
    assert decode(bare, LIMITS) == MESSAGES["register"]


def test_identities_keep_their_fields():
    peer = PeerRank(EngineId("e"), Incarnation("i"), Rank(2, 3))
    assert sender_fields(peer).peer() == peer
    name = hold_name(
        transfer_id=TransferId("t"), part=4, request_id=RequestId("r"), hold_id=HoldId("h")
    )
    assert (name.transfer_id, name.part, name.request_id, name.hold_id) == ("t", 4, "r", "h")
    assert name.key() == TransferKey(TransferId("t"), 4)
    assert hold_name(transfer_id=None, part=0, request_id=None).key() is None


# Golden bytes.


def test_every_message_has_an_example():
    assert {type(message) for message in MESSAGES.values()} == set(KINDS)


@pytest.mark.parametrize("name", payloads())
def test_the_bytes_of_this_version_do_not_change(name):
    file = folder(PROTOCOL_VERSION) / f"{name}.bin"
    advice = (
        f"the encoding of {name} is not that of protocol version {PROTOCOL_VERSION}. Instances of "
        "one version must understand each other: undo the change, or raise PROTOCOL_VERSION in "
        "core/messages.py, note why beside it, and run python tests/core/golden_messages.py"
    )
    assert file.exists(), f"{file} is missing: {advice}"
    found, expected = payloads()[name], file.read_bytes()
    assert found == expected, (
        f"{advice}\nfound    {_readable(found)}\nexpected {_readable(expected)}"
    )


@pytest.mark.parametrize("name", MESSAGES)
def test_the_bytes_of_this_version_are_understood(name):
    payload = (folder(PROTOCOL_VERSION) / f"{name}.bin").read_bytes()
    assert decode(payload, LIMITS) == MESSAGES[name]


def test_no_bytes_are_left_without_a_message():
    assert {file.stem for file in folder(PROTOCOL_VERSION).glob("*.bin")} == set(payloads())


def _readable(payload: bytes) -> object:
    try:
        return msgspec.msgpack.decode(payload.removeprefix(REGISTRATION_PREFIX))
    except msgspec.DecodeError:
        return payload


# Readers of another age.


@pytest.mark.parametrize("name", MESSAGES)
def test_a_reader_skips_fields_it_does_not_know(name):
    fields = _fields(name)
    fields["invented_later"] = {"nested": [1, "two", None, {"three": 3.0}]}
    for value in fields.values():
        if isinstance(value, dict):
            value["also_later"] = [[], {}]
    assert decode(msgspec.msgpack.encode(fields), LIMITS) == MESSAGES[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_fields_with_a_default_may_be_missing_and_others_not(name):
    kind = type(MESSAGES[name])
    for field in msgspec.structs.fields(kind):
        fields = _fields(name)
        # Some are left out where they have their default: the bytes of before.
        fields.pop(field.encode_name, None)
        taken = is_taken(msgspec.msgpack.encode(fields))
        assert taken is not field.required, f"{name} without {field.name}"


# Damage.


@pytest.mark.parametrize("name", MESSAGES)
def test_cut_off_at_every_length(name):
    payload = encode(MESSAGES[name])
    for length in range(len(payload)):
        assert not is_taken(payload[:length])
    assert not is_taken(payload + b"\x00"), "bytes after the end"


@pytest.mark.parametrize("name", MESSAGES)
def test_every_single_bit_flipped(name):
    payload = encode(MESSAGES[name])
    refused = 0
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        refused += not is_taken(bytes(damaged))
    assert refused > len(payload), "flips in field names and types must be refused"


@pytest.mark.slow
def test_bytes_moved_doubled_dropped_and_mixed():
    """20,000 damaged messages from a fixed seed."""
    chance = random.Random(20_000)
    originals = [encode(message) for message in MESSAGES.values()]
    taken = 0
    for _ in range(20_000):
        payload = bytearray(chance.choice(originals))
        for _ in range(chance.randint(1, 4)):
            at, to = sorted(chance.randrange(len(payload) + 1) for _ in range(2))
            match chance.randrange(5):
                case 0:
                    del payload[at:to]
                case 1:
                    payload[at:at] = payload[at:to]
                case 2:
                    payload[at:to] = chance.randbytes(to - at)
                case 3:
                    payload[at:at] = chance.choice(originals)[: to - at]
                case 4 if at < len(payload):
                    payload[at] = chance.choice([0xC0, 0xDD, 0xDF, 0xDB, 0xC6, 0xCF, 0xFF, 0xC1])
        taken += is_taken(bytes(payload))
    assert taken < 10_000, "most damage is noticed"


@pytest.mark.slow
@given(payload=st.binary(max_size=200), prefixed=st.booleans())
@FUZZ
def test_random_bytes(payload, prefixed):
    is_taken(REGISTRATION_PREFIX * prefixed + payload)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@pytest.mark.slow
@given(name=st.sampled_from(sorted(MESSAGES)), value=json_like, data=st.data())
@FUZZ
def test_any_value_in_any_field(name, value, data):
    fields = _fields(name)
    path = fields
    key = data.draw(st.sampled_from(sorted(fields)))
    if isinstance(fields[key], dict) and data.draw(st.booleans()):
        path, key = fields[key], data.draw(st.sampled_from(sorted(fields[key])))
    path[key] = value
    is_taken(msgspec.msgpack.encode(fields))


WRONG = {
    "text": ["", "x" * 257, 7, None, b"bytes", ["x"]],
    "index": [-1, 1 << 31, 1 << 63, 1.5, True, "7", None, [7]],
    "port": [0, 65536, -1, "80", None],
    "list": [None, 7, "xx", {}, [None], [-1], [[1 << 31]], [["7"]]],
    "flag": [0, 1, "true", None],
    "seconds": [-0.5, 86401.0, math.nan, math.inf, -math.inf, "30", None, True],
    "pairs": [None, [[0]], [[0, 0, 0]], [[0, -1]], [[0, 1.5]], [{"0": 0}]],
}


@pytest.mark.parametrize(
    ("name", "field", "kind"),
    [
        ("register", "request_id", "text"),
        ("register", "decode_host", "text"),
        ("register", "decode_port", "port"),
        ("register", "decode_tp_size", "index"),
        ("register", "decode_pp_size", "index"),
        ("register", "local_block_ids", "list"),
        ("register", "first_token", "index"),
        ("register", "num_tokens", "index"),
        ("register", "consumers", "pairs"),
        ("register", "epoch", "index"),
        ("landed", "route", "index"),
        ("fail", "held", "flag"),
        ("fail", "quiet", "flag"),
        ("cancel", "consumers", "pairs"),
        ("collected", "read", "flag"),
        ("renew", "serial", "index"),
        ("renew", "items", "list"),
        ("renewed", "granted_s", "seconds"),
        ("renewed", "known", "list"),
        ("renewed", "refused", "list"),
        ("renewed", "finished", "list"),
        ("cancel", "for_now", "flag"),
    ],
)
def test_values_that_a_field_must_refuse(name, field, kind):
    for value in WRONG[kind]:
        fields = _fields(name)
        fields[field] = value
        assert not is_taken(msgspec.msgpack.encode(fields)), f"{name}.{field} = {value!r}"


@pytest.mark.parametrize("tag", ["", "unknown", "Register", None, 3, ["register"]])
def test_an_unknown_type_is_refused(tag):
    assert not is_taken(msgspec.msgpack.encode(_fields("fenced") | {"type": tag}))


@pytest.mark.parametrize("depth", [10, 1_000, 200_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x", b"\x81"], ids=["list", "map", "key"])
def test_nested_deeply(opening, depth):
    assert not is_taken(opening * depth)
    is_taken(in_a_field_to_skip(opening * depth + b"\xa1x" + b"\xc0" * depth))


def test_a_refusal_does_not_repeat_a_long_input():
    """A peer could fill a log with one line."""
    payload = msgspec.msgpack.encode(_fields("fenced") | {"type": "x" * 1_000_000})
    with pytest.raises(RemoteProtocolError) as caught:
        decode(payload, LIMITS)
    assert len(str(caught.value)) < 400


def test_a_field_to_skip_may_nest_within_reason():
    assert is_taken(in_a_field_to_skip(b"\x91" * 10 + b"\xc0"))
    assert not is_taken(in_a_field_to_skip(b"\x91" * 200_000 + b"\xc0"))


def in_a_field_to_skip(value: bytes) -> bytes:
    payload = encode(MESSAGES["fenced"])
    # A map of four entries; one more makes five.
    assert payload[0] == 0x84
    return b"\x85\xa5later" + value + payload[1:]


@pytest.mark.parametrize("header", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
def test_lengths_that_promise_gigabytes(header):
    assert not is_taken(header + b"\xff\xff\xff\xff")
    at = encode(MESSAGES["renew"]).index(b"\xa5items") + 6
    assert not is_taken(encode(MESSAGES["renew"])[:at] + header + b"\xff\xff\xff\xff" + b"\xc0" * 9)


@pytest.mark.parametrize("text", [b"\xa2\xff\xfe", b"\xa3\xed\xa0\x80"], ids=["bytes", "surrogate"])
def test_text_that_is_not_utf8(text):
    payload = encode(MESSAGES["fenced"])
    id_at = payload.index(b"\xafcmpl-7-0123abcd")
    assert not is_taken(payload[:id_at] + text + payload[id_at + 16 :])


# Limits.


def test_too_many_bytes():
    payload = encode(MESSAGES["fenced"])
    assert is_taken(payload, Limits(max_message_bytes=len(payload)))
    with pytest.raises(RemoteProtocolError, match=f"message of {len(payload)} bytes, at most"):
        decode(payload, Limits(max_message_bytes=len(payload) - 1))


SENDER = MESSAGES["registered"].sender


@pytest.mark.parametrize(
    ("limits", "fits", "change"),
    [
        (Limits(max_ranks=2), MESSAGES["register"], {"consumers": [(0, 0)] * 3}),
        (Limits(max_ranks=2), MESSAGES["cancel"], {"consumers": [(0, 0)] * 3}),
        (Limits(max_groups=1), MESSAGES["register"], {"local_block_ids": [[1], [2]]}),
        (Limits(max_block_ids=4), MESSAGES["register"], {"local_block_ids": [[1] * 5]}),
        (Limits(max_layers=2), MESSAGES["landed"], {"layers": [0, 1, 2]}),
        (
            Limits(max_waiting_registrations=2),
            MESSAGES["renew"],
            {"items": [RenewItem(HoldName(), "r")] * 3},
        ),
        *(
            (Limits(max_waiting_registrations=2), MESSAGES["renewed"], {field: ["r"] * 3})
            for field in ("known", "served", "unknown")
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_lists_over_their_limit_are_refused_by_name(limits, fits, change):
    assert decode(encode(fits), limits) == fits
    (field,) = change
    with pytest.raises(RemoteProtocolError, match=f"{field}: at most"):
        decode(encode(msgspec.structs.replace(fits, **change)), limits)


def test_a_message_without_layers_has_no_list_to_bound():
    landed = Landed(SENDER, "r", 0, 16)
    assert decode(encode(landed), Limits(max_layers=0)) == landed


def test_defaults_are_those_of_the_first_version():
    assert Fenced(SENDER, "r").epoch == 0
    assert Landed(SENDER, "r", 0, 1).layers is None
    assert HoldName() == HoldName(None, 0, None, None)
    assert {field.name for field in msgspec.structs.fields(Register) if not field.required} == {
        "epoch",
        "reads",
        "checks",
    }
    assert not _default(Register, "reads")
    assert _default(Landed, "continuation") is None
    assert {field.name for field in msgspec.structs.fields(Renewed) if not field.required} == {
        "refused",
        "finished",
    }


def _default(kind: type, name: str) -> object:
    (found,) = (each.default for each in msgspec.structs.fields(kind) if each.name == name)
    return found


def _fields(name: str) -> dict:
    return msgspec.msgpack.decode(encode(MESSAGES[name]).removeprefix(REGISTRATION_PREFIX))
