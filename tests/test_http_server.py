"""Servers as processes: the ready line, what each signal does, and how they end."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvcourier.demo.processes import Child, Children
from kvcourier.errors import ConfigError
from kvcourier.http_server import bind, url_of

LIMIT_S = 30
# Instances that are not there are no reason for a router not to start.
ROUTE = [sys.executable, "-m", "kvcourier", "route", "--port", "0"]
ROUTE += ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
ENDLESS = """
import asyncio
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route
from kvcourier.http_server import bind, serve_until_stopped

async def endless():
    while True:
        yield b"x"
        await asyncio.sleep(0.01)

async def stream(request):
    return StreamingResponse(endless())

serve_until_stopped(Starlette(routes=[Route("/", stream)]), bind("127.0.0.1", 0))
print("cleaned up", flush=True)
"""
BROKEN = """
from contextlib import asynccontextmanager
from starlette.applications import Starlette
from kvcourier.cli.app import app
from kvcourier.http_server import bind, serve_until_stopped

@asynccontextmanager
async def lifespan(_):
    raise RuntimeError("no such thing")
    yield

@app.command()
def broken():
    serve_until_stopped(Starlette(lifespan=lifespan), bind("127.0.0.1", 0))

app(["broken"])
"""


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    with Children(tmp_path, stop_grace_s=10.0) as supervisor:
        yield supervisor


def end(child: Child, *numbers: signal.Signals) -> int:
    for number in numbers:
        child.process.send_signal(number)
    return child.process.wait(timeout=LIMIT_S)


def test_the_router_answers_at_the_address_of_its_ready_line(children: Children) -> None:
    url = children.wait_ready(children.start("router", ROUTE))
    assert httpx.get(f"{url}/metrics", timeout=LIMIT_S).status_code == 200


@pytest.mark.parametrize(
    ("number", "code", "log"), [(signal.SIGTERM, 0, ""), (signal.SIGINT, 130, "interrupted")]
)
def test_each_signal_has_its_exit_code(
    children: Children, number: signal.Signals, code: int, log: str
) -> None:
    child = children.start("router", ROUTE)
    children.wait_ready(child)
    assert end(child, number) == code
    output = child.log.read_text()
    assert log in output
    assert "Traceback" not in output


def test_a_second_signal_ends_running_requests(children: Children) -> None:
    child = children.start("endless", [sys.executable, "-c", ENDLESS])
    url = children.wait_ready(child)
    with httpx.stream("GET", url, timeout=LIMIT_S) as response:
        assert next(response.iter_raw())
        assert end(child, signal.SIGTERM, signal.SIGTERM) == 0
    assert "cleaned up" in child.log.read_text()


def test_a_failed_start_is_one_sentence_and_exit_code_1() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 1
    assert done.stderr.endswith("kvcourier: the server did not start; the log above says why\n")
    assert "no such thing" in done.stderr
    assert "ready" not in done.stdout


def test_a_taken_port_is_refused_at_once() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        done = subprocess.run(
            [*ROUTE, "--port", str(port)], capture_output=True, text=True, timeout=LIMIT_S
        )
    assert done.returncode == 2
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in done.stderr


@pytest.mark.parametrize(
    ("host", "port"),
    [("256.0.0.1", 0), ("not a host", 0), ("a..b", 0), ("203.0.113.1", 0), ("127.0.0.1", 70000)],
)
def test_an_address_that_is_not_here(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen at"):
        bind(host, port)


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
def test_the_shown_address_can_be_reached(host: str, shown: str) -> None:
    with bind(host, 0) as listener:
        assert url_of(listener) == f"http://{shown}:{listener.getsockname()[1]}"
