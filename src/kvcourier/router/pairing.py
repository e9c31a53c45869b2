"""Which instances serve one dispatch, and what its legs tell of them.

Decides which D is next, and what is learnt of an instance from how its leg goes. Refuses to know
how one is chosen among the candidates (`sides`) and what follows from a failure (`dispatch`).
"""

from collections.abc import Collection

from kvcourier.router.client_call import ClientCall
from kvcourier.router.events import (
    RETRYABLE,
    Answer,
    Event,
    FailureKind,
    LegName,
    Note,
    verdict,
)
from kvcourier.router.instances import Instance
from kvcourier.router.legs import read_handoff
from kvcourier.router.sides import Side


class Pairing:
    """P, if there is one, and one D after the other; D is chosen when its leg starts, not before.

    Args:
        prefill: who computes the prompt; None: the decode instance does.
        tried: whom this call need not be sent to any more, as they have failed; grows.
        first_decode: the first to be asked for the answer; None: as the policy chooses.
        keeper: name of the D that keeps the KV of the last turn.
    """

    def __init__(
        self,
        call: ClientCall,
        decode_side: Side,
        prefill: Instance | None,
        tried: set[Instance],
        first_decode: Instance | None = None,
        keeper: str = "",
    ) -> None:
        self.chosen: dict[LegName, Instance] = {} if prefill is None else {LegName.PREFILL: prefill}
        self._call = call
        self._decode_side = decode_side
        self._is_alone = prefill is None
        self._tried = tried
        self._passed: set[Instance] = set()
        self._first_decode = first_decode
        self._keeper = keeper

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Who serves it, as the client is told, as far as that is decided."""
        return tuple(
            (f"x-kv-{leg}", self.chosen[leg].name) for leg in LegName if leg in self.chosen
        )

    def subject(self, leg: LegName, kind: FailureKind) -> str:
        """Who failed, to begin a sentence with."""
        if kind is FailureKind.NO_INSTANCE or leg not in self.chosen:
            return f"no {leg} instance"
        return f"the {leg} instance {self.chosen[leg].name}"

    # The next D.

    def next_decode(self) -> Instance | None:
        """Choose D, none that had it before; None, and the last one stays it, if nobody is left."""
        if LegName.DECODE in self.chosen:
            self._passed.add(self.chosen[LegName.DECODE])
        decode, self._first_decode = self._first_decode, None
        decode = decode or self._pick(self._tried | self._passed)
        if decode is not None:
            self.chosen[LegName.DECODE] = decode
        return decode

    def has_less_busy_decode(self) -> bool:
        """Whether another D would have less to do than the one that has it."""
        current = self.chosen.get(LegName.DECODE)
        if current is None:
            return False
        other = self._pick({*self._tried, *self._passed, current})
        return other is not None and other.work.num_requests < current.work.num_requests

    def _pick(self, tried: Collection[Instance]) -> Instance | None:
        call = self._call
        mode = None if self._is_alone else call.mode
        return self._decode_side.pick(mode, tried, call.prompt, call.conversation, self._keeper)

    # What is learnt.

    def judge(self, event: Event) -> None:
        """Count what speaks for an instance or against it."""
        found = verdict(event)
        if found is not None and found[0] in self.chosen:
            self.chosen[found[0]].judge(found[1])

    def prefilled(self, answer: Answer, num_parts: int, seconds: float) -> None:
        """P has computed the prompt, with those ahead of it so many parts in so much time."""
        prefill = self.chosen[LegName.PREFILL]
        prefill.work.pace.learn(num_parts, seconds)
        try:
            handoff = read_handoff(answer.content)
        except ValueError:
            return
        prefill.check_handoff(handoff or {})

    def failed(self, note: Note) -> None:
        """A leg has failed: whom the call is not sent to again, and what is not known any more."""
        instance = self.chosen.get(note.leg)
        if instance is None:
            return
        if note.kind is not FailureKind.NO_KV:
            self._tried.add(instance)
        if note.kind in RETRYABLE:
            instance.lost()
        elif note.kind is FailureKind.STALE_COORDINATES:
            instance.forget()
