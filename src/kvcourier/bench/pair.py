"""Prefill and decode instances and routers on this machine, started for a run.

Decides flags, and that equal settings share processes. Refuses to know what is measured.
"""

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcourier.demo.processes import READY_LINE, Children, ProcessFailed
from kvcourier.demo.run import ENVIRONMENT

PROGRAM = (sys.executable, "-m", "kvcourier")
NURSERY = (sys.executable, "-m", "kvcourier.bench.nursery")
ROLES = ("prefill", "decode")

MODEL = (
    "random-llama:layers=12,hidden=128,heads=8,kv_heads=8,head_dim=64,vocab=258,max_position=8192"
)
"""Little arithmetic for much KV (48 KiB a token): the transfer is what is to be seen."""

_START_S = 180.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Settings of a prefill instance, a decode instance and their router.

    Attributes:
        model: as for `kvcourier serve --model`; None leaves it to the file.
        flags: further flags of both instances.
        config: file with tables for `serve` and `route`, or None.
        devices: of P and of D; None leaves them to the flags and the file.
    """

    model: str | None = MODEL
    flags: tuple[str, ...] = ()
    config: Path | None = None
    devices: tuple[str, str] | None = None


class Pairs:
    """Pairs that run; each spec once. They end with `children`.

    Args:
        log_dir: existing folder that gets a log per instance.
    """

    def __init__(self, children: Children, log_dir: Path) -> None:
        self._children = children
        self._log_dir = log_dir

    def start(self, specs: Iterable[PairSpec]) -> Mapping[PairSpec, str]:
        """The router's address of each spec; blocks until all are ready. Call it once.

        Raises:
            ProcessFailed: a process ended or did not become ready.
        """
        numbers = {spec: number for number, spec in enumerate(dict.fromkeys(specs), start=1)}
        if not numbers:
            return {}
        commands = [
            (str(self._log(f"{role}-{number}")), _serve(spec, role, f"{role}-{number}"))
            for spec, number in numbers.items()
            for role in ROLES
        ]
        self._children.start("instances", [*NURSERY, json.dumps(commands)], ENVIRONMENT)
        routers = {}
        for spec, number in numbers.items():
            urls = [self._wait_ready(f"{role}-{number}") for role in ROLES]
            sides = [f"--{role}={url}" for role, url in zip(ROLES, urls, strict=True)]
            command = [*PROGRAM, "route", *sides, "--port=0", *_config(spec)]
            routers[spec] = self._children.start(f"router-{number}", command)
        return {spec: self._children.wait_ready(router) for spec, router in routers.items()}

    def _wait_ready(self, name: str) -> str:
        log = self._log(name)
        deadline = time.monotonic() + _START_S
        while True:
            self._children.check()
            match = READY_LINE.search(log.read_bytes()) if log.exists() else None
            if match is not None:
                return match.group(1).decode()
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{name} was not ready after {_START_S:g} s; see {log}")
            time.sleep(_POLL_S)

    def _log(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"


def _serve(spec: PairSpec, role: str, engine_id: str) -> list[str]:
    return [
        "serve",
        f"--role={role}",
        f"--engine-id={engine_id}",
        *(() if spec.model is None else (f"--model={spec.model}",)),
        "--port=0",
        "--side-channel-port=0",
        # Lost KV is a failed request: computed again, it would look like a slow transfer.
        "--kv-load-failure-policy=fail",
        *_cache(spec),
        *_device(spec, role),
        *_config(spec),
        *spec.flags,
    ]


def _config(spec: PairSpec) -> tuple[str, ...]:
    return () if spec.config is None else (f"--config={spec.config}",)


def _device(spec: PairSpec, role: str) -> tuple[str, ...]:
    return () if spec.devices is None else (f"--device={spec.devices[ROLES.index(role)]}",)


def _cache(spec: PairSpec) -> tuple[str, ...]:
    """A size for many pairs on one machine, unless the user has said one."""
    said = any(flag.startswith(("--num-blocks", "--kv-cache-gb")) for flag in spec.flags)
    return () if said or spec.config else ("--kv-cache-gb=0.5",)
