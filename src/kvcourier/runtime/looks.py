"""Looking at who listens somewhere, by a TCP connection of one's own.

Decides how often a look is taken and what an address that does not answer means. Refuses to know
what is read over the connection.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
A = TypeVar("A")

_AGAIN_S = 0.005


def look(
    host: str,
    port: int,
    timeout_s: float,
    read: Callable[[socket.socket], A | None],
    *,
    silent: A,
    gone: A,
) -> A:
    """What a look finds; blocks for about `timeout_s` at most.

    Args:
        read: what the open connection tells; None, or an OSError, if it was closed before that.
        silent: the answer for one that does not speak in time.
        gone: the answer where nobody listens.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = _try(host, port, timeout_s, read, silent, gone)
        # Whoever hangs up before the greeting may be about to end: look again. At least one look
        # is taken to its end, however late our own thread comes to it.
        if found is not None:
            return found
        if time.monotonic() >= deadline:
            return silent
        time.sleep(_AGAIN_S)


def _try(
    host: str,
    port: int,
    timeout_s: float,
    read: Callable[[socket.socket], A | None],
    silent: A,
    gone: A,
) -> A | None:
    """One look; None if it has to be taken again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect((host, port))
            return read(connection)
    except ConnectionRefusedError:
        return gone
    except TimeoutError:
        return silent
    except (OSError, TypeError, UnicodeError):
        # The latter two: Python cannot encode the host's name.
        return None


class Looks(Generic[K, A]):
    """Looks under way, each in a thread of its own, since a name may take long to resolve.

    Args:
        look: takes host, port and seconds, and blocks.
        wake: called, from such a thread, when there is something to take.
    """

    def __init__(self, look: Callable[[str, int, float], A], wake: Callable[[], None]) -> None:
        self._look = look
        self._wake = wake
        self._found: deque[tuple[K, A]] = deque()

    def begin(self, name: K, host: str, port: int, timeout_s: float) -> None:
        """Begin one; the answer comes out of `take`."""
        threading.Thread(
            target=self._run, args=(name, host, port, timeout_s), name="kv-probe", daemon=True
        ).start()

    def say(self, name: K, answer: A) -> None:
        """Answer at once."""
        self._found.append((name, answer))
        self._wake()

    def take(self) -> list[tuple[K, A]]:
        """What has been found since the last time."""
        taken = []
        while self._found:
            taken.append(self._found.popleft())
        return taken

    def _run(self, name: K, host: str, port: int, timeout_s: float) -> None:
        self.say(name, self._look(host, port, timeout_s))
