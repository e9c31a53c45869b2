"""An engine's calls to couriers in other processes.

Decides the calls and their bytes. A scheduler process sends them to the courier socket of each of
its workers, so that a finished prompt is handed over at once and not with the next engine step.
Refuses to know vLLM. Calls of one scheduler arrive in order; each is proven by a token that the
worker made and told its scheduler alone.
"""

import secrets
from dataclasses import replace
from typing import Any, NewType

import msgspec
import zmq

from kvcourier.config import ChannelKeys, Limits
from kvcourier.core.events import (
    BlocksReserved,
    EngineEvent,
    HoldBegun,
    PrefillAdvanced,
    PrefillFinished,
    PrefillRolledBack,
    RequestAborted,
    WantBegun,
    WantDeclined,
    groups_of,
)
from kvcourier.core.params import HoldIntent, PullIntent, parse_params
from kvcourier.errors import LocalProtocolError, ParamsError, RemoteProtocolError, clip
from kvcourier.ids import EngineId, HoldId, RequestId, TransferId, TransferKey
from kvcourier.layout.geometry import TokenSpan
from kvcourier.runtime.channel_keys import be_client

EngineToken = NewType("EngineToken", bytes)
_TOKEN_BYTES = 32


class EngineCall(msgspec.Struct, frozen=True, tag_field="call"):
    """Base of all calls."""

    request_id: str


class BeginHold(EngineCall, frozen=True, tag="begin_hold"):
    """P: a prompt that somebody wants was accepted."""

    hold_id: str
    transfer_id: str | None
    part: int
    rebindable: bool = False


class AdvancePrefill(EngineCall, frozen=True, tag="advance_prefill"):
    """P: the KV of so many tokens is written in these blocks, for these layers, or all."""

    block_ids: list[list[int]]
    num_tokens: int
    layers: list[int] | None = None


class RollBack(EngineCall, frozen=True, tag="roll_back"):
    """P: the prompt is computed anew, in other blocks."""


class FinishPrefill(EngineCall, frozen=True, tag="finish_prefill"):
    """P: its KV is written in these blocks, which are the courier's now."""

    block_ids: list[list[int]]
    num_tokens: int
    keep_s: float | None = None


class Expect(EngineCall, frozen=True, tag="expect"):
    """D: a request whose KV somebody holds was accepted; `params` as they came.

    `is_written`: what is kept in blocks that are known is to be WRITTEN and not READ.
    """

    params: dict[str, Any]
    is_written: bool = False


class Receive(EngineCall, frozen=True, tag="receive"):
    """D: get positions [start, stop) into these blocks, which are the courier's now."""

    block_ids: list[list[int]]
    start: int
    stop: int


class Decline(EngineCall, frozen=True, tag="decline"):
    """D: nothing is needed after all."""


class Abort(EngineCall, frozen=True, tag="abort"):
    """Either side: the request has ended early.

    `block_ids`, of an unfinished prompt, are kept out of use until RELEASED.
    """

    block_ids: list[list[int]] | None = None


AnyCall = BeginHold | AdvancePrefill | RollBack | FinishPrefill | Expect | Receive | Decline | Abort

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyCall] = msgspec.msgpack.Decoder(AnyCall)


def new_token() -> EngineToken:
    """A token nobody can guess."""
    return EngineToken(secrets.token_bytes(_TOKEN_BYTES))


def decode_call(payload: bytes, token: EngineToken | None, limits: Limits) -> EngineEvent | None:
    """The core's event for a call; None if the payload is no call of our scheduler.

    Raises:
        RemoteProtocolError: the token is right and the call is not: another version of us.
    """
    if token is None or not secrets.compare_digest(payload[:_TOKEN_BYTES], token):
        return None
    try:
        return event_of(_decoder.decode(payload[_TOKEN_BYTES:]), limits)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ParamsError) as error:
        raise RemoteProtocolError(f"engine call cannot be read: {clip(str(error))}") from None


def event_of(call: AnyCall, limits: Limits) -> EngineEvent:
    """The core's event for a call. Raises ParamsError: the params of an `Expect` are unusable."""
    request_id = RequestId(call.request_id)
    match call:
        case BeginHold():
            key = TransferKey(TransferId(call.transfer_id), call.part) if call.transfer_id else None
            return HoldBegun(request_id, HoldId(call.hold_id), key, call.rebindable)
        case AdvancePrefill():
            layers = None if call.layers is None else tuple(call.layers)
            return PrefillAdvanced(request_id, groups_of(call.block_ids), call.num_tokens, layers)
        case RollBack():
            return PrefillRolledBack(request_id)
        case FinishPrefill():
            groups = groups_of(call.block_ids)
            return PrefillFinished(request_id, groups, call.num_tokens, keep_s=call.keep_s)
        case Expect():
            intent = parse_params(call.params, limits)
            if intent is None or isinstance(intent, HoldIntent):
                raise ParamsError("do_remote_prefill", "true", call.params)
            if isinstance(intent, PullIntent) and call.is_written:
                intent = replace(intent, is_written=True)
            return WantBegun(request_id, intent)
        case Receive():
            span = TokenSpan(call.start, call.stop)
            return BlocksReserved(request_id, groups_of(call.block_ids), span)
        case Decline():
            return WantDeclined(request_id)
        case Abort():
            blocks = None if call.block_ids is None else groups_of(call.block_ids)
            return RequestAborted(request_id, blocks)


class EngineLink:
    """A scheduler's way to the couriers of all its ranks; used from one thread.

    Args:
        engine_id: our instance's, as the couriers have it.
        keys: our instance's, if its couriers take only clients with keys.
    """

    def __init__(self, engine_id: EngineId, keys: ChannelKeys | None = None) -> None:
        self._engine_id = engine_id
        self._keys = keys
        self._context = zmq.Context()
        self._sockets: list[tuple[zmq.Socket[bytes], EngineToken]] = []

    def connect(self, host: str, port: int, token: EngineToken) -> None:
        """Add a rank's courier."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, 0)
        be_client(socket, self._keys, self._engine_id)
        socket.setsockopt(zmq.IPV6, ":" in host)
        socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        self._sockets.append((socket, token))

    def send(self, call: AnyCall) -> None:
        """Tell every rank; never waits.

        Raises:
            LocalProtocolError: no rank is connected yet.
        """
        if not self._sockets:
            raise LocalProtocolError("no courier is connected to this scheduler yet")
        payload = _encoder.encode(call)
        for socket, token in self._sockets:
            socket.send(token + payload, zmq.DONTWAIT)

    def close(self) -> None:
        """Close all sockets; what was sent gets a moment to leave."""
        self._context.destroy(linger=200)
