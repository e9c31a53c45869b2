"""Everything that reads what came from the network, each with good examples and its one refusal.

Decides what a decoder may raise, and what its result must be good for. Refuses to know how inputs
are spoilt: that is `inputs`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from core.golden_messages import FACTS, MESSAGES, OFFER, payloads
from core.test_inquiry import ABOUT, ANSWERERS
from doctor.planted import healthy, instance
from fuzz.inputs import JSON, MSGPACK, Codec
from fuzz.meter import MAX_CALLS
from kvcourier.config import Binding, Limits, TransferMode
from kvcourier.core import inquiry
from kvcourier.core.handshake import (
    HandshakeAccepted,
    HandshakeRefused,
    answer,
    check_offer,
    read_answer,
)
from kvcourier.core.messages import REGISTRATION_PREFIX, decode, encode
from kvcourier.core.params import HoldIntent, PullIntent, PushIntent, parse_params
from kvcourier.core.peers import Peer
from kvcourier.doctor.checks import judge
from kvcourier.doctor.facts import Role
from kvcourier.errors import (
    HandshakeRejected,
    MappingError,
    ParamsError,
    RemoteProtocolError,
)
from kvcourier.ids import EngineId, InstanceAddress, Rank, RequestId, TransferId
from kvcourier.layout import instance_geometries
from kvcourier.router.config import ConversationLimits, Coordinates
from kvcourier.router.conversations import Conversations, read_state
from kvcourier.router.instances import parse_instance_info
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
    read_handoff,
    read_object,
)
from kvcourier.runtime.engine_link import (
    Abort,
    AdvancePrefill,
    AnyCall,
    BeginHold,
    Decline,
    Expect,
    FinishPrefill,
    Receive,
    RollBack,
    decode_call,
    new_token,
)
from kvcourier.story.accounts import read_entries
from layout_builders import model_cache, one_group

LIMITS = Limits()
P = EngineId("prefill-0")
_LONGEST_REFUSAL = 1_000
_LONGEST_REASONS = 70_000
"""A peer may give 64 reasons of 1,024 characters."""

HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-0",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_request_id": "cmpl-1",
    "remote_block_ids": [[7, 0, 3]],
    "remote_num_tokens": 40,
    "remote_hold_id": "life:1",
    "remote_incarnation": "life",
    "remote_continuation": "1:2",
    "tp_size": 2,
    "pp_size": 3,
    "transfer_id": "t1",
    "part": 4,
}
EARLY = {
    key: value
    for key, value in HANDOFF.items()
    if key not in ("remote_block_ids", "remote_hold_id", "remote_incarnation")
} | {"transfer_mode": "pull"}
HOLD = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t1", "part": 3}
HISTORY = HANDOFF | {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_ttl_s": 60.0,
    "remote_digest_tokens": 16,
    "remote_digests": "AAAAAAAAAAAAAAAAAAAAAA==",
}
INFO = {
    "engine_id": "prefill-0",
    "incarnation": "life",
    "side_channel_host": "10.0.0.1",
    "side_channel_port": 5600,
    "tp_size": 1,
    "pp_size": 1,
    "block_size": 16,
    "modes": ["pull", "push"],
    "model": "tiny",
    "role": "prefill",
}
CALLS: Sequence[AnyCall] = (
    BeginHold("r", "life:1", "t1", 0),
    AdvancePrefill("r", [[1, 2], [3]], 20, [0, 1]),
    RollBack("r"),
    FinishPrefill("r", [[1, 2]], 20),
    Expect("r", HANDOFF),
    Receive("r", [[1, 2]], 0, 20),
    Decline("r"),
    Abort("r", [[1]]),
)
COMPLETION = {
    "model": "tiny",
    "prompt": [1, 2, 3],
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 7,
    "n": 1,
    "stop": ["x", "yz"],
    "stop_token_ids": [4, 5],
    "min_tokens": 1,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "kv_transfer_params": None,
    "logit_bias": {},
    "response_format": {"type": "text"},
}
CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"},
    ],
    "max_completion_tokens": 4,
}
BODIES = [
    COMPLETION,
    CHAT,
    {"prompt": ["one", "two"]},
    {"prompt": [[1], [2, 3]], "n": 2},
    {"prompt": "hi", "kv_transfer_params": HANDOFF},
    {"prompt": "hi", "kv_transfer_params": HOLD},
]


@dataclass(frozen=True)
class Target:
    """One decoder.

    Attributes:
        examples: good inputs.
        codec: how they can be taken apart; None for text.
        feed: reads one input; whether it was taken. Raises nothing, whatever it is.
        max_calls: what the shortest input may cost.
    """

    name: str
    examples: Sequence[bytes]
    codec: Codec | None
    feed: Callable[[bytes], bool]
    max_calls: int = MAX_CALLS


def read_message(payload: bytes) -> bool:
    """A message is what its bytes say, or refused."""
    try:
        message = decode(payload, LIMITS)
    except RemoteProtocolError as error:
        return _refused(error)
    assert decode(encode(message), LIMITS) == message
    return True


def read_request(payload: bytes) -> bool:
    """Every handshake request is answered in our own words, or dropped."""
    try:
        reply = answer(payload, OFFER)
    except RemoteProtocolError as error:
        return _refused(error)
    assert msgspec.msgpack.decode(reply, type=HandshakeAccepted | HandshakeRefused)
    return True


def read_inquiry(payload: bytes) -> bool:
    """An inquiry is answered, and so is a handshake at the same place, or dropped."""
    try:
        reply = inquiry.answer(payload, OFFER, ABOUT, ANSWERERS)
    except RemoteProtocolError as error:
        return _refused(error)
    kinds = HandshakeAccepted | HandshakeRefused | inquiry.Told | inquiry.HistoryTold
    assert msgspec.msgpack.decode(reply, type=kinds)
    return True


def read_told(payload: bytes) -> bool:
    """What an instance tells a doctor is refused, or the doctor can judge it."""
    try:
        told = inquiry.read_told(payload, LIMITS.max_message_bytes)
        offer = check_offer(told.offer, LIMITS)
    except (HandshakeRejected, RemoteProtocolError) as error:
        return _refused(error)
    seen = replace(instance(Role.PREFILL), told=told, offer=offer)
    assert judge(healthy(prefill=(seen,)))
    return True


def read_story_told(payload: bytes) -> bool:
    """What a rank tells of a transfer is refused, or is entries that can be shown."""
    try:
        told = inquiry.read_story(payload, LIMITS.max_message_bytes)
    except RemoteProtocolError as error:
        return _refused(error)
    read_entries(list(told.entries))
    return True


def read_story_question(payload: bytes) -> bool:
    """A question has a key that can be looked up, or it is none."""
    key = inquiry.read_question(payload)
    return key is not None and 0 < len(key) <= 1024


def read_history(payload: bytes) -> bool:
    """What an instance tells of a turn is refused, or kept as a state or not."""
    try:
        told = inquiry.read_history(payload, LIMITS.max_message_bytes)
    except (HandshakeRejected, RemoteProtocolError) as error:
        return _refused(error)
    turns = Conversations(ConversationLimits(), lambda: 0.0)
    if turns.put("a", read_state(told or ""), "d"):
        assert turns.take("a") is not None
    return True


_OURS = one_group(instance_geometries(model_cache(), 1))


def read_offer(payload: bytes) -> bool:
    """An offer is refused, or its caches can be compared with ours, layer by layer."""
    try:
        instance = read_answer(payload, P, FACTS, LIMITS)
    except (HandshakeRejected, RemoteProtocolError) as error:
        return _refused(error)
    for ours in (_OURS, instance.geometries):
        peer = Peer(InstanceAddress(P, "h", 1))
        try:
            peer.connected(
                instance.incarnation, instance.modes, instance.geometries, ours, Rank(0, 0)
            )
        except MappingError as error:
            _refused(error)
    return True


def read_params(payload: bytes) -> bool:
    """`kv_transfer_params` are one of four things, or refused by field."""
    try:
        intent = parse_params(msgspec.json.decode(payload), LIMITS)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    except ParamsError as error:
        return _refused(error)
    assert intent is None or isinstance(intent, HoldIntent | PullIntent | PushIntent)
    return True


_TOKEN = new_token()


def read_call(payload: bytes) -> bool:
    """A scheduler's call is an event for the core, or refused; without the token it is no call."""
    assert decode_call(payload, _TOKEN, LIMITS) is None
    try:
        return decode_call(_TOKEN + payload, _TOKEN, LIMITS) is not None
    except RemoteProtocolError as error:
        return _refused(error)


