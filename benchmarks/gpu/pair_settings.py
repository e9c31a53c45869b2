"""What a run is told: the command line, the connectors there are, and the header that records it.

Decides flags, defaults, and which servers each connector needs. Refuses to know how a run goes.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from model_folders import SIZES
from pair_load import Cell, Way, parse_cells

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_OUT = Path(__file__).with_name("results") / "vllm-pairs.json"
DEFAULT_CELLS = "2000:2:24,2000:6:24,16000:2:16,16000:6:24"
# Three pairs are up at a time, so a third of a GPU of 140 GB less weights, staging and activations.
DEFAULT_KV_CACHE_GIB = {"0.6b": 36.0, "8b": 20.0, "32b": 40.0}

_COURIER = {
    "kv_connector": "CourierConnector",
    "kv_connector_module_path": "kvcourier.vllm_connector",
}
# Configurations of P and of D. One pair with our connector serves both modes.
PAIR_PORTS = 10
"""From a pair's ports to the next pair's: all pairs of a model are up at the same time."""
SERVERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nixl-pull": ({"kv_connector": "NixlConnector", "kv_role": "kv_both"},) * 2,
    "kvcourier": (_COURIER | {"kv_role": "kv_producer"}, _COURIER | {"kv_role": "kv_consumer"}),
    "nixl-push": ({"kv_connector": "NixlPushConnector", "kv_role": "kv_both"},) * 2,
}
# Servers and way of each connector; "single" is a decode server whose connector has nothing to do.
CONNECTORS = {
    "vllm-pull": ("nixl-pull", Way.PULL),
    "kvcourier-pull": ("kvcourier", Way.PULL),
    "kvcourier-push": ("kvcourier", Way.PUSH),
    "vllm-push": ("nixl-push", Way.PUSH),
    "single": ("kvcourier", Way.SINGLE),
}

# What each of ours is compared with: vLLM's of the same way.
COUNTERPARTS = {"kvcourier-pull": "vllm-pull", "kvcourier-push": "vllm-push"}

EAGER = ("--enforce-eager",)
# Decode steps as one graph each; nothing is compiled, so a start takes seconds longer and not
# minutes.
DECODE_GRAPHS = (
    "--compilation-config",
    json.dumps(
        {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32],
        }
    ),
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a run is told."""

    models: tuple[str, ...]
    servers: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    connectors: dict[str, tuple[str, Way]]
    cells: tuple[Cell, ...]
    fresh_cells: tuple[Cell, ...]
    rounds: int
    one_at_a_time: bool
    kv_cache_gib: dict[str, float]
    out: Path
    resume: bool
    commit: str
    seed: int
    output_tokens: int
    gpus: tuple[str, str]
    time_limit_s: float
    request_timeout_s: float
    start_timeout_s: float
    work_folder: Path
    variants: dict[str, dict[str, Any]]
    server_flags: tuple[str, ...]
    decode_eager: bool
    server_command: tuple[str, ...] | None
    ports: tuple[int, int]
    side_channel_ports: tuple[int, int]


