"""What was found out, before anybody judges it.

Decides the words between gathering and rules: plain values, each of which may be missing. Refuses
to know where they come from and what they mean.
"""

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from kvcourier.config import TransferMode
from kvcourier.core.handshake import PeerInstance
from kvcourier.core.inquiry import Told
from kvcourier.doctor.errands import FetchedTwice, NixlTried


class Role(enum.StrEnum):
    """What somebody is for."""

    PREFILL = "P"
    DECODE = "D"
    ROUTER = "router"


class Engine(enum.StrEnum):
    """What serves an instance's HTTP API, as far as its pages show it."""

    EMBEDDED = "kvcourier serve"
    VLLM_WITH_COURIER = "vLLM with CourierConnector"
    VLLM_WITH_NIXL = "vLLM with its own NixlConnector"
    VLLM_WITHOUT = "vLLM without a NIXL connector"
    UNKNOWN = "an unknown server"

    @property
    def is_ours(self) -> bool:
        """Whether a courier of ours runs in it, which answers our questions."""
        return self in (Engine.EMBEDDED, Engine.VLLM_WITH_COURIER)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an instance's side channel is said to listen; `said_by` is who said so."""

    engine_id: str
    host: str
    port: int
    said_by: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Metrics:
    """One look at an instance's /metrics; sums over all labels, since its start.

    Attributes:
        names: of all metrics, without `_total` and the like.
        post_s, posts, pieces, num_bytes, transfer_s: of all posted operations together.
        runs, run_blocks: runs of consecutive block ids, and the blocks in them.
        cache_usage: part of the KV cache in use, 0 to 1.
        waiting: requests that wait for their turn.
        outcomes: prompts whose KV was sent or received; in vLLM, requests that ended well.
        run_buckets, queue_buckets: (upper bound, how many up to it), ascending: lengths of runs in
            blocks, and seconds that requests waited for their turn. The embedded engine tells no
            such seconds.
        troubles: counters of what goes wrong, by name; only those above 0.
    """

    names: frozenset[str] = frozenset()
    post_s: float = 0.0
    posts: float = 0.0
    pieces: float = 0.0
    num_bytes: float = 0.0
    transfer_s: float = 0.0
    runs: float = 0.0
    run_blocks: float = 0.0
    run_buckets: tuple[tuple[float, float], ...] = ()
    cache_usage: float | None = None
    waiting: float = 0.0
    outcomes: float = 0.0
    queue_buckets: tuple[tuple[float, float], ...] = ()
    troubles: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far somebody's clock is ahead of ours, in seconds: somewhere between the two."""

    low_s: float
    high_s: float

    @property
    def least_s(self) -> float:
        """The smallest difference that explains what was seen, without its sign."""
        return 0.0 if self.low_s <= 0.0 <= self.high_s else min(abs(self.low_s), abs(self.high_s))


_FULL = 0.95
"""Part of a cache."""


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """One instance, as seen from here.

    Attributes:
        problem: why its HTTP API cannot be asked; empty if it answers.
        health: status of `GET /health`.
        models: names at `GET /v1/models`.
        place: where its side channel listens; None if nobody has said so.
        told: what its side channel told; None if it did not.
        told_problem: why not; empty where it was not asked.
        is_open: whether its side channel takes connections; None where that was not tried.
        offer: what it told, checked and in our own types; `offer_problem` is why it is none.
        handoff: its kv_transfer_params for a prompt of the doctor's, by which `place` was learnt;
            whoever fetches from it next lets go of that prompt.
    """

    role: Role
    url: str
    problem: str = ""
    health: int | None = None
    models: tuple[str, ...] = ()
    engine: Engine = Engine.UNKNOWN
    metrics: Metrics | None = None
    clock: ClockOffset | None = None
    place: Place | None = None
    told: Told | None = None
    told_problem: str = ""
    is_open: bool | None = None
    offer: PeerInstance | None = None
    offer_problem: str = ""
    handoff: Mapping[str, Any] | None = None

    @property
    def is_full(self) -> bool:
        """Whether so much of its cache is in use that prompts wait."""
        usage = self.metrics.cache_usage if self.metrics else None
        return usage is not None and usage >= _FULL

    @property
    def name(self) -> str:
        """How a report calls it."""
        return f"{self.role} {self.url}"

    @property
    def http_host(self) -> str:
        """The host that its HTTP API is asked at."""
        return urlsplit(self.url).hostname or ""


