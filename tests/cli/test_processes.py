"""Children that are waited for, looked after and always stopped; real ones, tiny."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcourier.demo.processes import Child, Children, ProcessFailed

SERVES = "import signal; print('kvcourier ready http://127.0.0.1:1234', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SERVES
DIES = "import sys; print('loading'); sys.exit('no such model')"


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    with Children(tmp_path, stop_grace_s=10.0) as supervisor:
        yield supervisor


def start(children: Children, code: str, name: str = "child", **environment: str) -> Child:
    return children.start(name, [sys.executable, "-c", code], environment)


def is_alive(pid: int) -> bool:
    """Runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, limit_s: float = 20.0) -> bool:
    deadline = time.monotonic() + limit_s
    while is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_ready_line_gives_the_address(children: Children) -> None:
    child = start(children, SERVES)
    assert children.wait_ready(child) == "http://127.0.0.1:1234"
    assert child.exit_code() is None
    children.check()


def test_the_environment_is_passed_on(children: Children) -> None:
    code = "import os; print('kvcourier ready http://' + os.environ['WHERE']); import time; " + (
        "time.sleep(60)"
    )
    assert children.wait_ready(start(children, code, WHERE="there:1")) == "http://there:1"


def test_an_early_death_shows_the_log(children: Children) -> None:
    child = start(children, DIES, name="decode")
    with pytest.raises(ProcessFailed, match=r"(?s)decode ended with exit code 1.*no such model"):
        children.wait_ready(child)


def test_the_death_of_another_child_is_noticed_while_waiting(children: Children) -> None:
    silent = start(children, "import time; time.sleep(60)", name="silent")
    start(children, DIES, name="broken")
    with pytest.raises(ProcessFailed, match="broken ended"):
        children.wait_ready(silent)


def test_a_killed_child_is_named_with_its_signal(children: Children) -> None:
    child = start(children, SERVES, name="prefill")
    children.wait_ready(child)
    os.kill(child.process.pid, signal.SIGKILL)
    assert wait_until_gone(child.process.pid)
    with pytest.raises(ProcessFailed, match="prefill ended by SIGKILL"):
        children.check()


def test_waiting_is_bounded(children: Children) -> None:
    child = start(children, "import time; time.sleep(60)")
    with pytest.raises(ProcessFailed, match="not ready after 0 s"):
        children.wait_ready(child, timeout_s=0)


def test_a_program_that_does_not_exist(children: Children) -> None:
    with pytest.raises(ProcessFailed, match="cannot start /nowhere/python"):
        children.start("ghost", ["/nowhere/python"])


def test_one_child_can_be_stopped_alone(children: Children) -> None:
    first, second = start(children, SERVES, "first"), start(children, SERVES, "second")
    children.wait_ready(first)
    children.wait_ready(second)
    children.stop(first)
    assert first.exit_code() == -signal.SIGTERM
    assert second.exit_code() is None
    children.check()


def test_stop_is_idempotent(children: Children) -> None:
    child = start(children, SERVES)
    children.wait_ready(child)
    children.stop()
    children.stop()
    children.stop(child)
    assert child.exit_code() == -signal.SIGTERM


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with Children(tmp_path, stop_grace_s=0.05) as children:
        child = start(children, STUBBORN)
        children.wait_ready(child)
    assert child.exit_code() == -signal.SIGKILL


def test_grandchildren_end_too(children: Children) -> None:
    code = (
        "import subprocess, sys; "
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print('kvcourier ready http://pid:' + str(grandchild.pid), flush=True); "
        "grandchild.wait()"
    )
    child = start(children, code)
    grandchild = int(children.wait_ready(child).rpartition(":")[2])
    assert is_alive(grandchild)
    children.stop()
    assert wait_until_gone(grandchild)


def test_an_error_in_the_block_stops_the_children(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Children(tmp_path) as children:
        child = start(children, SERVES)
        children.wait_ready(child)
        raise ZeroDivisionError
    assert child.exit_code() == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_children_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    parent_code = (
        "import pathlib, signal, sys\n"
        "from kvcourier.demo.processes import Children\n"
        "with Children(pathlib.Path(sys.argv[1])) as children:\n"
        f"    child = children.start('child', [sys.executable, '-c', {SERVES!r}])\n"
        "    children.wait_ready(child)\n"
        "    print(child.process.pid, flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent_code, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        assert is_alive(child_pid)
        parent.send_signal(number)
        parent.wait(timeout=30)
    assert wait_until_gone(child_pid)
