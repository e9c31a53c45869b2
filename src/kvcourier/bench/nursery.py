"""Many instances from one process that has imported what all of them need.

Decides how instances are forked and what becomes of all if one ends. Refuses to know their flags:
each command is run as `python -m kvcourier` would run it.

Importing torch and transformers takes an instance three of the four seconds of its start. On two
cores, twenty of them would begin to serve after a minute; forked from here after a dozen seconds.

    python -m kvcourier.bench.nursery '[["a.log", ["serve", "--port=0"]], ...]'

All instances belong to the process group of the nursery, so who ends the group ends them.
"""

import gc
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from kvcourier.demo.processes import end_with_parent

_TAIL_LINES = 12


def main(arguments: Sequence[str]) -> int:
    """Fork every command and wait; returns an exit code as soon as one of them has ended."""
    commands: list[tuple[str, list[str]]] = [
        (str(log), [str(each) for each in command]) for log, command in json.loads(arguments[0])
    ]
    _import_what_all_need()
    # Collections would write to pages that the instances share otherwise.
    gc.freeze()
    logs: dict[int, str] = {}
    for log, command in commands:
        tie = end_with_parent()
        pid = os.fork()
        if pid == 0:
            if tie is not None:
                tie()
            _become(log, command)
        logs[pid] = log
    told: list[int] = []
    # The group gets the signal: the instances end by themselves, and are waited for.
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    while logs:
        pid, status = os.wait()
        log = logs.pop(pid)
        if not told:
            return _explain(log, os.waitstatus_to_exitcode(status))
    return 0


def _explain(log: str, code: int) -> int:
    """Print how an instance has ended that should not have; returns an exit code."""
    with open(log, encoding="utf-8", errors="replace") as file:
        tail = "".join(file.readlines()[-_TAIL_LINES:])
    print(f"{os.path.basename(log)}: ended with exit code {code}\n{tail}", flush=True)
    return 1


def _import_what_all_need() -> None:
    # CUDA, once begun here, could not be used by children: whether there are GPUs is asked of NVML.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Not NIXL: what its libraries set up when they are loaded is a process's own.
    import kvcourier.engine.engine
    import kvcourier.engine.models
    import kvcourier.engine.random_model
    import kvcourier.engine.server.app  # noqa: F401


def _become(log: str, command: Sequence[str]) -> NoReturn:
    """Be this instance from now on; nothing of the nursery's own is run after it."""
    code = 1
    try:
        with open(log, "wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.argv = ["kvcourier", *command]
        runpy.run_module("kvcourier", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
