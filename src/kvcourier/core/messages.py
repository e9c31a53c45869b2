"""Every message between two endpoints, and its bytes.

Decides fields, types, bounds and encoding. Refuses to know when a message is sent and what is
done about it. docs/protocol.md lists the messages with their version history.

Rules of change: new fields get a default; a tag is never reused; a type never changes. Readers
skip fields they do not know. Golden bytes live in tests/core/golden/.
"""

from typing import Annotated, Any

import msgspec

from kvcourier.config import Limits
from kvcourier.core.references import DIGEST_BYTES
from kvcourier.errors import RemoteProtocolError, clip
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
from kvcourier.layout.geometry import TokenSpan

PROTOCOL_VERSION = 4
"""1: first version. 2: offers have cache groups and staging memory, lists of block ids begin with
the window, packed streams, a `Landed` with a newer epoch voids older ones. 3: a `Landed` may carry
a continuation; beats, nudges; `Computed`, so that no tile waits for the end of prefill; a wanter
that registers may rather be told by `Held` what to READ. 4: a `Renew` says which blocks are READ,
and `Renewed` if they are not the hold's; a `Cancel` may be for now only, and a `Renewed` says which
prompts are finished, also unasked."""

REGISTRATION_PREFIX = b"PUSH_REG:"
"""Starts a registration's notification, as in vLLM, so that a foreign one is recognised."""

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
BlockDigest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
RankPair = tuple[Index, Index]


class Message(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=False):
    """Base of all messages; `sender` is filled by the endpoint that sends."""


class SenderFields(msgspec.Struct, frozen=True):
    """Who wrote a message: engine, incarnation and rank."""

    engine_id: Text
    incarnation: Text
    rank: RankPair

    def peer(self) -> PeerRank:
        """The sender as the core's own type."""
        return PeerRank(EngineId(self.engine_id), Incarnation(self.incarnation), Rank(*self.rank))


class HoldName(msgspec.Struct, frozen=True):
    """How a wanter names what a holder holds; the exact fields win over the others.

    `request_id` is the holder's own (pull: from its answer) or the router's (push).
    """

    transfer_id: Text | None = None
    part: Index = 0
    request_id: Text | None = None
    hold_id: Text | None = None

    def key(self) -> TransferKey | None:
        """The exact key, if the router minted one."""
        if self.transfer_id is None:
            return None
        return TransferKey(TransferId(self.transfer_id), self.part)


class Register(Message, frozen=True, tag="register", omit_defaults=True):
    """Wanter to holder (NIXL notification): write this prompt's KV into my reserved blocks.

    Acknowledged by `Registered`, resent until then, idempotent. `request_id` is the wanter's.
    `local_block_ids` cover positions from `first_token` on, one list per cache group; that of a
    group with a sliding window begins with the block of the first position needed.
    `consumers` are all ranks of the wanter that take something from the addressed holder rank;
    the holder is done with the hold when all of them are served. `reads`: write nothing, but say
    by `Held` when there is something to READ. `checks`: keep the hold until `Collected`, for I am
    going to ask by `Digest` what it sums up to.
    """

    sender: SenderFields
    name: HoldName
    request_id: Text
    decode_host: Text
    decode_port: Port
    decode_tp_size: Index
    decode_pp_size: Index
    local_block_ids: list[list[Index]]
    first_token: Index
    num_tokens: Index
    consumers: list[RankPair]
    epoch: Index = 0
    reads: bool = False
    checks: bool = False


class Registered(Message, frozen=True, tag="registered"):
    """Holder to wanter: your registration is here; a write, a `Held` or a `Fail` will follow."""

    sender: SenderFields
    request_id: Text
    epoch: Index = 0


