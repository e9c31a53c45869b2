"""What an endpoint tells its engine.

Decides the closed set of outcomes. Refuses to know how they come about.
"""

import enum
from dataclasses import dataclass

from kvcourier.ids import BlockId, RequestId

NOT_HELD = "the KV is not held any more"
"""Begins the reason of a holder that has let go."""
NOT_AS_REQUESTED = (
    "the prefill instance does not hold this KV in the blocks, or with the number of tokens, that "
    "the request says"
)


class Outcome(enum.StrEnum):
    """One fact about a request, seen by the engine that owns it.

    Per request and side there is exactly one terminal outcome (RECEIVED, RECEIVE_FAILED, SENT or
    SEND_FAILED) unless the engine aborted it first, and exactly one RELEASED if blocks were
    handed over. The blocks belong to the endpoint until RELEASED, whatever else is reported:
    a failed receive whose memory may still be written is told at once and released later.
    """

    RECEIVED = "received"
    """D: all wanted KV is in the blocks handed over. RELEASED comes in the same batch."""

    RECEIVE_FAILED = "receive_failed"
    """D: the KV will not come; fail the request or compute it in *other* blocks."""

    HELD = "held"
    """D: its holder has finished the prompt, so that it waits for nothing but our blocks; or, with
    a `reason`, its holder cannot be asked, or knows nothing of it, so that only our blocks show
    whether it comes. No end; never told where the request came with it."""

    RECALLED = "recalled"
    """D: the blocks handed over are the engine's again, as it asked, with nothing of use in them;
    the request waits for others as before. Comes in place of RELEASED, as often as it is asked."""

    SENT = "sent"
    """P: everybody who wanted this prompt's KV has it."""

    SEND_FAILED = "send_failed"
    """P: it was not collected (lease expired, write failed). Nothing for the engine to repair."""

    RELEASED = "released"
    """The blocks handed over are the engine's again: nothing in flight can touch them."""


class Cause(enum.StrEnum):
    """Why a receive failed, where it is known that there is nothing to be had any more."""

    NOT_HELD = "not_held"
    """The holder has let go."""

    RESTARTED = "restarted"
    """The holder's life is over."""


class Side(enum.StrEnum):
    """Which end of a transfer a request is; an id is unique within each."""

    HOLD = "hold"
    WANT = "want"


@dataclass(frozen=True, slots=True)
class Report:
    """One outcome.

    Attributes:
        reason: a sentence for the failed ones, else empty.
        side: which end of a transfer the request is.
        block_ids: for RELEASED, the blocks that were handed over, per cache group.
        continuation: for RECEIVED, what the holder's engine gave for going on from its last token,
            if it did; opaque to everybody in between.
        cause: for RECEIVE_FAILED, where it is one of these.
    """

    request_id: RequestId
    outcome: Outcome
    reason: str = ""
    side: Side | None = None
    block_ids: tuple[tuple[BlockId, ...], ...] = ()
    continuation: str | None = None
    cause: Cause | None = None
