"""Settings of a KV endpoint and the limits on what a peer or a client may send.

Decides names, units, defaults and allowed ranges. Refuses to know where a value came from (flag,
TOML file, environment, vLLM's extra config).
"""

import dataclasses
import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcourier.allow_list import AllowList
from kvcourier.errors import ConfigError
from kvcourier.ids import EngineId


class TransferMode(enum.StrEnum):
    """Who posts: D READs (pull), or P WRITEs (push)."""

    PULL = "pull"
    PUSH = "push"


class Binding(enum.StrEnum):
    """When D learns of a prompt and reserves blocks: early, at once with P; near, when P has nearly
    computed it; or late, when it has."""

    EARLY = "early"
    NEAR = "near"
    LATE = "late"


USUAL_BINDING: Mapping[TransferMode, Binding] = {
    TransferMode.PULL: Binding.LATE,
    TransferMode.PUSH: Binding.EARLY,
}
"""What a mode means where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on everything that comes from the network.

    Attributes:
        max_id_bytes: length of a request, transfer, engine or host name.
        max_block_ids: block ids of one request in one cache group.
        max_groups: cache groups of a model.
        max_ranks: tensor-parallel size times pipeline-parallel size of an instance.
        max_parts: sub-requests under one transfer id (n > 1, several prompts).
        max_tokens: tokens of one request.
        max_layers: layers of a model.
        max_message_bytes: one message on the side channel or in a notification.
        max_waiting_registrations: registrations kept for requests not seen yet.
        max_peers: instances known at a time.
        max_slots: staging slots of a peer.
        max_streams: packed transfers under way to this rank at a time.
        max_story_entries: entries kept of one transfer's story.
        max_stories: stories of finished transfers kept.
    """

    max_id_bytes: int = 256
    max_block_ids: int = 1 << 17
    max_groups: int = 64
    max_ranks: int = 1024
    max_parts: int = 256
    max_tokens: int = 1 << 24
    max_layers: int = 1024
    max_message_bytes: int = 16 << 20
    max_waiting_registrations: int = 4096
    max_peers: int = 1024
    max_slots: int = 4096
    max_streams: int = 1024
    max_story_entries: int = 64
    max_stories: int = 512


@dataclass(frozen=True, slots=True)
class Timing:
    """Every duration of the protocol, in seconds.

    Attributes:
        kv_lease_duration: how long P keeps a finished prompt's blocks after the last sign of
            interest; vLLM's key and default.
        heartbeat_s: how often D renews. Must be at most a third of the lease.
        hold_limit_s: how long P renews the lease of a prompt for a request that has not asked for
            its KV yet, being queued on D. Two instances that each hold prompts for the other would
            else wait for each other for ever.
        handshake_timeout_s: until a handshake without an answer counts as failed.
        resend_s: until an unacknowledged registration or cancel is sent again.
        push_registration_timeout: until D gives up on a registration that was neither written
            nor refused, and on waiting for a prompt that P says nothing of; the last resort when P
            hangs. vLLM's key; its default there is 480 s.
        registration_ttl_s: how long P keeps a registration for a prompt it has not seen.
        transfer_timeout_s: until a posted operation that does not end counts as failed. Its
            memory stays quarantined.
        quarantine_limit_s: until memory that a silent peer may still touch is given back all the
            same. Longer than any write that peer could still have in flight.
        peer_idle_s: how long an unused peer stays connected.
        beat_s: how often a peer that a transfer waits for is asked for a sign of life.
        peer_silence_s: how long it may give none, before its sockets are asked and, if they are
            silent as well, its transfers fail. At least twice `beat_s`.
    """

    kv_lease_duration: float = 30.0
    heartbeat_s: float = 5.0
    hold_limit_s: float = 300.0
    handshake_timeout_s: float = 5.0
    resend_s: float = 0.5
    push_registration_timeout: float = 60.0
    registration_ttl_s: float = 60.0
    transfer_timeout_s: float = 60.0
    quarantine_limit_s: float = 300.0
    peer_idle_s: float = 600.0
    beat_s: float = 0.5
    peer_silence_s: float = 3.0

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{spec.name}: expected seconds above 0, found {value!r}")
        if self.heartbeat_s > self.kv_lease_duration / 3:
            raise ConfigError(
                f"heartbeat_s: expected at most a third of kv_lease_duration "
                f"({self.kv_lease_duration:g} s), found {self.heartbeat_s:g} s; a lease would end "
                "after two lost heartbeats"
            )
        if self.peer_silence_s < 2 * self.beat_s:
            raise ConfigError(
                f"peer_silence_s: expected at least twice beat_s ({self.beat_s:g} s), found "
                f"{self.peer_silence_s:g} s; one late answer would end every transfer"
            )


