"""What the two legs carry, what a client may ask, and who is chosen: the other pure parts."""

import contextlib
import json
import string
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourier.config import Binding, Limits, TransferMode
from kvcourier.core.params import HoldIntent, PullIntent, PushIntent, parse_params
from kvcourier.ids import EngineId, RequestId, TransferId
from kvcourier.router.config import Coordinates
from kvcourier.router.intake import (
    CallRefused,
    binding_of,
    forwarded_headers,
    mode_of,
    parse_body,
    request_id_of,
)
from kvcourier.router.legs import (
    Call,
    decode_leg,
    early_params,
    late_params,
    prefill_leg,
    prefill_params,
    read_handoff,
)

repeatable = settings(derandomize=True, deadline=None)
WHERE = Coordinates(EngineId("p"), "host", 5600, 2, 3)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens"),
        *("stream", "stream_options", "temperature", "seed", "logprobs", "a_field_of_tomorrow"),
    ]
)
BODIES = st.dictionaries(FIELDS, VALUES)


def call(body: dict[str, Any], mode: TransferMode = TransferMode.PULL) -> Call:
    return Call(mode, TransferId("t"), RequestId("r"), body, (("a", "b"),), WHERE)


@repeatable
@given(BODIES)
def test_a_prefill_leg_changes_only_what_it_must(body: dict[str, Any]) -> None:
    before = json.dumps(body)
    sent = json.loads(prefill_leg(call(body)).content)
    assert sent.pop("kv_transfer_params") == prefill_params(call(body))
    assert (sent.pop("max_tokens"), sent.pop("stream")) == (1, False)
    if "max_completion_tokens" in body:
        assert sent.pop("max_completion_tokens") == 1
    changed = {"max_tokens", "max_completion_tokens", "stream", "stream_options", "min_tokens"}
    assert sent == {key: value for key, value in body.items() if key not in changed}
    assert json.dumps(body) == before


@repeatable
@given(BODIES, st.dictionaries(st.text(), VALUES))
def test_a_decode_leg_is_the_call_and_the_handoff(
    body: dict[str, Any], handoff: dict[str, Any]
) -> None:
    params = late_params(call(body), handoff)
    sent = json.loads(decode_leg(call(body), params).content)
    assert sent == body | {"kv_transfer_params": params | {"keep_history": False}}
    assert {**params, **handoff} == params | {
        key: value for key, value in handoff.items() if key == "transfer_id"
    }
    assert params["transfer_id"] is not None


def test_our_own_instances_understand_each_leg() -> None:
    limits = Limits()
    one = call({})
    assert parse_params(prefill_params(one), limits) == HoldIntent(TransferId("t"))
    for mode in TransferMode:
        early = parse_params(early_params(call({}, mode), WHERE), limits)
        assert isinstance(early, PushIntent)
        assert (early.holder.engine_id, early.holder.port) == ("p", 5600)
        assert (early.holder.tp_size, early.holder.pp_size) == (2, 3)
        assert early.transfer_id == "t"
        assert early.reads == (mode is TransferMode.PULL)
    handoff = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "p",
        "remote_request_id": "x",
        "remote_host": "host",
        "remote_port": 5600,
        "tp_size": 2,
    }
    pulled = parse_params(late_params(one, handoff), limits)
    assert isinstance(pulled, PullIntent)
    assert pulled.transfer_id == "t"
    # P's answer may name the one mode it is configured for; the call's counts.
    written = late_params(call({}, TransferMode.PUSH), handoff | {"transfer_mode": "pull"})
    late = parse_params(written, limits)
    assert isinstance(late, PushIntent) and not late.reads
    assert (late.holder, late.transfer_id) == (pulled.holder, "t")
    assert late.holder_request_id == "x"


def test_headers_of_a_leg() -> None:
    leg = prefill_leg(call({}))
    assert dict(leg.headers) == {
        "a": "b",
        "content-type": "application/json",
        "accept-encoding": "identity",
        "x-request-id": "r",
    }


