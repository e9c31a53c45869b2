"""Names of things, as distinct types.

Decides how instances, ranks, requests, transfers and blocks are named. Refuses to know what any
of them does.
"""

from typing import NamedTuple, NewType

EngineId = NewType("EngineId", str)
"""Stable name of one instance, as in vLLM. Survives a restart."""

Incarnation = NewType("Incarnation", str)
"""One life of one process. A restart under the same engine id has a new one."""

RequestId = NewType("RequestId", str)
"""An engine's own name for a request; P and D use different ones for the same prompt."""

TransferId = NewType("TransferId", str)
"""Exact name of one dispatch, minted by the router, new on every retry."""

HoldId = NewType("HoldId", str)
"""One promise of P to keep one set of blocks. Never reused, so a stale reference cannot match."""

BlockId = NewType("BlockId", int)
"""Index of a logical block of an engine's KV cache (never a kernel block)."""

AgentName = NewType("AgentName", str)
"""Name of a NIXL agent, one per rank and incarnation."""


def hold_id_of(incarnation: Incarnation, serial: int) -> HoldId:
    """The name of a life's hold of this number; they are counted from 1."""
    return HoldId(f"{incarnation}:{serial}")


def hold_serial(hold_id: str | None, incarnation: Incarnation) -> int | None:
    """The number of one of this life's holds; None for any other text."""
    life, _, number = (hold_id or "").rpartition(":")
    return int(number) if life == incarnation and number.isascii() and number.isdecimal() else None


_KEPT, _FETCHED = "/kept", "/fetched"


def kept_as(request_id: RequestId) -> RequestId:
    """The name under which an ended request's KV is held for the conversation's next turn."""
    return RequestId(request_id + _KEPT)


def fetched_as(request_id: RequestId) -> RequestId:
    """The name under which the KV of earlier turns is wanted for a request."""
    return RequestId(request_id + _FETCHED)


def owner_of(name: RequestId) -> RequestId:
    """The request behind a name of either kind, or the request itself."""
    return RequestId(name.removesuffix(_KEPT).removesuffix(_FETCHED))


class Rank(NamedTuple):
    """Position of one rank in its instance."""

    pp_rank: int
    tp_rank: int

    def __str__(self) -> str:
        return f"pp{self.pp_rank}tp{self.tp_rank}"


class InstanceAddress(NamedTuple):
    """Where an instance's handshake server listens, and who should answer there."""

    engine_id: EngineId
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.engine_id} at {self.host}:{self.port}"


class PeerRank(NamedTuple):
    """One rank of one life of one instance: the only thing a message may be matched against."""

    engine_id: EngineId
    incarnation: Incarnation
    rank: Rank

    def __str__(self) -> str:
        return f"{self.engine_id}/{self.rank}"


class TransferKey(NamedTuple):
    """Exact name of one prompt's transfer: a dispatch may hold several prompts (parts)."""

    transfer_id: TransferId
    part: int