def timing_of(
    kv_lease_duration: float, push_registration_timeout: float, peer_silence_s: float
) -> Timing:
    """The durations that operators choose, and others that follow from them: a shorter lease needs
    more heartbeats, a shorter silence more beats, and nobody should have to say both.

    Raises:
        ConfigError: one of them cannot be used.
    """
    default = Timing()
    return Timing(
        kv_lease_duration=kv_lease_duration,
        heartbeat_s=_at_most(default.heartbeat_s, kv_lease_duration / 3),
        push_registration_timeout=push_registration_timeout,
        beat_s=_at_most(default.beat_s, peer_silence_s / 2),
        peer_silence_s=peer_silence_s,
    )


def _at_most(default: float, limit: float) -> float:
    """The default, or less; a limit that cannot be used is left to be refused by its own name."""
    return min(default, limit) if limit > 0 else default


class TransferPath(enum.StrEnum):
    """How blocks move: a descriptor for each run of them, or gathered into few large pieces."""

    DIRECT = "direct"
    PACKED = "packed"


class Granularity(enum.StrEnum):
    """In which parts a prompt's KV is written while it is computed, if D has registered by then.

    All at the end, after each chunk, or in the last chunk also after each layer.
    """

    REQUEST = "request"
    CHUNK = "chunk"
    LAYER = "layer"


class PathPolicy(enum.StrEnum):
    """Which path a WRITE takes: one of the two, or whichever should be faster."""

    AUTO = "auto"
    DIRECT = "direct"
    PACKED = "packed"


class Integrity(enum.StrEnum):
    """How much of what has arrived D compares with what P holds, before it says so.

    Nothing, some positions of all planes of every transfer, or every byte.
    """

    OFF = "off"
    SAMPLE = "sample"
    ALL = "all"


class Posting(enum.StrEnum):
    """Whether an engine's step goes on while a courier posts its transfers, or waits for it."""

    THREAD = "thread"
    INLINE = "inline"


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StagingConfig:
    """The packed path of one rank.

    Attributes:
        path: which path is taken for a WRITE; AUTO estimates both.
        send_bytes: staging memory of this rank for what it sends; 0: it never packs.
        receive_bytes: the same for what it receives; 0: peers cannot pack for it.
        slot_bytes: size of a slot, a multiple of 4096. Each is one large WRITE; at least two a
            direction keep the wire busy while the next is gathered.
        patience_s: how long a sender waits for the receiver's first free slot, before it takes
            the direct path instead.
    """

    path: PathPolicy = PathPolicy.AUTO
    send_bytes: int = 32 * MIB
    receive_bytes: int = 32 * MIB
    slot_bytes: int = 8 * MIB
    patience_s: float = 0.25

    def __post_init__(self) -> None:
        if self.slot_bytes < 4096 or self.slot_bytes % 4096:
            raise ConfigError(f"slot_bytes: expected a multiple of 4096, found {self.slot_bytes}")
        for name in ("send_bytes", "receive_bytes"):
            size = getattr(self, name)
            if size < 0 or 0 < size < self.slot_bytes:
                raise ConfigError(
                    f"{name}: expected 0 or at least slot_bytes ({self.slot_bytes}), found {size}"
                )
        if not 0 < self.patience_s < float("inf"):
            raise ConfigError(f"patience_s: expected seconds above 0, found {self.patience_s!r}")


