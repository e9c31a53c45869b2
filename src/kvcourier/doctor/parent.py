"""Sending a process of its own on an errand, and bringing home what it says.

Decides how long it may take, and what is told if it does not come back. Refuses to know errands.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvcourier.doctor.errands import Errand, FetchedTwice, NixlTried
from kvcourier.doctor.facts import ErrandFacts
from kvcourier.errors import clip

R = TypeVar("R", NixlTried, FetchedTwice)

_UCX_LINE = re.compile(r"UCX\s+(WARN|ERROR|INFO)\s+(.*)")
_UCX_WAY = re.compile(r"\b(intra-node|inter-node|intra-device)\s+cfg#\d+\s+(.*)")
_MOST_LINES = 12


def run(errand: Errand, result: type[R], timeout_s: float) -> ErrandFacts[R]:
    """Have it done; blocks for at most so long.

    Args:
        result: what comes of such an errand.
    """
    environment = {"UCX_LOG_LEVEL": "info"} | dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="kvcourier-doctor-") as folder:
        home, output = Path(folder, "result.json"), Path(folder, "output.txt")
        with output.open("wb") as written:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvcourier.doctor.child", str(home)],
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            try:
                process.communicate(msgspec.json.encode(errand), timeout_s)
            except subprocess.TimeoutExpired:
                return _unfinished(f"did not end within {timeout_s:g} s", output)
            finally:
                process.kill()
                process.wait()
        try:
            told = msgspec.json.decode(home.read_bytes(), type=result)
        except (OSError, msgspec.DecodeError):
            return _unfinished(f"ended with code {process.returncode} and no result", output)
        return ErrandFacts(told, "", *read_log(output.read_text(errors="replace")))


def read_log(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What UCX says in a log: (ways it takes between processes, its warnings and errors)."""
    ways: dict[str, None] = {}
    complaints: dict[str, None] = {}
    for line in text.splitlines():
        said = _UCX_LINE.search(line)
        if said is None:
            continue
        way = _UCX_WAY.search(said[2])
        if way:
            ways[f"{way[1]} {' '.join(way[2].split())}"] = None
        elif said[1] != "INFO":
            complaints[clip(said[2].strip())] = None
    return tuple(ways)[:_MOST_LINES], tuple(complaints)[:_MOST_LINES]


def _unfinished(what: str, output: Path) -> ErrandFacts[Any]:
    text = output.read_text(errors="replace")
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    problem = f"the process {what}" + (f"; its last line: {clip(last)}" if last else "")
    return ErrandFacts(None, problem, *read_log(text))
