"""`kv_transfer_params` from the network: three intents, or a clear refusal, never a crash."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourier.config import Limits
from kvcourier.core.params import (
    HolderAddress,
    HoldIntent,
    PullIntent,
    PushIntent,
    handoff_params,
    history_params,
    parse_params,
)
from kvcourier.core.token_proof import prove
from kvcourier.errors import ParamsError
from kvcourier.ids import EngineId, RequestId

LIMITS = Limits()
HOLD = {"do_remote_decode": True, "do_remote_prefill": False}
PUSH = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-0",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 2,
    "pp_size": 3,
    "transfer_id": "t1",
    "part": 4,
    "remote_request_id": "cmpl-1",
}
PULL = PUSH | {
    "remote_block_ids": [[7, 0, 3]],
    "remote_num_tokens": 40,
    "remote_hold_id": "life:1",
    "remote_incarnation": "life",
}
PROOF = prove(range(40))
HISTORY = PULL | {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_digests": PROOF.text,
    "remote_digest_tokens": PROOF.step,
}


def refused(params: object, field: str, limits: Limits = LIMITS) -> str:
    """The text of the refusal, which must name the field."""
    with pytest.raises(ParamsError) as caught:
        parse_params(params, limits)
    assert caught.value.field == field
    text = str(caught.value)
    assert text.startswith(f"kv_transfer_params.{field}: expected ")
    assert len(text) < 400, "a refusal does not repeat the whole input"
    text.encode()
    return text


# What is understood.


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": False, "do_remote_prefill": False},
        {"do_remote_decode": None, "do_remote_prefill": None},
        {"remote_port": "not looked at", "tp_size": -1},
    ],
)
def test_an_ordinary_request(params):
    assert parse_params(params, LIMITS) is None


def test_a_prompt_to_hold():
    assert parse_params(HOLD, LIMITS) == HoldIntent(None, 0)
    named = HOLD | {"transfer_id": "t1", "part": 3}
    assert parse_params(named, LIMITS) == HoldIntent("t1", 3)


def test_vllms_nulls_in_the_prefill_leg_are_fine():
    nulls = {
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert parse_params(HOLD | nulls, LIMITS) == HoldIntent(None, 0)


def test_kv_that_will_be_written():
    holder = HolderAddress("prefill-0", "10.0.0.1", 5600, 2, 3)
    assert parse_params(PUSH, LIMITS) == PushIntent(holder, "cmpl-1", "t1", 4)


@pytest.mark.parametrize("left_out", ["transfer_id", "remote_request_id"])
def test_one_of_the_two_names_is_enough_for_a_push(left_out):
    intent = parse_params({k: v for k, v in PUSH.items() if k != left_out}, LIMITS)
    assert isinstance(intent, PushIntent)
    assert (intent.transfer_id, intent.holder_request_id).count(None) == 1


def test_kv_to_read():
    holder = HolderAddress("prefill-0", "10.0.0.1", 5600, 2, 3)
    assert parse_params(PULL, LIMITS) == PullIntent(
        holder, "cmpl-1", ((7, 0, 3),), 40, "life:1", "life", "t1", 4
    )


def test_a_continuation_is_kept_as_it_is():
    intent = parse_params(PULL | {"remote_continuation": "7:abc"}, LIMITS)
    assert isinstance(intent, PullIntent) and intent.continuation == "7:abc"


@pytest.mark.parametrize("value", ["", "x" * 257, "a\nb", 7, ["7"]])
def test_a_continuation_is_a_short_text(value):
    with pytest.raises(ParamsError, match="remote_continuation"):
        parse_params(PULL | {"remote_continuation": value}, LIMITS)


def test_vllms_own_keys_are_enough_for_a_pull():
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 1,
        "remote_blocks_expiry_time": None,
        "dcp_size": 1,
    }
    holder = HolderAddress("e", "h", 1, 1, 1)
    assert parse_params(params, LIMITS) == PullIntent(
        holder, "r", ((1, 2),), None, None, None, None, 0
    )


@pytest.mark.parametrize(
    ("value", "groups"),
    [
        ([1, 2], ((1, 2),)),
        ([[1, 2]], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ([[]], ((),)),
        ([2**31 - 1], ((2**31 - 1,),)),
    ],
)
def test_block_ids_come_per_group_or_flat(value, groups):
    intent = parse_params(PULL | {"remote_block_ids": value}, LIMITS)
    assert isinstance(intent, PullIntent)
    assert intent.block_ids == groups


# What is refused, field by field.

TEXT = ["", 7, 1.5, True, ["x"], {"x": 1}, b"x", "x" * 257, "é" * 129, "a\nb", "a\x00b", "\x7f"]
SURROGATES = ["\ud800", "a\udfffb", "\ud83d"]
NUMBERS = [-1, 10**9, 10**30, True, False, 1.0, math.nan, math.inf, "1", [1], {}, b"1"]


@pytest.mark.parametrize("params", [[], [{}], "x", "", 0, 1, True, False, 1.5, math.nan, b"", ()])
def test_params_that_are_no_object(params):
    """CVE-2026-94623: a list where one object was expected took the scheduler down."""
    refused(params, "(whole)")


@pytest.mark.parametrize("field", ["do_remote_decode", "do_remote_prefill"])
@pytest.mark.parametrize("value", [0, 1, "true", "", [], {}, 1.0])
def test_flags_that_are_no_booleans(field, value):
    refused({field: value}, field)


def test_one_leg_does_one_thing():
    refused(PUSH | {"do_remote_decode": True}, "do_remote_prefill")


@pytest.mark.parametrize("field", ["remote_engine_id", "remote_host", "remote_port"])
@pytest.mark.parametrize("whole", [PUSH, PULL], ids=["push", "pull"])
def test_missing_coordinates_are_named(field, whole):
    """CVE-2026-94622: the scheduler died of a missing key."""
    refused({key: value for key, value in whole.items() if key != field}, field)
    refused(whole | {field: None}, field)


def test_a_pull_needs_the_holders_request_id():
    refused({k: v for k, v in PULL.items() if k != "remote_request_id"}, "remote_request_id")


def test_a_push_needs_some_name_of_the_prompt():
    nameless = {k: v for k, v in PUSH.items() if k not in ("transfer_id", "remote_request_id")}
    assert "remote_request_id" in refused(nameless, "transfer_id")


@pytest.mark.parametrize(
    ("whole", "field"),
    [
        (HOLD, "transfer_id"),
        (PUSH, "transfer_id"),
        (PUSH, "remote_request_id"),
        (PUSH, "remote_engine_id"),
        (PUSH, "remote_host"),
        (PULL, "remote_request_id"),
        (PULL, "remote_hold_id"),
        (PULL, "remote_incarnation"),
    ],
)
@pytest.mark.parametrize("value", TEXT + SURROGATES, ids=ascii)
def test_text_that_is_none_or_too_long_or_unprintable(whole, field, value):
    refused(whole | {field: value}, field)


def test_text_is_measured_in_bytes():
    assert parse_params(HOLD | {"transfer_id": "x" * 256}, LIMITS)
    assert parse_params(HOLD | {"transfer_id": "é" * 128}, LIMITS)
    refused(HOLD | {"transfer_id": "xyz"}, "transfer_id", Limits(max_id_bytes=2))


@pytest.mark.parametrize(
    ("whole", "field", "low", "high"),
    [
        (HOLD, "part", 0, LIMITS.max_parts - 1),
        (PUSH, "part", 0, LIMITS.max_parts - 1),
        (PUSH, "remote_port", 1, 65535),
        (PUSH | {"pp_size": 1}, "tp_size", 1, LIMITS.max_ranks),
        (PUSH | {"tp_size": 1}, "pp_size", 1, LIMITS.max_ranks),
        (PULL, "remote_num_tokens", 1, LIMITS.max_tokens),
    ],
)
def test_numbers_at_and_beyond_their_bounds(whole, field, low, high):
    """CVE-2026-94626: a huge tp_size was believed."""
    for value in (low, high):
        assert parse_params(whole | {field: value}, LIMITS)
    for value in (low - 1, high + 1, *NUMBERS):
        assert f"from {low} to {high}" in refused(whole | {field: value}, field)


@pytest.mark.parametrize("field", ["part", "tp_size", "pp_size", "remote_num_tokens"])
def test_optional_numbers_may_be_null(field):
    assert parse_params(PULL | {field: None}, LIMITS)


def test_the_product_of_both_sizes_is_bounded():
    assert parse_params(PUSH | {"tp_size": 32, "pp_size": 32}, LIMITS)
    assert "1025" in refused(PUSH | {"tp_size": 205, "pp_size": 5}, "tp_size")


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        "77",
        7,
        True,
        [None],
        [[None]],
        [[1], 2],
        [1, [2]],
        [[1], None],
        [[[1]]],
        [[1.0]],
        [["1"]],
        [[True]],
        [[-1]],
        [[2**31]],
        [math.nan],
        [{"0": 1}],
        [[1]] * (LIMITS.max_groups + 1),
        [0] * (LIMITS.max_groups + 1) + [[]],
    ],
    ids=lambda value: repr(value)[:30],
)
def test_block_ids_that_are_none(value):
    refused(PULL | {"remote_block_ids": value}, "remote_block_ids")


def test_block_ids_beyond_their_bounds():
    limits = Limits(max_block_ids=4, max_groups=2)
    assert parse_params(PULL | {"remote_block_ids": [[1] * 4, [1] * 4]}, limits)
    refused(PULL | {"remote_block_ids": [[1] * 5]}, "remote_block_ids", limits)
    refused(PULL | {"remote_block_ids": [[1]] * 3}, "remote_block_ids", limits)
    refused(PULL | {"remote_block_ids": [list(range(10**6))]}, "remote_block_ids")


def test_a_flat_list_may_have_as_many_ids_as_a_group():
    """A prompt of 65 blocks from a vLLM that sends one flat list is no reason for a 400."""
    many = list(range(LIMITS.max_groups + 1))
    intent = parse_params(PULL | {"remote_block_ids": many}, LIMITS)
    assert isinstance(intent, PullIntent)
    assert intent.block_ids == (tuple(many),)


@pytest.mark.parametrize("value", ["deep", 10**5000], ids=["deep list", "long number"])
def test_values_that_cannot_be_printed(value):
    if value == "deep":
        value = []
        for _ in range(100_000):
            value = [value]
    refused(PUSH | {"remote_port": value}, "remote_port")


# Anything else.

KEYS = sorted(
    {
        *HISTORY,
        "keep_history",
        "transfer_mode",
        "do_remote_prefill",
        "dcp_size",
        "remote_blocks_expiry_time",
    }
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]), max_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def is_understood(params: object) -> None:
    try:
        intent = parse_params(params, LIMITS)
    except ParamsError as error:
        str(error).encode()
    else:
        assert intent is None or isinstance(intent, HoldIntent | PullIntent | PushIntent)


@pytest.mark.slow
@given(params=anything | st.dictionaries(st.sampled_from(KEYS), anything, max_size=12))
@settings(max_examples=250)
def test_any_json_gives_an_intent_or_a_refusal(params):
    is_understood(params)


@pytest.mark.slow
@given(
    whole=st.sampled_from([HOLD, PUSH, PULL, HISTORY]),
    changes=st.dictionaries(st.sampled_from(KEYS), anything, min_size=1, max_size=3),
)
@settings(max_examples=300)
def test_good_params_with_anything_in_some_places(whole, changes):
    is_understood(whole | changes)


@pytest.mark.slow
@given(whole=st.sampled_from([HOLD, PUSH, PULL, HISTORY]), left_out=st.sets(st.sampled_from(KEYS)))
@settings(max_examples=300)
def test_good_params_with_any_keys_missing(whole, left_out):
    is_understood({key: value for key, value in whole.items() if key not in left_out})


# What is kept of earlier turns.


@pytest.mark.parametrize(("mode", "is_written"), [(None, False), ("pull", False), ("push", True)])
def test_a_prompt_to_hold_whose_beginning_is_kept_elsewhere(mode, is_written):
    intent = parse_params(HISTORY | {"transfer_mode": mode}, LIMITS)
    assert isinstance(intent, HoldIntent) and intent.history is not None
    assert (intent.transfer_id, intent.part) == ("t1", 4)
    assert intent.history.is_proven and intent.history.proof == PROOF
    source = intent.history.source
    # The names of this dispatch are those of what is held, not of what is fetched.
    assert (source.transfer_id, source.part) == (None, 0)
    assert (source.holder_request_id, source.hold_id) == ("cmpl-1", "life:1")
    assert source.is_written is is_written


@pytest.mark.parametrize(
    "left_out", ["remote_digests", "remote_hold_id", "remote_incarnation", "remote_num_tokens"]
)
def test_a_history_that_cannot_be_proven_is_one_all_the_same(left_out):
    intent = parse_params(HISTORY | {left_out: None}, LIMITS)
    assert isinstance(intent, HoldIntent) and intent.history is not None
    assert not intent.history.is_proven


def test_vllms_own_keys_are_an_unproven_history():
    own = {key: HISTORY[key] for key in HISTORY if "digest" not in key}
    intent = parse_params(own | {"remote_blocks_expiry_time": 12.5, "dcp_size": 1}, LIMITS)
    assert isinstance(intent, HoldIntent) and intent.history is not None
    assert intent.history.proof is None


@pytest.mark.parametrize("empty", [None, []])
def test_no_blocks_are_no_history(empty):
    intent = parse_params(HISTORY | {"remote_block_ids": empty}, LIMITS)
    assert intent == HoldIntent("t1", 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("remote_digests", 7),
        ("remote_digests", "no base64!"),
        ("remote_digests", "AAAA"),
        ("remote_digest_tokens", 0),
        ("remote_digest_tokens", None),
        ("remote_digest_tokens", True),
        ("remote_engine_id", None),
        ("remote_port", 0),
        ("transfer_mode", "both"),
    ],
)
def test_a_history_is_checked_field_by_field(field, value):
    with pytest.raises(ParamsError, match=field):
        parse_params(HISTORY | {field: value}, LIMITS)


@pytest.mark.parametrize("whole", [PULL, PUSH])
def test_whether_an_answer_is_kept(whole):
    for value, keeps in ((None, True), (True, True), (False, False)):
        intent = parse_params(whole | {"keep_history": value}, LIMITS)
        assert not isinstance(intent, HoldIntent) and intent is not None
        assert intent.keeps is keeps
    with pytest.raises(ParamsError, match="keep_history"):
        parse_params(whole | {"keep_history": "yes"}, LIMITS)


def test_what_a_keeper_answers_is_understood_by_the_next_turn():
    holder = HolderAddress(EngineId("d"), "h", 5601, 2, 1)
    told = handoff_params(
        holder, RequestId("r/kept"), [[3, 4]], 39, "life:2", "life", ["pull", "push"], None
    )
    params = history_params(told, 480.0, PROOF)
    intent = parse_params(params, LIMITS)
    assert isinstance(intent, HoldIntent) and intent.history is not None
    assert intent.history.is_proven and params["remote_ttl_s"] == 480.0
    assert intent.history.source.holder == holder and intent.history.source.num_tokens == 39
