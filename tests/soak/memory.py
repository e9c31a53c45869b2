"""What processes take of the machine, sampled, and whether it grows.

Decides which samples count. A life is one process between two restarts.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

WARM_UP_S = 15.0
"""A life's samples count after it: caches, pools of buffers and compiled shapes fill at first."""
SHORTEST_S = 20.0
"""A life counts if it has been sampled for so long after its warm-up."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One look at one process; `at` is by `time.monotonic`."""

    name: str
    pid: int
    at: float
    resident_mib: float
    num_descriptors: int
    num_threads: int


def look(name: str, pid: int) -> Sample | None:
    """What a process takes now; None if it has gone."""
    folder = Path("/proc") / str(pid)
    try:
        fields = dict(
            line.split(":", 1) for line in (folder / "status").read_text().splitlines() if line
        )
        return Sample(
            name,
            pid,
            time.monotonic(),
            int(fields["VmRSS"].split()[0]) / 1024,
            len(list((folder / "fd").iterdir())),
            int(fields["Threads"]),
        )
    except (OSError, KeyError):
        return None


@dataclasses.dataclass(frozen=True)
class Growth:
    """How the lives of one process's name grow, all together.

    Attributes:
        mib_per_minute: slope of resident memory.
        descriptors_per_minute: slope of open descriptors.
        num_lives: lives that were long enough to count.
        minutes: how long they were sampled, their warm-ups apart.
    """

    mib_per_minute: float
    descriptors_per_minute: float
    num_lives: int
    minutes: float

    @property
    def descriptors_per_life(self) -> float:
        """More in the end than at the beginning, on the average of the lives."""
        return self.descriptors_per_minute * self.minutes / self.num_lives


def growth(samples: Iterable[Sample]) -> Growth | None:
    """One slope for all lives, each with a level of its own; None if no life was long enough."""
    lives: dict[int, list[Sample]] = {}
    for sample in samples:
        lives.setdefault(sample.pid, []).append(sample)
    warm = [[each for each in life if each.at >= life[0].at + WARM_UP_S] for life in lives.values()]
    counted = [life for life in warm if life and life[-1].at - life[0].at >= SHORTEST_S]
    if not counted:
        return None
    return Growth(
        _slope([[(each.at, each.resident_mib) for each in life] for life in counted]),
        _slope([[(each.at, each.num_descriptors) for each in life] for life in counted]),
        len(counted),
        sum(life[-1].at - life[0].at for life in counted) / 60,
    )


def _slope(lives: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Least squares within lives, in units a minute."""
    points = [np.array(life) for life in lives]
    centred = np.concatenate([life - life.mean(axis=0) for life in points])
    times, values = centred.T
    return float(60 * (times @ values) / (times @ times))