class Landed(Message, frozen=True, tag="landed"):
    """Holder to wanter, riding on a WRITE: these tiles are now in your blocks.

    `request_id` is the wanter's. `route` numbers the routes between the two ranks, in the order
    both sides compute them (layout.routes). `layers` are global indices, None for all the route
    covers; tokens are absolute positions. With a newer `epoch` than before, all that has landed
    for this transfer from this rank is void: the prompt is computed anew. `computed`: prefill had
    finished when this was posted, so that cannot happen any more; `continuation` is then what the
    holder's engine gave for the wanter's.
    """

    sender: SenderFields
    request_id: Text
    first_token: Index
    num_tokens: Index
    route: Index = 0
    epoch: Index = 0
    layers: list[Index] | None = None
    continuation: Text | None = None
    computed: bool = False


class Computed(Message, frozen=True, tag="computed"):
    """Holder to wanter (NIXL notification): prefill has finished, and all has been posted before.

    What has landed of this `epoch` is final: the wanter has received the prompt once it has this,
    or a `Landed` that says so, and all tiles. Until then the prompt may still be computed anew, and
    be sent again into the same blocks.
    """

    sender: SenderFields
    request_id: Text
    epoch: Index = 0
    continuation: Text | None = None


class Held(Message, frozen=True, tag="held"):
    """Holder to wanter: the prompt is finished and lies in these blocks, under a lease; READ it.

    `request_id` is the wanter's. `block_ids` are the holder's, one list per cache group, of
    positions from 0 or from the group's window on. A `Renew` that names `hold_id` asks for this
    very hold; one that names none has it sent again. `continuation` as in `Landed`.
    """

    sender: SenderFields
    request_id: Text
    hold_id: Text
    block_ids: list[list[Index]]
    num_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    epoch: Index = 0
    continuation: Text | None = None


class Fail(Message, frozen=True, tag="fail"):
    """Holder to wanter: this prompt's KV will not be written.

    `held`: the holder still keeps the blocks, or computes them, so the wanter may register again,
    in another epoch, to be written to once more or to READ. `quiet`: nothing of this transfer is in
    flight, so the wanter's blocks cannot be touched any more; if false, `Fenced`
    follows when that is so.
    """

    sender: SenderFields
    request_id: Text
    reason: Annotated[str, msgspec.Meta(max_length=1024)]
    held: bool
    quiet: bool
    epoch: Index = 0


class Cancel(Message, frozen=True, tag="cancel"):
    """Wanter to holder: do not write any more; answer `Fenced` when nothing is in flight.

    Resent until answered. Also frees the holder from waiting for this rank; unless it is `for_now`:
    then the wanter has lent its blocks to somebody else, and will register again, in a later epoch.
    A prompt that is finished is served all the same, and `Renewed` says so in place of `Fenced`.
    """

    sender: SenderFields
    name: HoldName
    request_id: Text
    consumers: list[RankPair]
    epoch: Index = 0
    for_now: bool = False


class Fenced(Message, frozen=True, tag="fenced"):
    """Holder to wanter: nothing is in flight for this transfer and nothing will be posted."""

    sender: SenderFields
    request_id: Text
    epoch: Index = 0


class Collected(Message, frozen=True, tag="collected"):
    """Wanter to holder: this rank has what it wanted, or wants nothing (any more).

    `read` is true where the KV was READ, or written and checked, false where it was not needed
    (full prefix hit, request refused or aborted). The holder frees the blocks when all `consumers`
    have said so.
    """

    sender: SenderFields
    name: HoldName
    request_id: Text
    read: bool
    consumers: list[RankPair]


class ShareItem(msgspec.Struct, frozen=True):
    """Part of a prompt's KV: these global layers and KV heads, in these absolute positions. `group`
    is the holder's cache group of the layers."""

    group: Index
    layers: list[Index]
    head_start: Index
    head_stop: Index
    first_token: Index
    num_tokens: Index


class Digest(Message, frozen=True, tag="digest"):
    """Wanter to holder: what do these shares of a finished prompt sum up to in your blocks?

    Answered by `Digested`, asked again until then. `whole` asks for every cell, else for a sample;
    `seed` says which, and what each weighs (`layout.digests`). It is new for every try.
    """

    sender: SenderFields
    name: HoldName
    request_id: Text
    shares: list[ShareItem]
    whole: bool
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]