T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ErrandFacts(Generic[T_co]):
    """What a process of the doctor's own brought home.

    Attributes:
        told: its result; None if it did not come back.
        problem: why not.
        ways: what UCX said of the transports it took between processes.
        complaints: UCX's warnings and errors.
    """

    told: T_co | None
    problem: str = ""
    ways: tuple[str, ...] = ()
    complaints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolFacts:
    """A tool of this machine: what it tells of, how it was asked, and what it said.

    `exit_code` is None if it did not end.
    """

    what: str
    command: str
    is_installed: bool = False
    exit_code: int | None = None
    output: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The machine where the doctor runs."""

    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    rdma_devices: tuple[str, ...] = ()
    tools: tuple[ToolFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """A prompt that went through P and D.

    Attributes:
        prefill, decode: their names.
        via: the router's URL.
        problem: why there is no answer; empty if there is one.
        expected, found: texts of P alone, and through both.
        num_bytes: that moved meanwhile, by both sides' metrics; None where these come too late.
        failures: what was counted as a failure meanwhile.
    """

    mode: TransferMode
    prefill: str
    decode: str
    via: str
    problem: str = ""
    expected: str = ""
    found: str = ""
    num_bytes: float | None = None
    failures: tuple[str, ...] = ()

    def with_(self, **changes: Any) -> "AnswerFacts":
        """The same prompt, with more known of its answer."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Visit:
    """An instance from which a prompt's KV was fetched twice, or why that was not tried."""

    instance: InstanceFacts
    result: ErrandFacts[FetchedTwice] | None = None
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class KnownInstance:
    """An instance as a router knows it.

    Attributes:
        problem: what the router does not know of it, and why.
        is_draining: no new request goes there, because somebody said so.
        breaker: `closed` while requests go there as usual; empty for a release without breakers.
    """

    role: Role
    url: str
    reachable: bool
    problem: str = ""
    place: Place | None = None
    is_draining: bool = False
    breaker: str = ""


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """A router, as seen from here.

    Attributes:
        problem: why it cannot be asked; empty if it answers.
        health: status of its `GET /health`, and what it says there.
        mode: what it does where a client does not choose.
        timeouts: its `Timeouts`, field by field; empty for a release that does not tell them.
        instances: those that it knows, and what is wrong with each; by side.
    """

    url: str
    problem: str = ""
    health: int | None = None
    mode: str = ""
    timeouts: Mapping[str, float] = field(default_factory=dict)
    instances: tuple[KnownInstance, ...] = ()

    @property
    def name(self) -> str:
        """How a report calls it."""
        return f"{Role.ROUTER} {self.url}"


@dataclass(frozen=True, slots=True)
class Load:
    """What users are going to send.

    Attributes:
        tokens: of a typical prompt.
        rate: requests a second to one pair; None: not said.
        client_timeout_s: how long clients wait for their first byte; None: not said.
    """

    tokens: int = 2000
    rate: float | None = None
    client_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything."""

    prefill: tuple[InstanceFacts, ...] = ()
    decode: tuple[InstanceFacts, ...] = ()
    modes: tuple[TransferMode, ...] = ()
    """Those that shall work; empty: at least one."""
    router: RouterFacts | None = None
    load: Load = field(default_factory=Load)
    machine: MachineFacts | None = None
    nixl: ErrandFacts[NixlTried] | None = None
    visits: tuple[Visit, ...] = ()
    answers: tuple[AnswerFacts, ...] = ()
    not_tried: tuple[tuple[str, str], ...] = ()
    """Prompts that were not sent: (pair, why)."""

    @property
    def instances(self) -> tuple[InstanceFacts, ...]:
        """All of both sides."""
        return (*self.prefill, *self.decode)

    @property
    def pairs(self) -> tuple[tuple[InstanceFacts, InstanceFacts], ...]:
        """Every P with every D."""
        return tuple((prefill, decode) for prefill in self.prefill for decode in self.decode)


def pair_name(prefill: InstanceFacts, decode: InstanceFacts) -> str:
    """How a report calls a pair."""
    return f"{prefill.name} -> {decode.name}"
