"""How long a prefill instance will take for a prompt, and when that is nearly over.

Decides, from what its earlier prompts took and from what it says of this one, when the decode
instance should be bound: late enough to choose it by the load of the moment, early enough that it
is ready when prefill ends. Refuses to know clocks and how questions are asked.
"""

from dataclasses import dataclass

_WEIGHT = 0.2
"""Of the latest prompt in the estimate."""
_MARGIN = 0.15
"""Part of an estimate by which it may be too long; by so much sooner D is bound."""


@dataclass(slots=True)
class Pace:
    """Of one prefill instance, in seconds for each part of a prompt (`prompts.PART_TOKENS`).

    A prompt waits for those that were sent before it: its time is theirs as well.
    """

    part_s: float | None = None

    def learn(self, num_parts: int, seconds: float) -> None:
        """So many parts, those ahead of it included, took so long."""
        if num_parts <= 0 or seconds <= 0:
            return
        latest = seconds / num_parts
        self.part_s = (
            latest if self.part_s is None else self.part_s + _WEIGHT * (latest - self.part_s)
        )

    def expected_s(self, num_parts: float) -> float | None:
        """How long so many parts should take; None as long as nothing is known."""
        return None if self.part_s is None else self.part_s * num_parts


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt is, as its instance says."""

    num_tokens: int
    num_prompt_tokens: int

    @property
    def left(self) -> float:
        """The part of it that is still to be computed, 0 to 1."""
        return max(0.0, 1 - self.num_tokens / max(1, self.num_prompt_tokens))


def bind_after_s(expected_s: float | None, lead_s: float) -> float:
    """How long to wait from the start of a prefill until D is bound, or P is asked how far it is.

    Not at all where nothing is known: too early costs only the choice, too late costs time.
    """
    if expected_s is None:
        return 0.0
    return max(0.0, expected_s * (1 - _MARGIN) - lead_s)


def look_again_s(left_s: float | None, lead_s: float) -> float | None:
    """After an answer that so much time is left: how long to wait on, or None to bind D now."""
    if left_s is None or left_s <= 2 * lead_s:
        return None
    return max(lead_s, bind_after_s(left_s, lead_s))
