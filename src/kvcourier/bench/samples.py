"""What one request took, and the quantities that are told of many.

Decides how token times become TTFT, TPOT and the rest, and which of them there are (one table).
Refuses to know how they were measured. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcourier.bench.stats import Ratio, Summary, paired_ratio, summarize
from kvcourier.bench.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Answered:
    """One request that was answered whole.

    Attributes:
        sent_unix_s: wall clock of this machine when it was sent.
        lag_s: how much later than planned that was.
        token_s: when each token was read, in seconds after sending; ascending, never empty.
        transfer_id: the router's name for the transfer, or empty.
    """

    sent_unix_s: float
    lag_s: float
    token_s: tuple[float, ...]
    transfer_id: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """One request that a client would not call answered."""

    reason: str


Outcome = Answered | Failed


@dataclass(frozen=True, slots=True)
class Sample:
    """An answered request with what its instances told of it, if they did."""

    answer: Answered
    timeline: Timeline | None = None

    @property
    def ttft_ms(self) -> float:
        """From sending to the first token."""
        return self.answer.token_s[0] * 1e3

    @property
    def after_prefill_ms(self) -> float | None:
        """From the end of prefill on P to the first token; None where it is not told."""
        finished = self.timeline.prefill_finished_s if self.timeline else None
        return None if finished is None else (self.answer.token_s[0] - finished) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after the first; None for a single token."""
        first, last = self.answer.token_s[0], self.answer.token_s[-1]
        count = len(self.answer.token_s) - 1
        return (last - first) / count * 1e3 if count else None

    @property
    def token2_ms(self) -> float | None:
        """Between the first and the second token; None for a single token."""
        if len(self.answer.token_s) < 2:
            return None
        return (self.answer.token_s[1] - self.answer.token_s[0]) * 1e3


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity in milliseconds: its key in JSON, its title, and how it is read."""

    key: str
    title: str
    of: Callable[[Sample], float | None]


METRICS = (
    Metric("ttft_ms", "TTFT", lambda sample: sample.ttft_ms),
    Metric("after_prefill_ms", "after prefill", lambda sample: sample.after_prefill_ms),
    Metric("tpot_ms", "TPOT", lambda sample: sample.tpot_ms),
    Metric("token2_ms", "token 2", lambda sample: sample.token2_ms),
)


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Prompt tokens that were looked up, and found, in the prefix caches of one side."""

    queries: float
    hits: float

    def since(self, before: "CacheCounts") -> "CacheCounts":
        """What came after `before`; nothing if a counter went back, as at a restart."""
        queries, hits = self.queries - before.queries, self.hits - before.hits
        return CacheCounts(queries, hits) if 0 <= hits <= queries else CacheCounts(0, 0)


@dataclass(frozen=True, slots=True)
class Turn:
    """What became of the requests that were sent in one go.

    Attributes:
        samples: one per request, in their order; None where it failed.
        failures: one sentence per failed request.
        cache: use of the prefix caches meanwhile, of each side that tells.
    """

    samples: tuple[Sample | None, ...]
    failures: tuple[str, ...] = ()
    cache: Mapping[str, CacheCounts] = field(default_factory=dict)


@dataclass(slots=True)
class Collected:
    """All turns of one row."""

    turns: list[Turn] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        """Of the requests that were answered."""
        return [each for turn in self.turns for each in turn.samples if each is not None]

    @property
    def failures(self) -> list[str]:
        """One sentence per failed request."""
        return [sentence for turn in self.turns for sentence in turn.failures]

    @property
    def hit_rates(self) -> dict[str, float]:
        """Part of the looked-up prompt tokens that were found, of each side that tells."""
        rates = {}
        for side in dict.fromkeys(side for turn in self.turns for side in turn.cache):
            counts = [turn.cache[side] for turn in self.turns if side in turn.cache]
            queries = sum(each.queries for each in counts)
            if queries > 0:
                rates[side] = sum(each.hits for each in counts) / queries
        return rates

    @property
    def worst_lag_s(self) -> float:
        """How much later than planned a request was sent at most."""
        return max((each.answer.lag_s for each in self.samples), default=0.0)

    def values(self, metric: Metric) -> list[float]:
        """The metric of every sample that has it."""
        return [value for each in self.samples if (value := metric.of(each)) is not None]

    def summary(self, metric: Metric) -> Summary | None:
        """How it lies, or None without values."""
        return summarize(self.values(metric))

    def example(self) -> Sample | None:
        """The sample with a timeline whose TTFT is the median of those, or the one above it."""
        told = sorted((s for s in self.samples if s.timeline), key=lambda s: s.ttft_ms)
        return told[len(told) // 2] if told else None


def ratio(metric: Metric, a: Collected, b: Collected) -> Ratio | None:
    """B's time over A's, of rows that had their turns in step; None without a common request."""
    turns = zip(a.turns, b.turns, strict=False)  # one more may be there if the run was cut off
    return paired_ratio([pairs_of(metric, one.samples, other.samples) for one, other in turns])


def pairs_of(
    metric: Metric, a: Sequence[Sample | None], b: Sequence[Sample | None]
) -> list[tuple[float, float]]:
    """The metric on both sides of each prompt that both answered."""
    found = []
    for one, other in zip(a, b, strict=True):
        if one is None or other is None:
            continue
        left, right = metric.of(one), metric.of(other)
        if left is not None and right is not None:
            found.append((left, right))
    return found
