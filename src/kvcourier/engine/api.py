"""The engine as its HTTP server sees it.

Decides the request and event types between the two. Refuses to know HTTP and models.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvcourier.core.params import Intent
from kvcourier.errors import KVCourierError
from kvcourier.ids import RequestId


class RequestRejected(KVCourierError):
    """The request cannot be served (prompt too long, empty, ...): HTTP 400, nothing was kept."""


class FinishReason(enum.StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens. `temperature` 0 is greedy; `seed` makes sampling repeatable."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of a request, or its end.

    Attributes:
        token_ids: tokens generated since the last event; may be empty at the end.
        finish_reason: None while it goes on. After a non-None one, no event follows.
        kv_transfer_params: on P's last event, what the router relays to D.
        error: one sentence where finish_reason is ERROR.
        num_cached_tokens: prompt tokens taken from the prefix cache.
    """

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: str = ""
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue.

    `on_event` is called from the engine's thread, `on_scheduled` before the first step that the
    request is part of; they must not block.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    on_event: Callable[[TokenEvent], None]
    intent: Intent | None = None
    on_scheduled: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a server must know of the loaded model."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