def test_the_span_of_a_leg_is_in_its_headers_and_in_its_params() -> None:
    span = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "x=1"}
    one = replace(call({}), headers=(("a", "b"), ("traceparent", "the client's")))
    handoff = {"remote_block_ids": [[1]]}
    for leg in (prefill_leg(one, span), decode_leg(one, handoff, carrier=span)):
        assert [value for name, value in leg.headers if name == "traceparent"] == [
            span["traceparent"]
        ]
        assert json.loads(leg.content)["kv_transfer_params"]["traceparent"] == span["traceparent"]
    assert "kv_transfer_params" not in json.loads(decode_leg(one, {}, carrier=span).content)
    assert dict(prefill_leg(one).headers)["traceparent"] == "the client's"
    assert "traceparent" not in json.loads(prefill_leg(one).content)["kv_transfer_params"]


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"<html>", b"\xff", b"[" * 100_000])
def test_an_answer_that_is_no_object(content: bytes) -> None:
    with pytest.raises(ValueError):
        read_handoff(content)


@repeatable
@given(BODIES.filter(lambda body: not isinstance(body.get("prompt"), list)))
def test_single_calls_are_taken_as_they_are(body: dict[str, Any]) -> None:
    assert parse_body(json.dumps(body).encode()) == body


@repeatable
@given(st.binary())
def test_any_bytes_are_a_body_or_refused(raw: bytes) -> None:
    with contextlib.suppress(CallRefused):
        assert isinstance(parse_body(raw), dict)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 2}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 0}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "b"]}, "prompt"),
        ({"prompt_embeds": ["a", "b"]}, "prompt_embeds"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ],
)
def test_what_is_refused_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(CallRefused) as caught:
        parse_body(json.dumps(body).encode())
    assert caught.value.param == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        {"n": 1},
        {"n": None, "best_of": 1, "use_beam_search": False},
        {"prompt": ["a"]},
        {"prompt": [[1, 2]]},
        {"prompt": [1, 2, 3]},
        {"prompt": []},
        {"kv_transfer_params": None},
    ],
)
def test_one_prompt_in_any_form_is_taken(body: dict[str, Any]) -> None:
    assert parse_body(json.dumps(body).encode()) == body


@pytest.mark.parametrize("raw", [b'{"a": NaN}', b'{"a": -Infinity}', b"1" * 5000, b"[" * 100000])
def test_odd_json_is_refused(raw: bytes) -> None:
    with pytest.raises(CallRefused):
        parse_body(raw)


@repeatable
@given(st.text())
def test_a_request_id_is_plain_or_minted(given_id: str) -> None:
    chosen = request_id_of({"x-request-id": given_id}, lambda: "minted")
    assert chosen in (given_id, "minted")
    assert 1 <= len(chosen) <= 128
    assert set(chosen) <= set(string.ascii_letters + string.digits + "._:-")


@pytest.mark.parametrize("text", ["pull", "PUSH", " push "])
def test_a_mode_is_read(text: str) -> None:
    assert mode_of({"x-kv-mode": text}, TransferMode.PULL) == text.strip().lower()


def test_no_mode_is_the_default_and_a_wrong_one_refused() -> None:
    assert mode_of({}, TransferMode.PUSH) is TransferMode.PUSH
    with pytest.raises(CallRefused, match="pull, push"):
        mode_of({"x-kv-mode": "both"}, TransferMode.PULL)


def test_a_binding_is_read_or_follows_from_the_mode() -> None:
    pull, push = TransferMode.PULL, TransferMode.PUSH
    assert binding_of({}, pull, None) is Binding.LATE
    assert binding_of({}, push, None) is Binding.EARLY
    assert binding_of({}, push, Binding.LATE) is Binding.LATE
    assert binding_of({"x-kv-binding": " Early "}, pull, Binding.LATE) is Binding.EARLY
    with pytest.raises(CallRefused, match="early, near, late"):
        binding_of({"x-kv-binding": "soon"}, pull, None)


def test_headers_of_one_connection_stay_behind() -> None:
    given_headers = [
        ("Authorization", "Bearer k"),
        ("traceparent", "00-1"),
        ("Connection", "close, X-Hop"),
        ("X-Hop", "1"),
        ("Host", "router"),
        ("Content-Length", "9"),
        ("X-Request-Id", "r"),
        ("X-KV-Mode", "push"),
        ("X-KV-Binding", "late"),
        ("X-Data-Parallel-Rank", "9"),
        ("Transfer-Encoding", "chunked"),
    ]
    assert forwarded_headers(given_headers) == (
        ("authorization", "Bearer k"),
        ("traceparent", "00-1"),
    )
