"""Every state and every transition, as three tables.

Decides which event takes which record to which state. Refuses to know what is sent or posted on
the way: both sides do that. The diagrams in docs/protocol.md are generated from here
(`python -m kvcourier.core.lifecycle`); a new rule is a new entry.

The tables do not know push from pull apart from the states only one of them passes through, and
they do not know which instance we are: roles belong to a transfer.
"""

import enum
from collections.abc import Mapping
from typing import TypeVar

from kvcourier.errors import LocalProtocolError


class HoldState(enum.StrEnum):
    """One prompt's KV on the holder's side (P)."""

    COMPUTING = "computing"
    HELD = "held"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class HoldEvent(enum.StrEnum):
    """What moves a hold on."""

    PREFILL_FINISHED = "prefill_finished"
    ENDED_QUIET = "ended_quiet"
    ENDED_IN_FLIGHT = "ended_in_flight"
    QUIESCED = "quiesced"


class DeliveryState(enum.StrEnum):
    """One holder rank writing to one wanter rank (push), or telling it what to READ."""

    REGISTERED = "registered"
    OFFERED = "offered"
    WRITING = "writing"
    WRITTEN = "written"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    CANCELLED = "cancelled"


class DeliveryEvent(enum.StrEnum):
    """What moves a delivery on."""

    OFFERED = "offered"
    POSTED = "posted"
    COMPLETED = "completed"
    FAILED = "failed"
    ENDED = "ended"
    QUIESCED = "quiesced"


class WantState(enum.StrEnum):
    """One request's KV on the wanter's side (D)."""

    QUEUED = "queued"
    CONNECTING = "connecting"
    REGISTERING = "registering"
    REGISTERED = "registered"
    RECALLING = "recalling"
    READING = "reading"
    PROVING = "proving"
    CHECKING = "checking"
    PARTING = "parting"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class WantEvent(enum.StrEnum):
    """What moves a want on."""

    BLOCKS_RESERVED = "blocks_reserved"
    REGISTRATION_SENT = "registration_sent"
    ACKNOWLEDGED = "acknowledged"
    BLOCKS_RECALLED = "blocks_recalled"
    BLOCKS_RETURNED = "blocks_returned"
    LANDED = "landed"
    READ_POSTED = "read_posted"
    READ_COMPLETED = "read_completed"
    PROVEN = "proven"
    CHECK_BEGUN = "check_begun"
    AGREED = "agreed"
    PEER_REPLACED = "peer_replaced"
    NOT_NEEDED = "not_needed"
    ENDED_QUIET = "ended_quiet"
    ENDED_IN_FLIGHT = "ended_in_flight"
    QUIESCED = "quiesced"


HOLD: Mapping[HoldState, Mapping[HoldEvent, HoldState]] = {
    HoldState.COMPUTING: {
        HoldEvent.PREFILL_FINISHED: HoldState.HELD,
        HoldEvent.ENDED_QUIET: HoldState.RELEASED,
        HoldEvent.ENDED_IN_FLIGHT: HoldState.QUARANTINED,
    },
    HoldState.HELD: {
        HoldEvent.ENDED_QUIET: HoldState.RELEASED,
        HoldEvent.ENDED_IN_FLIGHT: HoldState.QUARANTINED,
    },
    HoldState.QUARANTINED: {HoldEvent.QUIESCED: HoldState.RELEASED},
    HoldState.RELEASED: {},
}

DELIVERY: Mapping[DeliveryState, Mapping[DeliveryEvent, DeliveryState]] = {
    DeliveryState.REGISTERED: {
        DeliveryEvent.OFFERED: DeliveryState.OFFERED,
        DeliveryEvent.POSTED: DeliveryState.WRITING,
        DeliveryEvent.FAILED: DeliveryState.FAILED,
        DeliveryEvent.ENDED: DeliveryState.CANCELLED,
    },
    DeliveryState.OFFERED: {DeliveryEvent.ENDED: DeliveryState.CANCELLED},
    DeliveryState.WRITING: {
        DeliveryEvent.COMPLETED: DeliveryState.WRITTEN,
        DeliveryEvent.FAILED: DeliveryState.FAILED,
        DeliveryEvent.ENDED: DeliveryState.QUARANTINED,
    },
    DeliveryState.QUARANTINED: {DeliveryEvent.QUIESCED: DeliveryState.CANCELLED},
    DeliveryState.WRITTEN: {},
    DeliveryState.FAILED: {DeliveryEvent.ENDED: DeliveryState.CANCELLED},
    DeliveryState.CANCELLED: {},
}

