"""Do two instances fit, and what does each need to address the other's memory?

Decides the offer an instance makes, the verdict over two offers, and their bytes. Refuses to know
sockets. The verdict is a value that lists every differing field (vllm#23587: an assertion in its
place took the server down; vllm#50620: push and pull connectors shook hands).

Decoding has two phases: the protocol version first, the rest only if it is ours, so that another
version is refused by name and not as "malformed".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Annotated

import msgspec
import numpy as np

from kvcourier.config import Limits, TransferMode
from kvcourier.core.messages import PROTOCOL_VERSION, Index, Port, RankPair, Text
from kvcourier.errors import HandshakeRejected, MappingError, RemoteProtocolError, clip
from kvcourier.ids import AgentName, EngineId, Incarnation, Rank
from kvcourier.layout import validate_cache
from kvcourier.layout.geometry import (
    CacheGeometry,
    CacheKind,
    CacheLayout,
    CachePlacement,
    GroupCache,
    GroupGeometries,
    MemoryKind,
    RankCache,
    Region,
)

Bytes63 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Facts(msgspec.Struct, frozen=True):
    """What must be equal on both sides, whatever their TP, PP, block sizes and layouts.

    The shape is the first layer's. What else must be equal, layer by layer, is looked at when the
    offers are there (layout.routes).
    """

    model: Text
    kind: CacheKind
    num_layers: Index
    num_kv_heads: Index
    head_dim: Index
    dtype: Text
    itemsize: Index
    cache_format: Annotated[str, msgspec.Meta(max_length=256)] = ""


class GroupOffer(msgspec.Struct, frozen=True):
    """One cache group's share and its place in memory; see layout.geometry for the meaning."""

    kind: CacheKind
    layers: list[Index]
    num_kv_heads: Index
    head_start: Index
    head_stop: Index
    head_dim: Index
    dtype: Text
    itemsize: Index
    block_size: Index
    num_blocks: Index
    cache_layout: CacheLayout
    window: Index | None
    num_reserved_blocks: Index
    placement_region: list[Index]
    placement_offset: list[Bytes63]
    placement_stride: list[Bytes63]


class StagingOffer(msgspec.Struct, frozen=True):
    """Where a rank takes parcels: slot i starts at `address + i * slot_bytes`."""

    address: Bytes63
    slot_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    num_slots: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    memory: MemoryKind
    device_id: Index


class RankOffer(msgspec.Struct, frozen=True):
    """How to reach one rank: its agent, its side-channel port (same host), its cache.

    Without `staging` nothing can be sent to it packed; `packs` says whether it can send so.
    """

    rank: RankPair
    agent_name: Text
    agent_metadata: bytes
    side_channel_port: Port
    groups: list[GroupOffer]
    regions: list[tuple[Bytes63, Bytes63, MemoryKind, Index]]
    staging: StagingOffer | None = None
    packs: bool = False


class Offer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything an instance tells about itself. `digests`: it answers a `Digest`."""

    engine_id: Text
    incarnation: Text
    modes: list[TransferMode]
    facts: Facts
    tp_size: Index
    pp_size: Index
    ranks: list[RankOffer]
    digests: bool = False


class HandshakeRequest(msgspec.Struct, frozen=True, tag="handshake"):
    """Asks for an instance's offer, to use it in `mode`; `expected_engine_id` is whom we seek."""

    protocol_version: int
    expected_engine_id: Text
    mode: TransferMode
    facts: Facts


class HandshakeAccepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The instance's offer."""

    protocol_version: int
    offer: Offer


class HandshakeRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Why not: one sentence per differing field."""

    protocol_version: int
    reasons: list[Annotated[str, msgspec.Meta(max_length=1024)]]


class _Header(msgspec.Struct, frozen=True):
    protocol_version: int


@dataclass(frozen=True, slots=True)
class Compatibility:
    """The verdict; compatible if and only if there are no reasons against it."""

    reasons: tuple[str, ...]

    @property
    def compatible(self) -> bool:
        """Whether the two may exchange KV."""
        return not self.reasons


@dataclass(frozen=True, slots=True, eq=False)
class RankContact:
    """One rank of a peer, checked and in our own types."""

    cache: RankCache
    agent_name: AgentName
    agent_metadata: bytes
    side_channel_port: int
    staging: StagingOffer | None
    packs: bool


@dataclass(frozen=True, slots=True, eq=False)
class PeerInstance:
    """A peer's offer, checked and in our own types."""

    engine_id: EngineId
    incarnation: Incarnation
    tp_size: int
    pp_size: int
    modes: frozenset[TransferMode]
    ranks: Mapping[Rank, RankContact]
    digests: bool = False

    @property
    def geometries(self) -> dict[Rank, GroupGeometries]:
        """The logical shape of each rank's cache groups."""
        return {rank: contact.cache.geometries for rank, contact in self.ranks.items()}


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(_Header)
_request_decoder = msgspec.msgpack.Decoder(HandshakeRequest)
_reply_decoder: msgspec.msgpack.Decoder[HandshakeAccepted | HandshakeRefused] = (
    msgspec.msgpack.Decoder(HandshakeAccepted | HandshakeRefused)
)