def _call(mode: TransferMode, body: dict[str, object]) -> Call:
    where = Coordinates(P, "10.0.0.1", 5600)
    return Call(mode, TransferId("t"), RequestId("r"), body, coordinates=where)


def read_router_body(payload: bytes) -> bool:
    """A body that the router takes makes legs, whatever is in it."""
    try:
        body = parse_body(payload)
    except CallRefused as error:
        return _refused(error)
    for mode in TransferMode:
        call = _call(mode, body)
        assert call.coordinates is not None
        for leg in (prefill_leg(call), decode_leg(call, early_params(call, call.coordinates))):
            assert isinstance(json.loads(leg.content), dict)
    return True


def read_headers(payload: bytes) -> bool:
    """Headers are understood or refused; those that travel on can be sent."""
    lines = [line.partition(":") for line in payload.decode("latin-1").split("\n")]
    pairs = [(name.lower(), value.strip()) for name, _, value in lines]
    headers = dict(pairs)
    assert 0 < len(request_id_of(headers, lambda: "minted")) <= 128
    for name, value in forwarded_headers(pairs):
        name.encode("latin-1"), value.encode("latin-1")
    try:
        mode = mode_of(headers, TransferMode.PULL)
        assert isinstance(binding_of(headers, mode, None), Binding)
    except CallRefused as error:
        return _refused(error)
    return True


