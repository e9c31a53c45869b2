"""Prefill and decode instances and routers on this machine, started for a run.

Decides flags, and that equal settings share processes. Refuses to know what is measured.
"""

import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcourier.demo.processes import Child, Children
from kvcourier.demo.run import ENVIRONMENT

PROGRAM = (sys.executable, "-m", "kvcourier")
"""What the children run, before their own arguments."""

MODEL = (
    "random-llama:layers=12,hidden=128,heads=8,kv_heads=8,head_dim=64,vocab=258,max_position=8192"
)
"""Little arithmetic for much KV (48 KiB a token): the transfer is what is to be seen."""

_START_S = 180.0


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Settings of a prefill instance, a decode instance and their router.

    Attributes:
        model: as for `kvcourier serve --model`.
        flags: further flags of both instances.
        config: file with tables for `serve` and `route`, or None.
    """

    model: str = MODEL
    flags: tuple[str, ...] = ()
    config: Path | None = None


class Pairs:
    """Pairs that run; each spec once. They end with `children`."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._routers: dict[PairSpec, str] = {}
        self._numbers: dict[PairSpec, int] = {}

    def start(
        self, specs: Iterable[PairSpec], begin_until_s: float = float("inf")
    ) -> Mapping[PairSpec, str]:
        """The router's address of each spec; blocks until all are ready.

        No pair but the first begins to start after `begin_until_s` (monotonic clock); those that
        did not are missing in what is returned.

        Raises:
            ProcessFailed: a child ended or did not become ready.
        """
        new = [spec for spec in dict.fromkeys(specs) if spec not in self._routers]
        # As many at once as there are cores for: more would only delay the first.
        at_once = max(1, (os.cpu_count() or 1) // 2)
        routers: dict[PairSpec, Child] = {}
        for first in range(0, len(new), at_once):
            if first and time.monotonic() > begin_until_s:
                break
            batch = new[first : first + at_once]
            started = [
                (spec, [self._instance(spec, role) for role in ("prefill", "decode")])
                for spec in batch
            ]
            for spec, pair in started:
                urls = [self._children.wait_ready(child, _START_S) for child in pair]
                routers[spec] = self._router(spec, urls)
        for spec, router in routers.items():
            self._routers[spec] = self._children.wait_ready(router)
        return self._routers

    def _instance(self, spec: PairSpec, role: str) -> Child:
        name = f"{role}-{self._number(spec)}"
        flags = (
            f"--role={role}",
            f"--engine-id={name}",
            f"--model={spec.model}",
            "--port=0",
            "--side-channel-port=0",
            # Lost KV is a failed request: computed again, it would look like a slow transfer.
            "--kv-load-failure-policy=fail",
            *_cache(spec),
            *_config(spec),
            *spec.flags,
        )
        return self._children.start(name, [*PROGRAM, "serve", *flags], ENVIRONMENT)

    def _router(self, spec: PairSpec, urls: list[str]) -> Child:
        flags = (f"--prefill={urls[0]}", f"--decode={urls[1]}", "--port=0", *_config(spec))
        return self._children.start(
            f"router-{self._number(spec)}", [*PROGRAM, "route", *flags], ENVIRONMENT
        )

    def _number(self, spec: PairSpec) -> int:
        """Of a pair, in the names of its processes."""
        return self._numbers.setdefault(spec, len(self._numbers) + 1)


def _config(spec: PairSpec) -> tuple[str, ...]:
    return () if spec.config is None else (f"--config={spec.config}",)


def _cache(spec: PairSpec) -> tuple[str, ...]:
    """A size for many pairs on one machine, unless the user has said one."""
    said = any(flag.startswith(("--num-blocks", "--kv-cache-gb")) for flag in spec.flags)
    return () if said or spec.config else ("--kv-cache-gb=0.5",)