def judge(ours: Facts, theirs: Facts) -> Compatibility:
    """Compare all facts; the reasons name each differing field with both values."""
    return Compatibility(
        tuple(
            f"{field}: {getattr(ours, field)} here, {getattr(theirs, field)} there"
            for field in Facts.__struct_fields__
            if getattr(ours, field) != getattr(theirs, field)
        )
    )


def facts_of(
    model: str, geometries: Mapping[Rank, GroupGeometries], cache_format: str = ""
) -> Facts:
    """The facts of an instance, from what its ranks hold."""
    held = [geometry for groups in geometries.values() for geometry in groups]
    first = min(held, key=lambda geometry: min(geometry.layers))
    layers = {layer for geometry in held for layer in geometry.layers}
    return Facts(
        model=model,
        kind=first.kind,
        num_layers=len(layers),
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        dtype=first.dtype,
        itemsize=first.itemsize,
        cache_format=cache_format,
    )


def request(engine_id: EngineId, mode: TransferMode, facts: Facts) -> bytes:
    """The bytes that ask an instance for its offer."""
    return _encoder.encode(HandshakeRequest(PROTOCOL_VERSION, engine_id, mode, facts))


def answer(payload: bytes, offer: Offer) -> bytes:
    """The bytes that answer a request: our offer, or every reason against it.

    Raises:
        RemoteProtocolError: the request is malformed; drop it.
    """
    version = _version(payload)
    if version != PROTOCOL_VERSION:
        return refuse([f"protocol_version: {PROTOCOL_VERSION} here, {version} there"])
    try:
        asked = _request_decoder.decode(payload)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"malformed handshake request: {clip(str(error))}") from None
    reasons = list(judge(offer.facts, asked.facts).reasons)
    if asked.expected_engine_id != offer.engine_id:
        reasons.append(f"engine_id: {offer.engine_id} here, {asked.expected_engine_id} asked for")
    if asked.mode not in offer.modes:
        served = ", ".join(sorted(offer.modes))
        reasons.append(f"mode: {served} here, {asked.mode} asked for")
    if reasons:
        return refuse(reasons)
    return _encoder.encode(HandshakeAccepted(PROTOCOL_VERSION, offer))


def refuse(reasons: list[str]) -> bytes:
    """The bytes that refuse a request, for these reasons."""
    return _encoder.encode(HandshakeRefused(PROTOCOL_VERSION, reasons))


def read_answer(payload: bytes, engine_id: EngineId, facts: Facts, limits: Limits) -> PeerInstance:
    """Check an answer and turn it into our own types.

    Args:
        payload: what came back.
        engine_id: whom we asked for.
        facts: our own; the peer's must be equal.
        limits: bounds on ranks, layers and sizes.

    Raises:
        HandshakeRejected: refused by the peer, or by us; lists every reason.
        RemoteProtocolError: the bytes are malformed.
    """
    if len(payload) > limits.max_message_bytes:
        raise RemoteProtocolError(f"handshake answer of {len(payload)} bytes is too long")
    version = _version(payload)
    if version != PROTOCOL_VERSION:
        raise HandshakeRejected([f"protocol_version: {PROTOCOL_VERSION} here, {version} there"])
    try:
        reply = _reply_decoder.decode(payload)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"malformed handshake answer: {clip(str(error))}") from None
    if isinstance(reply, HandshakeRefused):
        said = [reason for reason in reply.reasons[:64] if reason]
        raise HandshakeRejected(said or ["refused without a reason"])
    offer = reply.offer
    reasons = list(judge(facts, offer.facts).reasons)
    if offer.engine_id != engine_id:
        reasons.append(f"engine_id: {engine_id} asked for, {offer.engine_id} answered")
    reasons += _topology_reasons(offer, limits)
    if reasons:
        raise HandshakeRejected(reasons)
    return _instance(offer, limits)


def check_offer(offer: Offer, limits: Limits) -> PeerInstance:
    """Turn an offer into our own types, whether or not it fits anybody.

    Raises:
        HandshakeRejected: it contradicts itself, or the limits; lists every reason.
    """
    reasons = _topology_reasons(offer, limits)
    if reasons:
        raise HandshakeRejected(reasons)
    return _instance(offer, limits)


