"""Median and spread of the times that a probe measured.

Decides which figures are shown. Refuses to know how they were measured.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_QUARTILES = 4


@dataclass(frozen=True, slots=True)
class Summary:
    """Times to first token of one probe, in milliseconds.

    Attributes:
        num_requests: requests that were answered.
        num_prompt_tokens: median of what the server counted; None where it does not count.
        lower_ms, upper_ms: a quarter of the times is below, or above.
    """

    num_requests: int
    num_prompt_tokens: int | None
    median_ms: float
    lower_ms: float
    upper_ms: float
    lowest_ms: float
    highest_ms: float

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {
            "requests": self.num_requests,
            "prompt_tokens": self.num_prompt_tokens,
            "ttft_ms": {
                "median": self.median_ms,
                "quartiles": [self.lower_ms, self.upper_ms],
                "range": [self.lowest_ms, self.highest_ms],
            },
        }


def summarize(ttfts_s: Sequence[float], prompt_tokens: Sequence[int]) -> Summary:
    """Sum up at least one measured time; `prompt_tokens` may be empty."""
    times = sorted(round(ttft_s * 1e3, 3) for ttft_s in ttfts_s)
    if len(times) > 1:
        lower, _, upper = statistics.quantiles(times, n=_QUARTILES, method="inclusive")
    else:
        lower = upper = times[0]
    return Summary(
        num_requests=len(times),
        num_prompt_tokens=round(statistics.median(prompt_tokens)) if prompt_tokens else None,
        median_ms=statistics.median(times),
        lower_ms=lower,
        upper_ms=upper,
        lowest_ms=times[0],
        highest_ms=times[-1],
    )
