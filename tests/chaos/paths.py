"""Cutting one of the ways between processes, in a network of their own.

Decides which packets are dropped, by routing rules on ports, in a network namespace that an
ordinary user may make. Refuses to know who talks. `enter` says whether it can be had here.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

_INSIDE = "CHAOS_INSIDE"
DATA_PORTS = (33792, 34815)
DATA_PATH = {"UCX_TLS": "tcp", "UCX_TCP_PORT_RANGE": "{}-{}".format(*DATA_PORTS)}
"""Variables of processes whose data path goes over these ports: shared memory cannot be cut."""


def is_inside() -> bool:
    """Whether this process has a network of its own."""
    return _INSIDE in os.environ


def enter() -> bool:
    """Start this program again in a network of its own; False if that is not allowed here."""
    command = ["unshare", "--user", "--map-root-user", "--net"]
    if not all(map(shutil.which, ("unshare", "ip"))):
        return False
    if subprocess.run([*command, "true"], check=False, capture_output=True).returncode:
        return False
    os.environ[_INSIDE] = "1"
    os.execvp("unshare", [*command, sys.executable, *sys.orig_argv[1:]])


def prepare() -> None:
    """Set up the network; inside only."""
    _ip("link set lo up")
    # The local table comes first by default, and nothing could come before it.
    _ip("rule add pref 100 lookup local")
    _ip("rule del pref 0")


@contextlib.contextmanager
def dropped(which: str, http_ports: Sequence[int]) -> Iterator[None]:
    """Nothing goes over the `side channel`, the `data path`, or `both`, in either direction."""
    first, last = DATA_PORTS
    fates = {
        "side channel": ("lookup local", "blackhole"),
        "data path": ("blackhole", "lookup local"),
        "both": ("blackhole", "blackhole"),
    }
    data, rest = fates[which]
    rules = [
        *(f"pref 10 ipproto tcp {end} {port} lookup local" for port in http_ports for end in _ENDS),
        *(f"pref 20 ipproto tcp {end} {first}-{last} {data}" for end in _ENDS),
        f"pref 30 ipproto tcp {rest}",
    ]
    for rule in rules:
        _ip(f"rule add {rule}")
    try:
        yield
    finally:
        for rule in rules:
            _ip(f"rule del {rule}")


_ENDS = ("sport", "dport")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)