def _instance(offer: Offer, limits: Limits) -> PeerInstance:
    return PeerInstance(
        engine_id=EngineId(offer.engine_id),
        incarnation=Incarnation(offer.incarnation),
        tp_size=offer.tp_size,
        pp_size=offer.pp_size,
        modes=frozenset(offer.modes),
        ranks={Rank(*rank.rank): _contact(rank, limits) for rank in offer.ranks},
        digests=offer.digests,
    )


def rank_offer(
    cache: RankCache,
    agent_name: AgentName,
    agent_metadata: bytes,
    side_channel_port: int,
    staging: StagingOffer | None = None,
    packs: bool = False,
) -> RankOffer:
    """One rank's part of an offer."""
    return RankOffer(
        rank=(cache.rank.pp_rank, cache.rank.tp_rank),
        agent_name=agent_name,
        agent_metadata=agent_metadata,
        side_channel_port=side_channel_port,
        groups=[_group_offer(group.geometry, group.placement) for group in cache.groups],
        regions=[(r.address, r.size_bytes, r.memory, r.device_id) for r in cache.regions],
        staging=staging,
        packs=packs,
    )


def _group_offer(geometry: CacheGeometry, placement: CachePlacement) -> GroupOffer:
    fields = {field.name: getattr(geometry, field.name) for field in fields_of(CacheGeometry)}
    return GroupOffer(
        **fields | {"layers": list(geometry.layers)},
        placement_region=placement.region.ravel().tolist(),
        placement_offset=placement.offset_bytes.ravel().tolist(),
        placement_stride=placement.block_stride_bytes.ravel().tolist(),
    )


def topology(ranks: Sequence[Rank]) -> tuple[int, int]:
    """(tp_size, pp_size) of a full set of ranks.

    Raises:
        MappingError: the ranks are not exactly pp_size x tp_size.
    """
    pp_size = 1 + max(rank.pp_rank for rank in ranks)
    tp_size = 1 + max(rank.tp_rank for rank in ranks)
    if len(set(ranks)) != len(ranks) or len(ranks) != tp_size * pp_size:
        raise MappingError(
            f"ranks: expected every one of pp {pp_size} x tp {tp_size}, found "
            + ", ".join(map(str, sorted(ranks)))
        )
    return tp_size, pp_size


def _topology_reasons(offer: Offer, limits: Limits) -> list[str]:
    expected = offer.tp_size * offer.pp_size
    if not 1 <= expected <= limits.max_ranks:
        return [f"ranks: 1 to {limits.max_ranks} are taken, {expected} there"]
    found = {rank.rank for rank in offer.ranks}
    wanted = {(pp, tp) for pp in range(offer.pp_size) for tp in range(offer.tp_size)}
    if len(offer.ranks) != expected or found != wanted:
        return [f"ranks: pp {offer.pp_size} x tp {offer.tp_size} announced, other ranks listed"]
    return []


def _contact(offer: RankOffer, limits: Limits) -> RankContact:
    rank = Rank(*offer.rank)
    if not offer.groups:
        raise HandshakeRejected([f"rank {rank}: expected a cache group at least, found none"])
    regions = tuple(Region(*entry) for entry in offer.regions)
    cache = RankCache(tuple(_group(rank, group, regions) for group in offer.groups))
    try:
        validate_cache(cache, limits)
    except MappingError as error:
        raise HandshakeRejected([f"rank {rank}: {error}"]) from None
    staging = offer.staging
    if staging is not None and staging.num_slots > limits.max_slots:
        raise HandshakeRejected(
            [
                f"staging of rank {rank}: at most {limits.max_slots} slots are taken, "
                f"{staging.num_slots} there"
            ]
        )
    return RankContact(
        cache,
        AgentName(offer.agent_name),
        offer.agent_metadata,
        offer.side_channel_port,
        staging,
        offer.packs,
    )


def _group(rank: Rank, offer: GroupOffer, regions: tuple[Region, ...]) -> GroupCache:
    shape = (len(offer.layers), offer.kind.num_planes)
    cells = shape[0] * shape[1]
    arrays = (offer.placement_region, offer.placement_offset, offer.placement_stride)
    if any(len(array) != cells for array in arrays):
        raise HandshakeRejected([f"placement of rank {rank}: expected {cells} entries each"])
    geometry = {field.name: getattr(offer, field.name) for field in fields_of(CacheGeometry)}
    return GroupCache(
        rank,
        CacheGeometry(**geometry | {"layers": tuple(offer.layers)}),
        CachePlacement(*(np.array(array, dtype=np.int64).reshape(shape) for array in arrays)),
        regions,
    )


def _version(payload: bytes) -> int:
    try:
        return _header_decoder.decode(payload).protocol_version
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"no kvcourier handshake: {clip(str(error))}") from None
