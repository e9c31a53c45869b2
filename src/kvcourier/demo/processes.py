"""Child processes that are waited for, looked after and always stopped.

Decides when a child counts as ready, what is said when one fails, and how all of them end. Refuses
to know what the children are.

Three things end a child: `stop`, leaving the `with` block, and the death of this process, however
it comes (the kernel sends SIGKILL to direct children then). Each child leads its own process group,
so that Ctrl-C in a terminal reaches this process alone and the order of stopping is ours.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvcourier.errors import KVCourierError

READY_LINE = re.compile(rb"^kvcourier ready (http://\S+)\r?$", re.MULTILINE)
"""What a child prints once it serves requests; the group is its address."""

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
_TAIL_LINES = 15


class ProcessFailed(KVCourierError):
    """A child ended by itself or did not become ready; the message has the end of its log."""


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """One started process; stdout and stderr go to `log`."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def exit_code(self) -> int | None:
        """Exit code (negative: signal) of a child that has ended, None while it runs.

        Does not reap it: while the leader is a zombie, its group's number cannot be reused, so
        signalling the group stays safe.
        """
        if self.process.returncode is not None:
            return self.process.returncode
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def url(self) -> str | None:
        """Address from the ready line, None if it has not been printed yet."""
        match = READY_LINE.search(self.log.read_bytes())
        return match.group(1).decode() if match else None

    def log_tail(self) -> str:
        """The last lines of the child's output, indented, with the path of the whole."""
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"last lines of {self.log}:", *(f"    {line}" for line in lines)])


class Children:
    """The processes of one run; use it in a `with` block, from a thread that outlives them.

    Args:
        log_dir: existing folder that gets one `NAME.log` per child.
        stop_grace_s: how long children may take to end after SIGTERM, all of them together.
    """

    def __init__(self, log_dir: Path, stop_grace_s: float = 5.0) -> None:
        self._log_dir = log_dir
        self._stop_grace_s = stop_grace_s
        self._running: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Child:
        """Start a process and return at once; call `wait_ready` next.

        Args:
            name: says which child it is in messages; also names its log.
            command: program and arguments.
            environment: variables set in addition to this process's own.

        Raises:
            ProcessFailed: the program cannot be started.
        """
        log = self._log_dir / f"{name}.log"
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                    start_new_session=True,
                    preexec_fn=end_with_parent(),
                )
            except OSError as error:
                raise ProcessFailed(f"{name}: cannot start {command[0]}: {error}") from error
        child = Child(name, process, log)
        self._running.append(child)
        return child

    def wait_ready(self, child: Child, timeout_s: float = 120.0) -> str:
        """Block until the child prints its ready line; returns the address in it.

        Raises:
            ProcessFailed: it, or another child, ended first, or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            if (url := child.url()) is not None:
                return url
            if time.monotonic() > deadline:
                raise ProcessFailed(
                    f"{child.name} was not ready after {timeout_s:g} s; {child.log_tail()}"
                )
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raise ProcessFailed if a child that should be running has ended."""
        for child in self._running:
            code = child.exit_code()
            if code is not None:
                how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
                raise ProcessFailed(f"{child.name} ended {how}; {child.log_tail()}")

    def stop(self, *children: Child) -> None:
        """End these children (all, if none is named) and everything in their groups.

        SIGTERM, then SIGKILL for what is left after the grace period. Blocks no longer than that;
        Ctrl-C and SIGTERM are ignored meanwhile, so that the end is never half done. Idempotent.
        """
        chosen = [child for child in self._running if not children or child in children]
        with _undisturbed():
            for child in chosen:
                _signal_group(child, signal.SIGTERM)
            deadline = time.monotonic() + self._stop_grace_s
            while any(child.exit_code() is None for child in chosen):
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
            for child in chosen:
                # Also where the leader has ended: its own children may not have.
                _signal_group(child, signal.SIGKILL)
                child.process.wait()
                self._running.remove(child)


def _signal_group(child: Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process.pid, number)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM; only the main thread may, and only it is interrupted by them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent() -> "_EndWithParent | None":
    """What a child calls right after the fork to end with this process; None where none can."""
    return _EndWithParent() if sys.platform == "linux" else None


class _EndWithParent:
    """Runs in the child right after the fork: everything it needs was looked up before."""

    def __init__(self) -> None:
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._parent = os.getpid()

    def __call__(self) -> None:
        self._prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != self._parent:  # it died before the line above
            os._exit(1)
