"""A run from start to end, whichever it is.

Decides when processes and connections end, what becomes of logs, and that what was measured is
written even where a run is cut off. Refuses to know what is measured.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvcourier.bench.report import Report, as_json, as_trace
from kvcourier.bench.session import LoadSettings, Session
from kvcourier.demo.processes import Children
from kvcourier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write; None: not wanted.

    Raises:
        ConfigError: a folder does not exist, or plotly is wanted and missing.
    """

    json: Path | None = None
    html: Path | None = None
    trace: Path | None = None

    def __post_init__(self) -> None:
        for flag, path in (("--json", self.json), ("--html", self.html), ("--trace", self.trace)):
            if path is not None and not path.absolute().parent.is_dir():
                raise ConfigError(f"{flag}: the folder {path.absolute().parent} does not exist")
        if self.html is not None and importlib.util.find_spec("plotly") is None:
            raise ConfigError("--html needs plotly: pip install 'kvcourier[bench]'")

    def write(self, report: Report) -> None:
        """Write what is wanted; each file appears whole or not at all."""
        if self.json is not None:
            _write(self.json, json.dumps(as_json(report), indent=2) + "\n")
        if self.trace is not None:
            _write(self.trace, json.dumps(as_trace(report)))
        if self.html is not None:
            # Slow to import, and an extra.
            from kvcourier.bench.page import make_page

            _write(self.html, make_page(report))


def run(
    report: Report,
    load: LoadSettings,
    outputs: Outputs,
    console: Console,
    measure: Callable[[Session], None],
) -> None:
    """Measure into `report` and write it; blocks. Main thread only.

    What was measured before an error or Ctrl-C is written as well, with a problem that says so.

    Raises:
        KVCourierError: as `measure`.
    """
    log_dir = Path(tempfile.mkdtemp(prefix="kvcourier-bench-"))
    keep_logs = True
    try:
        with Children(log_dir) as children, Session(children, log_dir, console, load) as session:
            try:
                measure(session)
            except BaseException as error:
                said = str(error).partition(";")[0]
                if isinstance(error, KeyboardInterrupt):
                    said = "interrupted"
                report.problems.append(f"the run was cut off: {said}")
                raise
        keep_logs = not report.succeeded
    except (KeyboardInterrupt, ConfigError):
        keep_logs = False
        raise
    finally:
        if keep_logs and any(log_dir.iterdir()):
            console.print(f"The logs of all processes are in {log_dir}", style="yellow")
        else:
            shutil.rmtree(log_dir, ignore_errors=True)
        if report.measured:
            outputs.write(report)


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_text(text)
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