def read_prefill_answer(payload: bytes) -> bool:
    """What P answers has a handoff for D's leg, or none."""
    try:
        handoff = read_handoff(payload)
    except ValueError as error:
        return _refused(error)
    for mode in TransferMode:
        call = _call(mode, {})
        decode_leg(call, late_params(call, handoff or {}))
    return handoff is not None


def read_info(payload: bytes) -> bool:
    """What an instance says of itself is complete, or refused by key."""
    try:
        parse_instance_info(read_object(payload))
    except ValueError as error:
        return _refused(error)
    return True


def _refused(error: Exception) -> bool:
    """A refusal says why, in a sentence that can be logged and sent, however long the input was."""
    text = str(error)
    longest = _LONGEST_REASONS if isinstance(error, HandshakeRejected) else _LONGEST_REFUSAL
    assert text and len(text) < longest, f"a refusal of {len(text)} characters: {text[:80]}"
    return False


def _json(*trees: object) -> list[bytes]:
    return [json.dumps(tree).encode() for tree in trees]


MESSAGES_CODEC = Codec(
    lambda payload: msgspec.msgpack.decode(payload.removeprefix(REGISTRATION_PREFIX)),
    msgspec.msgpack.encode,
    MSGPACK.nests,
)

PURE: Sequence[Target] = (
    Target("messages", [encode(each) for each in MESSAGES.values()], MESSAGES_CODEC, read_message),
    Target("handshake request", [payloads()["handshake_request"]], MSGPACK, read_request),
    Target(
        "handshake answer",
        [payloads()["handshake_accepted"], payloads()["handshake_refused"]],
        MSGPACK,
        read_offer,
    ),
    Target("inquiry", [inquiry.inquire(), inquiry.ask_for_history("t")], MSGPACK, read_inquiry),
    Target(
        "history told",
        [msgspec.msgpack.encode(inquiry.tell_history(json.dumps(HISTORY)))],
        MSGPACK,
        read_history,
    ),
    Target("told", [inquiry.answer(inquiry.inquire(), OFFER, ABOUT)], MSGPACK, read_told),
    Target("story question", [inquiry.ask_for_story("t")], MSGPACK, read_story_question),
    Target(
        "story told",
        [inquiry.tell_story(1.0, [{"at_unix_s": 1.0, "what": "sent", "bytes": 5}])],
        MSGPACK,
        read_story_told,
    ),
    Target("kv_transfer_params", _json(HANDOFF, EARLY, HOLD), JSON, read_params),
    Target("engine calls", [msgspec.msgpack.encode(each) for each in CALLS], MSGPACK, read_call),
    Target("router: body", _json(*BODIES), JSON, read_router_body),
    Target(
        "router: headers",
        [
            b"x-request-id: a-1\nx-kv-mode: push\nx-kv-binding: early",
            b"connection: close, x-a\nx-a: 1\nauthorization: Bearer x",
        ],
        None,
        read_headers,
    ),
    Target(
        "router: answer of P",
        _json({"id": "x", "kv_transfer_params": HANDOFF}),
        JSON,
        read_prefill_answer,
    ),
    Target("router: instance info", _json(INFO), JSON, read_info),
)
"""Those that keep nothing."""