class Digested(Message, frozen=True, tag="digested"):
    """Holder to wanter: a digest for each share of the `Digest` with this seed.

    With a `reason` there are none, nor will be.
    """

    sender: SenderFields
    request_id: Text
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
    digests: list[int]
    reason: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class RenewItem(msgspec.Struct, frozen=True):
    """One hold to keep alive; `request_id` is the wanter's and comes back in the answer.

    `reads`: the wanter is going to READ it, and not to be written to. `blocks`: from where, as a
    digest of the block ids (`references.block_digest`), which hold `num_tokens` tokens.
    """

    name: HoldName
    request_id: Text
    reads: bool = False
    blocks: BlockDigest | None = None
    num_tokens: Index | None = None


class Renew(Message, frozen=True, tag="renew"):
    """Wanter to holder: heartbeat for these holds. `serial` comes back in `Renewed`.

    `host` and `port` are those of the wanter's handshake server, by which the holder can find out
    whether it still lives.
    """

    sender: SenderFields
    serial: Index
    items: list[RenewItem]
    host: Text | None = None
    port: Port | None = None


UNASKED = 0
"""The serial of a `Renewed` that answers no question; those of questions begin with 1."""


class Renewed(Message, frozen=True, tag="renewed"):
    """Holder to wanter: answer to `Renew`.

    `known` holds are kept for at least `granted_s` from when the `Renew` was *sent*, whatever
    the two clocks say: the promise starts later than the question. `served` ones are over
    because this wanter rank has everything. `unknown` ones are not held. `refused` ones are held,
    but not in the blocks that were named. One in none of the lists stands as long as was granted
    before, and no longer; or it was named before it was there, and is to be asked for again.
    `finished` ones wait for nothing but the wanter. With the serial `UNASKED` it answers nothing: a
    prompt has finished that somebody had asked for and not registered for.
    """

    sender: SenderFields
    serial: Index
    granted_s: Annotated[float, msgspec.Meta(ge=0, le=86400)]
    known: list[Text]
    served: list[Text]
    unknown: list[Text]
    refused: list[Text] = []
    finished: list[Text] = []


class Beat(Message, frozen=True, tag="beat"):
    """Between any two ranks that a transfer connects: a sign of life.

    A question is answered by one that is none, over the side channel, unless the one who is asked
    asks as well. It may come over the data path too, where a peer that is dead is known at once.
    """

    sender: SenderFields
    is_question: bool


class OpenStream(Message, frozen=True, tag="open_stream"):
    """Holder to wanter: these tiles will come packed, in parcels; grant me staging slots.

    `stream` is the holder's own number, new for each. `landed` says what is there when all
    parcels are; its bounds are checked against the registration. Parcels are counted in the
    order both sides compute (layout.packing), each of as many whole pieces as `parcel_bytes` hold.
    """

    sender: SenderFields
    stream: Index
    landed: Landed
    parcel_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    num_parcels: Index


class GrantSlots(Message, frozen=True, tag="grant_slots"):
    """Wanter to holder: write parcel `first_parcel + i` of the stream into staging slot
    `slots[i]`, once."""

    sender: SenderFields
    stream: Index
    first_parcel: Index
    slots: list[Index]


class RefuseStream(Message, frozen=True, tag="refuse_stream"):
    """Wanter to holder: no parcel of the stream is taken."""

    sender: SenderFields
    stream: Index
    reason: Annotated[str, msgspec.Meta(max_length=1024)]


class Parcel(Message, frozen=True, tag="parcel"):
    """Holder to wanter, riding on a WRITE: this parcel is in that staging slot."""

    sender: SenderFields
    stream: Index
    parcel: Index
    slot: Index


class CloseStream(Message, frozen=True, tag="close_stream"):
    """Holder to wanter: the stream ends early; nothing is in flight into these slots."""

    sender: SenderFields
    stream: Index
    unused_slots: list[Index]


