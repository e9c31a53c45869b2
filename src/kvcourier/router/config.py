"""Settings of the router.

Decides names, units, defaults and allowed values, and how one instance is written on a command
line. Refuses to know where a value came from.
"""

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from kvcourier.api_keys import ApiKeys
from kvcourier.config import DEFAULT_SIDE_CHANNEL_PORT, Binding, ChannelKeys, TransferMode
from kvcourier.errors import ConfigError, shorten
from kvcourier.ids import EngineId
from kvcourier.router.breaker import BreakerSettings
from kvcourier.router.policy import POLICIES

DEFAULT_ROUTER_PORT = 8192
DEFAULT_ENGINE_ID = EngineId("kvcourier-router")
MAX_PARALLEL_SIZE = 1024

_Name = TypeVar("_Name", bound=enum.StrEnum)


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where D finds P's KV: what a push leg to D must name before P has answered."""

    engine_id: EngineId
    host: str
    port: int
    tp_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance as the operator names it.

    Attributes:
        url: its HTTP address, without a trailing slash.
        coordinates: where its KV is found. None asks the instance itself; vLLM cannot tell, so
            push from vLLM needs them here, and so do streamed turns that its D keeps.
        dp_rank: sent as `X-data-parallel-rank`, for a vLLM server with several ranks behind one
            address; each rank is then a spec of its own, with its own coordinates.
    """

    url: str
    coordinates: Coordinates | None = None
    dp_rank: int | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment or parts.username:
            raise ConfigError(f"instance: expected http://host:port, found {self.url!r}")
        object.__setattr__(self, "url", self.url.rstrip("/"))

    @property
    def name(self) -> str:
        """How answers, logs and metrics call this instance."""
        return self.url if self.dp_rank is None else f"{self.url}#dp{self.dp_rank}"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Every wait of the router, in seconds.

    Attributes:
        connect_s: until a connection to an instance stands.
        prefill_s: the whole prefill leg.
        first_byte_s: from the start of the decode leg to its first byte; in push that includes
            the prefill.
        near_lead_s: how long before the end of prefill D is bound, where it is bound near.
        stall_s: from P's answer until a D that has not begun is taken for stalled, where `rebinds`
            allows another.
        total_s: from the client's request to the end of its answer.
        learn_s: one question to an instance about itself (health, models, coordinates).
        refresh_s: how often a running instance is asked again.
        state_s: one question to a side channel what is kept of a streamed turn.
        load_s: how often an instance is asked how busy it is, where a policy needs that.
        backoff_s: first pause after an instance did not answer; doubled up to `backoff_max_s`.
    """

    connect_s: float = 5.0
    prefill_s: float = 300.0
    first_byte_s: float = 360.0
    near_lead_s: float = 0.15
    stall_s: float = 5.0
    total_s: float = 3600.0
    learn_s: float = 3.0
    refresh_s: float = 5.0
    load_s: float = 1.0
    state_s: float = 1.0
    backoff_s: float = 0.1
    backoff_max_s: float = 5.0

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{spec.name}: expected seconds above 0, found {value!r}")


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Bounds on what clients and instances may send.

    Attributes:
        max_body_bytes: one request of a client; more is refused with 413.
        max_answer_bytes: one answer of an instance that is not streamed.
        max_in_flight: calls served at a time; more are refused with 503.
    """

    max_body_bytes: int = 32 << 20
    max_answer_bytes: int = 64 << 20
    max_in_flight: int = 4096

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{spec.name}: expected a whole number above 0, found {value!r}")


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """How much is remembered.

    Attributes:
        max_conversations: of more, those that were served longest ago are forgotten.
        ttl_s: how long a state is kept, unless D says that it keeps the KV for less.
        max_state_bytes: a larger one is not kept.
    """

    max_conversations: int = 10_000
    ttl_s: float = 480.0
    max_state_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.max_conversations < 0:
            raise ConfigError(
                f"max_conversations: expected 0 or more, found {self.max_conversations}"
            )
        if not 0 < self.ttl_s < float("inf"):
            raise ConfigError(f"conversation_ttl: expected seconds above 0, found {self.ttl_s!r}")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything the router needs.

    Attributes:
        prefill: instances that compute prompts; at least one, unless others can come later.
        decode: instances that generate; likewise.
        mode: how KV moves where the client's `X-KV-Mode` says nothing.
        binding: when D is told where `X-KV-Binding` says nothing: early, at once with P; near, when
            P is nearly done; late, when P has answered; None leaves it to the mode.
        policy: who serves the next request, a key of `policy.POLICIES`.
        prefill_policy: the same for prefill instances alone; None: as `policy` says.
        decode_policy: the same for decode instances alone; None: as `policy` says.
        skip_below: tokens of a prompt below which the decode instance computes it itself, without a
            prefill instance; those that it was sent before do not count. 0: never.
        rebinds: how often the decode leg of one dispatch may go to another instance when it fails
            before its first byte, or stalls; the prefill instance keeps the prompt meanwhile.
        retries: further dispatches after an instance was not reached, was lost, or answered 429,
            502, 503 or 504, and before the client got a byte. Each goes to another instance under
            a new transfer id.
        breaker: when an instance that keeps failing is left alone.
        instances_file: names further instances; read again whenever it changes.
        conversations: how much is remembered of them, and how long.
        admin_keys: of which whoever adds, removes and drains instances must have one; None: nobody
            may.
        api_keys: of which clients must have one; None: open to all.
        instance_api_key: what the router itself shows to every instance; None: nothing.
        engine_id: as whom it asks on side channels what an instance keeps of a streamed turn.
        channel_keys: its keys there; None: it has none.
    """

    prefill: tuple[InstanceSpec, ...]
    decode: tuple[InstanceSpec, ...]
    mode: TransferMode = TransferMode.PULL
    binding: Binding | None = None
    policy: str = "round_robin"
    prefill_policy: str | None = None
    decode_policy: str | None = None
    skip_below: int = 0
    rebinds: int = 0
    retries: int = 0
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    instances_file: Path | None = None
    admin_keys: ApiKeys | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: RouterLimits = field(default_factory=RouterLimits)
    conversations: ConversationLimits = field(default_factory=ConversationLimits)
    api_keys: ApiKeys | None = None
    instance_api_key: str | None = field(default=None, repr=False)
    engine_id: EngineId = DEFAULT_ENGINE_ID
    channel_keys: ChannelKeys | None = field(default=None, repr=False)

    @property
    def has_keys(self) -> bool:
        """Whether keys end at the router, so that no client's is passed on."""
        return self.api_keys is not None or self.instance_api_key is not None

    @property
    def is_open_to_more(self) -> bool:
        """Whether instances may come while the router runs."""
        return self.instances_file is not None or self.admin_keys is not None

    @property
    def policies(self) -> tuple[str, str]:
        """Those of the prefill and of the decode instances."""
        return self.prefill_policy or self.policy, self.decode_policy or self.policy

    @property
    def needs_prompt(self) -> bool:
        """Whether prompts have to be looked at, whatever a call says."""
        return self.skip_below > 0 or any(POLICIES[each].needs_prompt for each in self.policies)

    def __post_init__(self) -> None:
        for side in ("prefill", "decode"):
            specs: tuple[InstanceSpec, ...] = tuple(getattr(self, side))
            if not specs and not self.is_open_to_more:
                raise ConfigError(
                    f"{side}: expected at least one instance, found none; name one, or an "
                    "instances file that does"
                )
            names = [spec.name for spec in specs]
            if len(set(names)) != len(names):
                raise ConfigError(f"{side}: expected each instance once, found {names}")
            object.__setattr__(self, side, specs)
        object.__setattr__(self, "mode", parse_mode(self.mode, "mode"))
        if self.binding is not None:
            object.__setattr__(self, "binding", parse_binding(self.binding, "binding"))
        for name in ("policy", "prefill_policy", "decode_policy"):
            policy = getattr(self, name)
            if policy is not None and policy not in POLICIES:
                allowed = ", ".join(POLICIES)
                raise ConfigError(f"{name}: expected one of {allowed}, found {policy!r}")
        if isinstance(self.skip_below, bool) or self.skip_below < 0:
            raise ConfigError(f"skip_below: expected 0 tokens or more, found {self.skip_below!r}")
        for name in ("retries", "rebinds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value <= 16:
                raise ConfigError(f"{name}: expected 0 to 16, found {value!r}")


def parse_mode(text: str, what: str) -> TransferMode:
    """The transfer mode called `text`; `what` names its origin in the error.

    Raises:
        ConfigError: there is no such mode.
    """
    return _one_of(TransferMode, text, what)


def parse_binding(text: str, what: str) -> Binding:
    """The binding called `text`; likewise."""
    return _one_of(Binding, text, what)


def _one_of(names: type[_Name], text: str, what: str) -> _Name:
    try:
        return names(text.strip().lower())
    except ValueError:
        allowed = ", ".join(names)
        raise ConfigError(f"{what}: expected one of {allowed}, found {shorten(text)}") from None


def _number(low: int, high: int) -> Callable[[str, str], int]:
    def read(key: str, text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise ConfigError(f"instance {key}: expected {low} to {high}, found {text!r}")
        return int(text)

    return read


_READERS: dict[str, Callable[[str, str], int]] = {
    "kv_port": _number(1, 65535),
    "tp_size": _number(1, MAX_PARALLEL_SIZE),
    "pp_size": _number(1, MAX_PARALLEL_SIZE),
    "dp_rank": _number(0, 65535),
}
_TEXT_KEYS = ("engine_id", "kv_host")


def parse_instance_spec(text: str) -> InstanceSpec:
    """Read `http://host:port[,engine_id=..,kv_host=..,kv_port=..,tp_size=..,pp_size=..,dp_rank=..]`.

    With `engine_id` the coordinates are given: `kv_host` defaults to the URL's host, `kv_port` to
    5600 (plus `dp_rank`, as vLLM counts), the sizes to 1. Without it they are asked for.

    Raises:
        ConfigError: the URL or a key cannot be used.
    """
    url, *pairs = (item.strip() for item in text.split(","))
    texts: dict[str, str] = {}
    numbers: dict[str, int] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key in texts or key in numbers:
            raise ConfigError(f"instance {url}: expected {key} once, found it twice")
        if key in _READERS:
            numbers[key] = _READERS[key](key, value)
        elif key in _TEXT_KEYS and value:
            texts[key] = value
        else:
            allowed = ", ".join([*_TEXT_KEYS, *_READERS])
            raise ConfigError(f"instance {url}: expected KEY=VALUE of {allowed}, found {pair!r}")
    dp_rank = numbers.pop("dp_rank", None)
    spec = InstanceSpec(url, dp_rank=dp_rank)
    if "engine_id" not in texts:
        if texts or numbers:
            given = ", ".join([*texts, *numbers])
            raise ConfigError(
                f"instance {url}: {given} given without engine_id; give engine_id too, or none of "
                "them to ask the instance itself"
            )
        return spec
    coordinates = Coordinates(
        engine_id=EngineId(texts["engine_id"]),
        host=texts.get("kv_host") or urlsplit(url).hostname or "localhost",
        port=numbers.get("kv_port", DEFAULT_SIDE_CHANNEL_PORT + (dp_rank or 0)),
        tp_size=numbers.get("tp_size", 1),
        pp_size=numbers.get("pp_size", 1),
    )
    return dataclasses.replace(spec, coordinates=coordinates)
