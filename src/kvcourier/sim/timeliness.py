"""Whether what one side knows came to the other in time, read from the stories of both.

Decides what is too late. Refuses to judge where the world itself stood in the way.

I6  a delivery that has failed at P is over at D, or tried again, within `KNOWN_WITHIN_S`, and what
    D wants no more is kept at P no longer
I7  a hold that nobody keeps alive any more ends with its lease
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvcourier.config import Timing
from kvcourier.core.stories import StoryEntry
from kvcourier.ids import RequestId
from kvcourier.sim.faults import Delay, Duplicate, Fault, OnTheWay, Path, Shuffle, Stall
from kvcourier.sim.instance import Instance, Life
from kvcourier.sim.invariants import Violation
from kvcourier.sim.router import Dispatch

KNOWN_WITHIN_S = 0.3
_SLACK_S = 0.5
_WANT_OVER = frozenset({"received", "receive_failed", "released", "quarantined"})
_HOLD_OVER = frozenset({"sent", "send_failed", "released", "quarantined"})
_REACHED = frozenset({"registered", "posted", "read", "received"})
"""What a want has come to only after its holder had answered."""
_LATE = (Delay, Duplicate, Shuffle)


@dataclass(frozen=True, slots=True)
class Telling:
    """One entry of one rank's story, on the world's time."""

    at: float
    rank: str
    what: str


class Timeliness:
    """Looks at dispatches that have ended."""

    def __init__(
        self, instances: Mapping[str, Instance], faults: Sequence[Fault], timing: Timing
    ) -> None:
        self._instances = instances
        self._faults = faults
        self._timing = timing

    def require(self, dispatches: Sequence[Dispatch]) -> None:
        """Raise Violation if anything came too late."""
        for dispatch in dispatches:
            if dispatch.prefill is not None:
                held = self._story(
                    dispatch.ask.prefill, dispatch.prefill.life, dispatch.prefill.request_id
                )
                wanted: list[Telling] = []
                if dispatch.decode is not None:
                    leg = dispatch.decode
                    wanted = self._story(dispatch.ask.decode, leg.life, leg.request_id)
                self._require_known(dispatch, held, wanted)
                self._require_let_go(dispatch, held, wanted)
                self._require_ended(dispatch, held, wanted)

    def _require_known(
        self, dispatch: Dispatch, held: list[Telling], wanted: list[Telling]
    ) -> None:
        leg, ask = dispatch.decode, dispatch.ask
        if leg is None or not wanted:
            return
        over_at = min((each.at for each in wanted if each.what in _WANT_OVER), default=math.inf)
        tried_again = [each for each in wanted if each.what in ("repairing", "recalled")]
        for each in held:
            if each.what != "delivery_failed" or over_at <= each.at + KNOWN_WITHIN_S:
                continue
            if any(0 <= other.at - each.at <= KNOWN_WITHIN_S for other in tried_again):
                continue
            died = leg.life.ended_at is not None and leg.life.ended_at < each.at + KNOWN_WITHIN_S
            # P reaches a D that it could not connect to by the way that D had reached it.
            since = each.at - 2 * self._timing.handshake_timeout_s
            calm = self._is_calm(ask.prefill, ask.decode, each.at, each.at) and self._is_calm(
                ask.decode, ask.prefill, since, each.at
            )
            if calm and not died:
                raise Violation(
                    f"I6: {leg.request_id} at {ask.decode} is over at {over_at:.3f}, but its "
                    f"delivery had failed at {each.at:.3f} at {ask.prefill} {each.rank}"
                )

    def _require_let_go(
        self, dispatch: Dispatch, held: list[Telling], wanted: list[Telling]
    ) -> None:
        """I6 the other way: what D wants no more is not kept until its lease ends."""
        assert dispatch.prefill is not None
        ask, holder, leg = dispatch.ask, dispatch.prefill.life, dispatch.decode
        if leg is None or leg.life.ended_at is not None or holder.ended_at is not None:
            return
        whats = {each.what for each in wanted}
        if not whats & _REACHED or {each.what for each in held} & {"delivery_failed"}:
            return
        ranks = {each.rank for each in wanted}
        ends = [
            min((e.at for e in wanted if e.rank == rank and e.what in _WANT_OVER), default=math.inf)
            for rank in ranks
        ]
        if max(ends) == math.inf:
            # A want without blocks ends without a word.
            return
        for finished in [each for each in held if each.what == "prefill_finished"]:
            known = max(finished.at, *ends)
            over = [e.at for e in held if e.rank == finished.rank and e.what in _HOLD_OVER]
            if min(over, default=math.inf) <= known + KNOWN_WITHIN_S:
                continue
            since = min(each.at for each in wanted)
            if self._is_calm(ask.decode, ask.prefill, since, known) and self._is_calm(
                ask.prefill, ask.decode, since, known
            ):
                raise Violation(
                    f"I6: {dispatch.prefill.request_id} at {ask.prefill} {finished.rank} is kept "
                    f"until {min(over, default=float('inf')):.3f}, but {leg.request_id} at "
                    f"{ask.decode} was over at {max(ends):.3f}"
                )

    def _require_ended(
        self, dispatch: Dispatch, held: list[Telling], wanted: list[Telling]
    ) -> None:
        assert dispatch.prefill is not None
        ask, life = dispatch.ask, dispatch.prefill.life
        if any(isinstance(each, Stall) and each.place == ask.prefill for each in self._faults):
            return
        if any(self._is_late(each, ask.decode, ask.prefill) for each in self._faults):
            return
        lease_s = self._timing.kv_lease_duration / self._instances[ask.prefill].clock.rate
        for finished in [each for each in held if each.what == "prefill_finished"]:
            last_kept = max(finished.at, self._last_kept(dispatch, wanted))
            ends_by = last_kept + lease_s + _SLACK_S
            over = [e.at for e in held if e.rank == finished.rank and e.what in _HOLD_OVER]
            if life.ended_at is None and min(over, default=math.inf) > ends_by:
                raise Violation(
                    f"I7: {dispatch.prefill.request_id} at {ask.prefill} {finished.rank}: nobody "
                    f"kept it alive after {last_kept:.3f}, its lease is {lease_s:.1f} s, and it "
                    f"ended at {min(over, default=float('inf')):.3f}"
                )

    def _last_kept(self, dispatch: Dispatch, wanted: list[Telling]) -> float:
        """When D renewed its lease last, at the latest."""
        leg = dispatch.decode
        if leg is None or not wanted:
            return 0.0
        last = 0.0
        for rank in {each.rank for each in wanted}:
            over = [e.at for e in wanted if e.rank == rank and e.what in _WANT_OVER]
            # A want without blocks ends without a word.
            last = max(last, min(over, default=dispatch.ended_at + _SLACK_S))
        return last if leg.life.ended_at is None else min(last, leg.life.ended_at)

    def _story(self, place: str, life: Life, request_id: str) -> list[Telling]:
        clock = self._instances[place].clock
        return [
            Telling(clock.when(entry.at), rank, entry.what)
            for rank, entry in _entries(life, request_id)
        ]

    def _is_calm(self, source: str, target: str, since: float, until: float) -> bool:
        """Whether what was said in that time could be heard soon."""
        until += KNOWN_WITHIN_S
        for each in self._faults:
            if isinstance(each, Stall):
                concerned = each.place in (source, target)
            elif isinstance(each, OnTheWay):
                by_side_channel = getattr(each, "path", Path.SIDE) is Path.SIDE
                concerned = by_side_channel and (each.source, each.target) == (source, target)
            else:
                continue
            if concerned and each.at <= until and since <= each.at + each.for_s:
                return False
        return True

    def _is_late(self, fault: Fault, source: str, target: str) -> bool:
        """Whether it lets a renewal come long after it was sent."""
        return isinstance(fault, _LATE) and (fault.source, fault.target) == (source, target)


def _entries(life: Life, request_id: str) -> Iterator[tuple[str, StoryEntry]]:
    for courier in life.couriers:
        for entry in courier.endpoint.story(RequestId(request_id)) or ():
            yield str(courier.endpoint.me.rank), entry