class Nudge(Message, frozen=True, tag="nudge"):
    """Either way: I have posted something; look at your transport often for a moment."""

    sender: SenderFields


RuntimeMessage = OpenStream | GrantSlots | RefuseStream | Parcel | CloseStream | Nudge
"""What couriers say to each other; the endpoint's core does not see it."""

CoreMessage = (
    Register
    | Registered
    | Landed
    | Computed
    | Held
    | Fail
    | Cancel
    | Fenced
    | Collected
    | Digest
    | Digested
    | Renew
    | Renewed
    | Beat
)
AnyMessage = CoreMessage | RuntimeMessage

ON_DATA_PATH = (Register, Landed, Computed, Parcel)
"""Messages that come as NIXL notifications only. A `Cancel` and a `Beat` come both ways, all
others come over the side channel only."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def sender_fields(peer: PeerRank) -> SenderFields:
    """The wire form of a rank's identity."""
    return SenderFields(peer.engine_id, peer.incarnation, (peer.rank.pp_rank, peer.rank.tp_rank))


def span_of(landed: Landed) -> TokenSpan:
    """Positions of the tiles that a notice tells of."""
    return TokenSpan(landed.first_token, landed.first_token + landed.num_tokens)


def hold_name(
    *,
    transfer_id: TransferId | None,
    part: int,
    request_id: RequestId | None,
    hold_id: HoldId | None = None,
) -> HoldName:
    """The wire form of how a hold is named."""
    return HoldName(transfer_id, part, request_id, hold_id)


def encode(message: AnyMessage) -> bytes:
    """Bytes of a message; a registration has vLLM's prefix in front."""
    payload = _encoder.encode(message)
    return REGISTRATION_PREFIX + payload if isinstance(message, Register) else payload


def decode(payload: bytes, limits: Limits) -> AnyMessage:
    """Read a message.

    Raises:
        RemoteProtocolError: too long, malformed, of an unknown type, or a list is too long.
    """
    if len(payload) > limits.max_message_bytes:
        raise RemoteProtocolError(
            f"message of {len(payload)} bytes, at most {limits.max_message_bytes} are taken"
        )
    try:
        message = _decoder.decode(payload.removeprefix(REGISTRATION_PREFIX))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed message: {clip(str(error))}") from None
    _check_lengths(message, limits)
    return message


def _check_lengths(message: AnyMessage | ShareItem, limits: Limits) -> None:
    """Bound each list: msgspec checks types and numbers, the limits are configuration."""
    bounds: tuple[tuple[str, int], ...] = (
        ("consumers", limits.max_ranks),
        ("local_block_ids", limits.max_groups),
        ("block_ids", limits.max_groups),
        ("layers", limits.max_layers),
        ("items", limits.max_waiting_registrations),
        ("known", limits.max_waiting_registrations),
        ("served", limits.max_waiting_registrations),
        ("unknown", limits.max_waiting_registrations),
        ("shares", limits.max_layers),
        ("digests", limits.max_layers),
        ("refused", limits.max_waiting_registrations),
        ("finished", limits.max_waiting_registrations),
        ("slots", limits.max_slots),
        ("unused_slots", limits.max_slots),
    )
    for field, limit in bounds:
        value: Any = getattr(message, field, None)
        if isinstance(value, list) and len(value) > limit:
            raise RemoteProtocolError(f"{field}: at most {limit} entries, found {len(value)}")
    if isinstance(message, OpenStream):
        _check_lengths(message.landed, limits)
    if isinstance(message, Digest):
        for share in message.shares:
            _check_lengths(share, limits)
    for field in ("local_block_ids", "block_ids"):
        for group in getattr(message, field, ()):
            if len(group) > limits.max_block_ids:
                raise RemoteProtocolError(
                    f"{field}: at most {limits.max_block_ids} ids, found {len(group)}"
                )
