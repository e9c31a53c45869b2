"""What a dispatch's story says of each event and action.

Decides names and details of the entries. Refuses to keep them, and to know when they happen. Pure.
"""

from typing import Any

from kvcourier.router.events import (
    Action,
    ClientLeft,
    DecodeAnswered,
    DecodeEnded,
    DecodeStalled,
    DecodeStreaming,
    Event,
    Finish,
    LegLost,
    PrefillAnswered,
    PrefillNear,
    RouterStopped,
    TimeUp,
)

Told = tuple[str, dict[str, Any]]


def told_of(happening: Event | Action) -> Told | None:
    """Name and details of the entry, or None: others tell it, or it changes nothing. That a leg is
    sent tells who sends it, and to whom.

    What an instance answered is in it as a status only: a story is no place for prompts.
    """
    match happening:
        case PrefillAnswered(answer):
            return "prefill_answered", {"status": answer.status}
        case PrefillNear():
            return "prefill_near", {}
        case DecodeStalled():
            return "decode_stalled", {}
        case DecodeAnswered(answer):
            return "decode_answered", {"status": answer.status}
        case DecodeStreaming():
            return "decode_streaming", {}
        case DecodeEnded(ending):
            return "decode_ended", {"ending": ending.name.lower()}
        case LegLost(leg, kind, reason):
            return f"{leg}_lost", {"kind": kind.value, "reason": reason}
        case ClientLeft():
            return "client_left", {}
        case TimeUp():
            return "time_up", {}
        case RouterStopped():
            return "router_stopped", {}
        case Finish(outcome):
            return "finished", {"outcome": outcome.value}
        case _:
            return None
