"""What samples say, and how sure it is.

Decides quantiles, bootstrap intervals, paired ratios and the verdict on them. Refuses to know what
was sampled: values come in as numbers, chance as a seed. Pure.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
"""Confidence of every interval."""
MIN_TURNS = 6
"""Fewer pairs of turns give no verdict: resampling so few is surer of itself than it may be."""
MIN_FOR_P99 = 100
"""With fewer values the 99th percentile is the largest one or close to it, and says little."""

_RESAMPLES = 2000
# Draws are taken in batches of at most this many numbers, so that memory stays bounded.
_BATCH = 1_000_000

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the interval in which it would mostly lie if all were measured again."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Summary:
    """How samples of one quantity lie. `p99` is None below MIN_FOR_P99 samples."""

    n: int
    median: Estimate
    mean: Estimate
    p90: Estimate
    p99: Estimate | None


def summarize(values: Sequence[float], seed: int = 0) -> Summary | None:
    """Median, mean and percentiles with percentile-bootstrap intervals; None without values."""
    if not values:
        return None
    taken = np.asarray(values, dtype=np.float64)
    statistics: list[Callable[[Values], Values]] = [
        lambda rows: np.quantile(rows, 0.5, axis=-1),
        lambda rows: np.mean(rows, axis=-1),
        lambda rows: np.quantile(rows, 0.9, axis=-1),
    ]
    if len(values) >= MIN_FOR_P99:
        statistics.append(lambda rows: np.quantile(rows, 0.99, axis=-1))
    median, mean, p90, *rest = _bootstrap(taken, statistics, seed)
    return Summary(len(values), median, mean, p90, rest[0] if rest else None)


class Verdict(enum.StrEnum):
    """Which of two sides takes less time."""

    A_BETTER = "A is better"
    B_BETTER = "B is better"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Ratio:
    """B's time over A's, the geometric mean over pairs. `num_turns` were resampled."""

    estimate: Estimate
    num_pairs: int
    num_turns: int

    @property
    def verdict(self) -> Verdict:
        """A side is better if the whole interval is on its side of 1 and the turns are enough."""
        if self.num_turns < MIN_TURNS:
            return Verdict.CANNOT_TELL
        if self.estimate.high < 1:
            return Verdict.B_BETTER
        return Verdict.A_BETTER if self.estimate.low > 1 else Verdict.CANNOT_TELL


Pairs = Sequence[tuple[float, float]]
"""Times of A and of B on the same prompts, of one turn."""


def paired_ratio(turns: Sequence[Pairs], seed: int = 0) -> Ratio | None:
    """B/A over pairs; whole turns are resampled, because requests of one turn share its luck.

    Pairs with a time that is not above 0 are left out. None without a pair.
    """
    logs = [
        np.log([b / a for a, b in turn if a > 0 and b > 0])
        for turn in turns
        if any(a > 0 and b > 0 for a, b in turn)
    ]
    if not logs:
        return None
    # Mean over all pairs of the drawn turns, from each turn's sum and count.
    parts = np.array([(each.sum(), each.size) for each in logs], dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(parts), (_RESAMPLES, len(parts)))
    sums = parts[draws].sum(axis=1)
    value = np.exp(parts[:, 0].sum() / parts[:, 1].sum())
    low, high = np.exp(np.quantile(sums[:, 0] / sums[:, 1], _tails()))
    return Ratio(_estimate(value, low, high), int(parts[:, 1].sum()), len(parts))


def _bootstrap(
    values: Values, statistics: Sequence[Callable[[Values], Values]], seed: int
) -> list[Estimate]:
    generator = np.random.default_rng(seed)
    rows_at_once = max(1, _BATCH // len(values))
    found: list[list[Values]] = [[] for _ in statistics]
    for start in range(0, _RESAMPLES, rows_at_once):
        rows = min(rows_at_once, _RESAMPLES - start)
        drawn = values[generator.integers(0, len(values), (rows, len(values)))]
        for each, statistic in zip(found, statistics, strict=True):
            each.append(statistic(drawn))
    return [
        _estimate(float(statistic(values)), *np.quantile(np.concatenate(each), _tails()))
        for each, statistic in zip(found, statistics, strict=True)
    ]


def _estimate(value: float, low: float, high: float) -> Estimate:
    # With few or equal values rounding can put a bound on the wrong side of the value itself.
    return Estimate(float(value), float(min(low, value)), float(max(high, value)))


def _tails() -> tuple[float, float]:
    return (1 - LEVEL) / 2, (1 + LEVEL) / 2