WANT: Mapping[WantState, Mapping[WantEvent, WantState]] = {
    WantState.QUEUED: {
        WantEvent.BLOCKS_RESERVED: WantState.CONNECTING,
        WantEvent.NOT_NEEDED: WantState.PARTING,
    },
    WantState.CONNECTING: {
        WantEvent.REGISTRATION_SENT: WantState.REGISTERING,
        WantEvent.READ_POSTED: WantState.READING,
        WantEvent.BLOCKS_RETURNED: WantState.QUEUED,
        WantEvent.ENDED_QUIET: WantState.RELEASED,
    },
    WantState.REGISTERING: {
        WantEvent.ACKNOWLEDGED: WantState.REGISTERED,
        WantEvent.BLOCKS_RECALLED: WantState.RECALLING,
        WantEvent.READ_POSTED: WantState.READING,
        WantEvent.LANDED: WantState.RELEASED,
        WantEvent.CHECK_BEGUN: WantState.CHECKING,
        WantEvent.PEER_REPLACED: WantState.CONNECTING,
        WantEvent.ENDED_QUIET: WantState.RELEASED,
        WantEvent.ENDED_IN_FLIGHT: WantState.QUARANTINED,
    },
    WantState.REGISTERED: {
        WantEvent.BLOCKS_RECALLED: WantState.RECALLING,
        WantEvent.READ_POSTED: WantState.READING,
        WantEvent.LANDED: WantState.RELEASED,
        WantEvent.CHECK_BEGUN: WantState.CHECKING,
        WantEvent.ENDED_QUIET: WantState.RELEASED,
        WantEvent.ENDED_IN_FLIGHT: WantState.QUARANTINED,
    },
    WantState.RECALLING: {
        WantEvent.BLOCKS_RETURNED: WantState.QUEUED,
        WantEvent.READ_POSTED: WantState.READING,
        WantEvent.LANDED: WantState.RELEASED,
        WantEvent.CHECK_BEGUN: WantState.CHECKING,
        WantEvent.ENDED_QUIET: WantState.RELEASED,
        WantEvent.ENDED_IN_FLIGHT: WantState.QUARANTINED,
    },
    WantState.READING: {
        WantEvent.READ_COMPLETED: WantState.PROVING,
        WantEvent.ENDED_QUIET: WantState.RELEASED,
        WantEvent.ENDED_IN_FLIGHT: WantState.QUARANTINED,
    },
    WantState.PROVING: {
        WantEvent.PROVEN: WantState.RELEASED,
        WantEvent.CHECK_BEGUN: WantState.CHECKING,
        WantEvent.ENDED_QUIET: WantState.RELEASED,
    },
    WantState.CHECKING: {
        WantEvent.AGREED: WantState.RELEASED,
        WantEvent.REGISTRATION_SENT: WantState.REGISTERING,
        WantEvent.READ_POSTED: WantState.READING,
        WantEvent.ENDED_QUIET: WantState.RELEASED,
    },
    WantState.PARTING: {WantEvent.ENDED_QUIET: WantState.RELEASED},
    WantState.QUARANTINED: {WantEvent.QUIESCED: WantState.RELEASED},
    WantState.RELEASED: {},
}

BY_ENGINE = "the local engine"
EXITS_BY_TIME: Mapping[enum.StrEnum, str] = {
    HoldState.COMPUTING: BY_ENGINE,
    HoldState.HELD: "kv_lease_duration",
    HoldState.QUARANTINED: "quarantine_limit_s",
    DeliveryState.REGISTERED: "kv_lease_duration",
    DeliveryState.OFFERED: "kv_lease_duration",
    DeliveryState.WRITING: "transfer_timeout_s",
    DeliveryState.QUARANTINED: "quarantine_limit_s",
    WantState.QUEUED: BY_ENGINE,
    WantState.CONNECTING: "handshake_timeout_s",
    WantState.REGISTERING: "push_registration_timeout",
    WantState.REGISTERED: "push_registration_timeout",
    WantState.RECALLING: "push_registration_timeout",
    WantState.READING: "transfer_timeout_s",
    WantState.PROVING: "handshake_timeout_s",
    WantState.CHECKING: "transfer_timeout_s",
    WantState.PARTING: "handshake_timeout_s",
    WantState.QUARANTINED: "quarantine_limit_s",
}
"""For each state that waits, the setting of config.Timing that ends the wait at the latest.

`the local engine` marks states that last as long as the engine in our own process keeps the
request; it has no memory of ours, and ends it by finishing or aborting.
"""

S = TypeVar("S", HoldState, DeliveryState, WantState)
E = TypeVar("E", HoldEvent, DeliveryEvent, WantEvent)


def step(table: Mapping[S, Mapping[E, S]], state: S, event: E, name: object) -> S:
    """The state after an event.

    Raises:
        LocalProtocolError: the table has no such transition: a bug in holder or wanter.
    """
    try:
        return table[state][event]
    except KeyError:
        raise LocalProtocolError(f"{name}: no transition from {state} by {event}") from None


def diagram(table: Mapping[S, Mapping[E, S]]) -> str:
    """A table as the lines of a mermaid state diagram."""
    first = next(iter(table))
    lines = ["stateDiagram-v2", f"    [*] --> {first}"]
    for state, transitions in table.items():
        lines += [f"    {state} --> {after}: {event}" for event, after in transitions.items()]
        if not transitions:
            lines.append(f"    {state} --> [*]")
    return "\n".join(lines)


def diagrams() -> str:
    """All three diagrams and the exits by time, as the markdown that docs/protocol.md holds."""
    parts = []
    for title, text in (
        ("Hold (P, one per prompt)", diagram(HOLD)),
        ("Delivery (P, one per prompt and registered D rank)", diagram(DELIVERY)),
        ("Want (D, one per request)", diagram(WANT)),
    ):
        parts.append(f"### {title}\n\n```mermaid\n{text}\n```\n")
    rows = [
        f"| {type(state).__name__.removesuffix('State')} | {state} | {limit} |"
        for state, limit in EXITS_BY_TIME.items()
    ]
    parts.append("| record | state | ended at the latest by |\n| --- | --- | --- |")
    return "\n".join(parts) + "\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(diagrams(), end="")
