"""What is on the machine where the doctor runs.

Decides which tools are asked, where they are installed, and how long. Refuses to judge.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence

from kvcourier.doctor.facts import MachineFacts, ToolFacts
from kvcourier.runtime.about import fabric_environment, rdma_devices, versions

_TIMEOUT_S = 10.0
_MAX_CHARACTERS = 20_000

TOOLS: tuple[tuple[str, Sequence[str]], ...] = (
    ("InfiniBand and RoCE", ("ibv_devices",)),
    ("EFA", ("fi_info", "-p", "efa")),
    ("NVLink", ("nvidia-smi", "nvlink", "--status")),
)
"""What each tells of, and how it is asked."""


def look_around() -> MachineFacts:
    """Ask every tool that is installed; blocks for some seconds at most."""
    return MachineFacts(
        versions=versions(),
        environment=fabric_environment(os.environ),
        rdma_devices=tuple(rdma_devices()),
        tools=tuple(_ask(what, command) for what, command in TOOLS),
    )


def _ask(what: str, command: Sequence[str]) -> ToolFacts:
    asked = " ".join(command)
    if shutil.which(command[0]) is None:
        return ToolFacts(what, asked)
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return ToolFacts(what, asked, True, None, str(error))
    return ToolFacts(what, asked, True, ended.returncode, ended.stdout[:_MAX_CHARACTERS])
