"""Whether a peer's process is there and runs, without asking its courier.

Decides what a closer look is: a TCP connection to the rank's side channel and the first byte of
ZMQ's greeting. That byte comes from a thread of ZMQ's own, which needs no interpreter, so a
process whose interpreter is kept busy for seconds still sends it, and one that is stopped does
not. Refuses to know what follows from the answer.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kvcourier.core.events import Sign

K = TypeVar("K", bound=Hashable)

_AGAIN_S = 0.005


def look(host: str, port: int, timeout_s: float) -> Sign:
    """Ask whoever listens there for its greeting; blocks for about `timeout_s` at most."""
    deadline = time.monotonic() + timeout_s
    while True:
        sign = _try(host, port, timeout_s)
        # Whoever hangs up before the greeting may be about to end: look again. At least one look
        # is taken to its end, however late our own thread comes to it.
        if sign is not None:
            return sign
        if time.monotonic() >= deadline:
            return Sign.SILENT
        time.sleep(_AGAIN_S)


def _try(host: str, port: int, timeout_s: float) -> Sign | None:
    """One look; None if it has to be taken again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect((host, port))
            return Sign.RUNS if connection.recv(1) else None
    except ConnectionRefusedError:
        return Sign.GONE
    except TimeoutError:
        return Sign.SILENT
    except (OSError, TypeError, UnicodeError):
        # The latter two: Python cannot encode the host's name.
        return None


class VitalSigns(Generic[K]):
    """Closer looks under way, each in a thread of its own, since a name may take long to resolve.

    Args:
        wake: called, from such a thread, when there is something to take.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._found: deque[tuple[K, Sign]] = deque()

    def look_at(self, name: K, host: str, port: int, timeout_s: float) -> None:
        """Begin; the answer comes out of `take`."""
        threading.Thread(
            target=self._look, args=(name, host, port, timeout_s), name="kv-probe", daemon=True
        ).start()

    def say(self, name: K, sign: Sign) -> None:
        """Answer at once."""
        self._found.append((name, sign))
        self._wake()

    def take(self) -> list[tuple[K, Sign]]:
        """What has been found since the last time."""
        taken = []
        while self._found:
            taken.append(self._found.popleft())
        return taken

    def _look(self, name: K, host: str, port: int, timeout_s: float) -> None:
        self.say(name, look(host, port, timeout_s))
