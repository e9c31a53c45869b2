"""Whether a peer's process is there and runs, without asking its courier.

Decides what a closer look is: a TCP connection to the rank's side channel and the first byte of
ZMQ's greeting. That byte comes from a thread of ZMQ's own, which needs no interpreter, so a
process whose interpreter is kept busy for seconds still sends it, and one that is stopped does
not. Refuses to know what follows from the answer.
"""

from kvcourier.core.events import Sign
from kvcourier.runtime import looks


def look(host: str, port: int, timeout_s: float) -> Sign:
    """Ask whoever listens there for its greeting; blocks for about `timeout_s` at most."""
    return looks.look(
        host,
        port,
        timeout_s,
        lambda connection: Sign.RUNS if connection.recv(1) else None,
        silent=Sign.SILENT,
        gone=Sign.GONE,
    )