def make_header(settings: Settings) -> dict[str, Any]:
    """With what, on what and when the rows were made."""
    manifest = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    return {
        "versions": {
            "vllm": _version("vllm"),
            "nixl": _version("nixl", "nixl-cu13", "nixl-cu12"),
            "torch": _version("torch"),
            "kvcourier": manifest["project"]["version"],
            "python": platform.python_version(),
        },
        "gpu": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines(),
        "commit": settings.commit,
        "seed": settings.seed,
        "output_tokens": settings.output_tokens,
        "rounds": settings.rounds,
        "one_at_a_time": settings.one_at_a_time,
        "kv_cache_gib": settings.kv_cache_gib,
        "variants": settings.variants,
        "server_flags": list(settings.server_flags),
        "prefill_flags": list(EAGER),
        "decode_flags": list(EAGER if settings.decode_eager else DECODE_GRAPHS),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["vllm_pairs.py", *sys.argv[1:]]),
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line; ends the process with a sentence if it cannot be used."""
    parser = argparse.ArgumentParser(
        prog="vllm_pairs.py",
        description="The same load on vLLM's own connectors and on kvcourier; README.md says more.",
    )
    add = parser.add_argument
    add("--models", default=",".join(SIZES), help="of %(default)s, in this order")
    add("--connectors", default=",".join(CONNECTORS), help="of %(default)s")
    add(
        "--variants",
        default="{}",
        metavar="JSON",
        help="NAME to kv_connector_extra_config: kvcourier-pull@NAME and -push@NAME run as well",
    )
    add("--cells", default=DEFAULT_CELLS, help="TOKENS:QPS:REQUESTS,..., most important first")
    add("--fresh-cells", default="", help="measured first, while blocks are still in order")
    add("--rounds", type=int, default=2, help="turns that the connectors take in a cell")
    add("--one-at-a-time", action="store_true", help="pairs one after another: a model is large")
    add("--kv-cache-gib", type=float, help="of each server; by default by model")
    add("--out", type=Path, default=DEFAULT_OUT, metavar="FILE", help="result file")
    add("--resume", action="store_true", help="go on with the result file")
    add("--commit", default=None, help="what is measured; git is asked if not given")
    add("--seed", type=int, default=7, help="of prompts and arrival times")
    add("--output-tokens", type=int, default=128)
    add("--gpus", default="0,1", help="of the prefill and of the decode server")
    add("--time-limit", type=float, default=float("inf"), metavar="S", help="begin nothing after")
    add("--request-timeout", type=float, default=90.0, metavar="S")
    add("--start-timeout", type=float, default=240.0, metavar="S")
    add("--work-folder", type=Path, default=Path("/tmp/kvcourier-vllm-pairs"), help="models, logs")
    add("--server-flags", default="", help="further flags of both servers, as one text")
    add("--decode-eager", action="store_true", help="no CUDA graphs on the decode server")
    add("--server-command", default=None, help="instead of python -m vllm...api_server")
    add("--ports", default="8100,8200", help="HTTP: prefill, decode")
    add("--side-channel-ports", default="5600,5700", help="prefill, decode")
    given = parser.parse_args(arguments)
    try:
        command = shlex.split(given.server_command) if given.server_command else None
        servers, connectors, variants = _with_variants(given.variants)
        if given.output_tokens < 2:
            raise ValueError(
                f"--output-tokens: expected 2 or more, found {given.output_tokens}; "
                "one token has no TPOT"
            )
        cells = tuple(parse_cells(given.cells))
        fresh_cells = tuple(parse_cells(given.fresh_cells)) if given.fresh_cells else ()
        if not 1 <= given.rounds <= min(cell.requests for cell in cells + fresh_cells):
            raise ValueError(
                f"--rounds: expected 1 to the least number of requests, found {given.rounds}"
            )
        return Settings(
            models=_some_of("--models", given.models, SIZES),
            servers=servers,
            connectors={
                name: connectors[name]
                for name in (
                    *_some_of("--connectors", given.connectors, tuple(CONNECTORS)),
                    *(name for name in connectors if name not in CONNECTORS),
                )
            },
            cells=cells,
            fresh_cells=fresh_cells,
            rounds=given.rounds,
            one_at_a_time=given.one_at_a_time,
            kv_cache_gib=(
                DEFAULT_KV_CACHE_GIB
                if given.kv_cache_gib is None
                else dict.fromkeys(SIZES, given.kv_cache_gib)
            ),
            out=given.out,
            resume=given.resume,
            commit=given.commit or _output("git", "-C", str(REPOSITORY), "rev-parse", "HEAD"),
            seed=given.seed,
            output_tokens=given.output_tokens,
            gpus=_two("--gpus", given.gpus, str),
            time_limit_s=given.time_limit,
            request_timeout_s=given.request_timeout,
            start_timeout_s=given.start_timeout,
            work_folder=given.work_folder,
            variants=variants,
            server_flags=tuple(shlex.split(given.server_flags)),
            decode_eager=given.decode_eager,
            server_command=tuple(command) if command else None,
            ports=_two("--ports", given.ports, int),
            side_channel_ports=_two("--side-channel-ports", given.side_channel_ports, int),
        )
    except ValueError as error:
        parser.error(str(error))


def _with_variants(text: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Servers and connectors with those of the variants, and the variants."""
    variants = json.loads(text)
    if not isinstance(variants, dict) or not all(isinstance(x, dict) for x in variants.values()):
        raise ValueError(f"--variants: expected a JSON object of objects, found {text}")
    servers, connectors = dict(SERVERS), dict(CONNECTORS)
    for name, extra in variants.items():
        p, d = ({**config, "kv_connector_extra_config": extra} for config in SERVERS["kvcourier"])
        servers[f"kvcourier@{name}"] = (p, d)
        for way in (Way.PULL, Way.PUSH):
            connectors[f"kvcourier-{way}@{name}"] = (f"kvcourier@{name}", way)
    return servers, connectors, variants


def _some_of(flag: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(text.split(","))
    for each in found:
        if each not in allowed:
            raise ValueError(f"{flag}: expected some of {', '.join(allowed)}, found {each!r}")
    return found


def _two(flag: str, text: str, read: Callable[[str], T]) -> tuple[T, T]:
    try:
        first, second = (read(each) for each in text.split(","))
    except ValueError:
        raise ValueError(f"{flag}: expected two, with a comma between, found {text!r}") from None
    return first, second


def _version(*names: str) -> str | None:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