@dataclass(frozen=True, slots=True)
class CourierConfig:
    """How a courier thread waits, and what NIXL it makes.

    Attributes:
        backends: NIXL backends by name, tried in this order (UCX, LIBFABRIC, ...).
        num_threads: threads for every backend that takes the option; 0 leaves NIXL's default.
        enable_prog_thread: NIXL's own progress thread. It spins, so it is off: the courier
            drives progress itself.
        poll_busy_s: pause between looks while an operation is in flight, or a peer has told of one.
        poll_idle_s: pause between looks otherwise; only what a peer's nudge did not come for waits.
        poll_stream_s: pause between polls while a packed transfer is under way; its slots turn
            over in well under a millisecond on a GPU. 0 never pauses.
        staging: the packed path.
    """

    backends: tuple[str, ...] = ("UCX",)
    num_threads: int = 0
    enable_prog_thread: bool = False
    poll_busy_s: float = 0.001
    poll_idle_s: float = 0.02
    poll_stream_s: float = 0.0002
    staging: StagingConfig = field(default_factory=StagingConfig)


@dataclass(frozen=True, slots=True)
class ChannelKeys:
    """Keys of the side channel, each 40 characters in ZMQ's encoding (Z85).

    Attributes:
        public: ours.
        secret: ours, which proves that the public one is.
        peers: the public key of every instance that we may have to do with, ours among them.
    """

    public: bytes
    secret: bytes = field(repr=False)
    peers: Mapping[EngineId, bytes]


SIDE_CHANNEL_HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
SIDE_CHANNEL_PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
DEFAULT_SIDE_CHANNEL_PORT = 5600


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """One instance's side of all its transfers.

    Attributes:
        engine_id: stable name of the instance.
        model: name of the model; peers must serve the same.
        modes: transfer modes this instance takes part in.
        cache_format: what else the bytes of a cache depend on (attention backend, quantisation);
            peers must have the same text.
        side_channel_host: address to listen at, also told to peers.
        side_channel_port: port of the handshake server; 0 takes a free one.
        allowed_peers: instances that may be connected to and may register; None: all.
        keys: proofs of who talks over the side channel; None: nobody proves anything.
        integrity: how much of what this instance receives is compared with its source; what it
            sends is compared as its peers ask for.
        tells_stories: whoever reaches the side channel may ask for the story of a transfer.
    """

    engine_id: EngineId
    model: str
    modes: frozenset[TransferMode] = frozenset(TransferMode)
    cache_format: str = ""
    side_channel_host: str = "localhost"
    side_channel_port: int = DEFAULT_SIDE_CHANNEL_PORT
    timing: Timing = field(default_factory=Timing)
    limits: Limits = field(default_factory=Limits)
    courier: CourierConfig = field(default_factory=CourierConfig)
    allowed_peers: AllowList | None = None
    keys: ChannelKeys | None = None
    integrity: Integrity = Integrity.OFF
    tells_stories: bool = False


def side_channel_address(
    host: str | None, port: int | None, dp_rank: int, environment: Mapping[str, str] | None = None
) -> tuple[str, int]:
    """Where the side channel listens: an explicit value, else vLLM's environment, else default.

    Args:
        host: explicit host, or None.
        port: explicit port, or None; taken as it is, without adding `dp_rank`.
        dp_rank: data-parallel index, added to the environment's or the default port as in vLLM.
        environment: variables to look at; `os.environ` if None.

    Raises:
        ConfigError: a port is not a number from 0 to 65535.
    """
    variables = os.environ if environment is None else environment
    chosen_host = host or variables.get(SIDE_CHANNEL_HOST_VARIABLE) or "localhost"
    if port is None:
        text = variables.get(SIDE_CHANNEL_PORT_VARIABLE, str(DEFAULT_SIDE_CHANNEL_PORT))
        if not text.isdecimal():
            raise ConfigError(f"{SIDE_CHANNEL_PORT_VARIABLE}: expected a port, found {text!r}")
        port = int(text) + dp_rank
    if not 0 <= port <= 65535:
        raise ConfigError(f"side channel port: expected 0 to 65535, found {port}")
    return chosen_host, port
