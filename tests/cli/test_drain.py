"""`kvcourier drain` against servers that answer by a plan."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcourier.cli import draining
from kvcourier.cli.app import app
from loopback import Handler, Listener
from ports import free_port

Call = tuple[str, str, Any, str | None]
Plan = Callable[["Planned", Call], tuple[int, Any]]


class Planned:
    """A server that answers by a plan and remembers what it was asked."""

    def __init__(self, plan: Plan) -> None:
        self.calls: list[Call] = []
        planned = self

        class Answers(Handler):
            def do_GET(self) -> None:
                content = self.body()
                body = json.loads(content) if content else None
                call = (self.command, self.path, body, self.headers.get("authorization"))
                planned.calls.append(call)
                status, told = plan(planned, call)
                self.answer(status, (told if isinstance(told, str) else json.dumps(told)).encode())

            do_POST = do_DELETE = do_GET

        self._listener = Listener(Answers)
        self.url = self._listener.url

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def planned() -> Iterator[Callable[[Plan], Planned]]:
    made: list[Planned] = []

    def make(plan: Plan) -> Planned:
        made.append(Planned(plan))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "_PAUSE_S", 0.0)


def run(*arguments: str) -> Any:
    return CliRunner(env={"NO_COLOR": "1"}).invoke(app, ["drain", *arguments])


def empties(after: int) -> Plan:
    """An embedded instance that is empty at the so-manieth question."""

    def plan(server: Planned, _call: Call) -> tuple[int, Any]:
        running = max(0, after - len(server.calls))
        return 200, {"draining": True, "running": running, "kept": 0, "empty": not running}

    return plan


def a_router(after: int = 1) -> Plan:
    def plan(server: Planned, _call: Call) -> tuple[int, Any]:
        left = max(0, after - len(server.calls))
        return 200, {"draining": True, "in_flight": left, "empty": not left}

    return plan


def test_an_embedded_instance_is_waited_for(planned: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    server = planned(empties(after=3))
    done = run(server.url, f"--api-key-file={tmp_path / 'key'}")
    assert done.exit_code == 0, done.stderr
    assert server.calls == [("POST", "/drain", None, "Bearer secret")] * 3


def test_what_does_not_become_empty_is_said(planned: Any) -> None:
    server = planned(empties(after=10**9))
    done = run(server.url, "--timeout=0")
    assert done.exit_code == 1
    assert "not empty after 0 s" in done.stderr and "requests running" in done.stderr


def test_all_routers_are_told_and_waited_for(planned: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("admin\n")
    routers = [planned(a_router(1)), planned(a_router(4))]
    flags = [f"--router={each.url}" for each in routers]
    done = run("http://d1:8200/", "--role=decode", *flags, f"--admin-key-file={tmp_path / 'key'}")
    assert done.exit_code == 0, done.stderr
    body = {"role": "decode", "instance": "http://d1:8200"}
    call = ("POST", "/kvcourier/admin/drain", body, "Bearer admin")
    assert [each.calls for each in routers] == [[call] * 4, [call] * 4]


def test_a_router_that_is_gone_or_does_not_have_it_sends_nothing(planned: Any) -> None:
    routers = [planned(lambda *_: (404, {})).url, planned(a_router(2)).url]
    gone = f"http://127.0.0.1:{free_port()}"
    flags = [f"--router={each}" for each in (*routers, gone)]
    done = run("http://d1:8200", "--role=decode", *flags)
    assert done.exit_code == 0, done.stderr


def test_where_nobody_can_be_asked_it_fails_at_once(planned: Any) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    unknown = planned(lambda *_: (404, {})).url
    done = run("http://d1:8200", "--role=decode", f"--router={gone}", f"--router={unknown}")
    assert done.exit_code == 1
    assert "cannot be reached" in done.stderr and "has no decode instance" in done.stderr


@pytest.mark.parametrize(
    ("status", "content", "sentence"),
    [
        (401, {}, "does not let us"),
        (403, {"error": "start it with --admin-key-file"}, "--admin-key-file"),
        (500, {}, "answered 500"),
        (200, "<html>", "no JSON object"),
        (200, {"in_flight": "many"}, "expected a number as in_flight"),
    ],
)
def test_a_router_that_does_not_do_it(
    planned: Any, status: int, content: Any, sentence: str
) -> None:
    server = planned(lambda *_: (status, content))
    done = run("http://d1:8200", "--role=decode", f"--router={server.url}")
    assert done.exit_code == 1
    assert sentence in done.stderr


def test_vllm_cannot_be_drained_itself(planned: Any) -> None:
    done = run(planned(lambda *_: (404, {"detail": "Not Found"})).url)
    assert done.exit_code == 1
    assert "--router" in done.stderr


def test_a_router_is_waited_for_by_its_metric(planned: Any) -> None:
    def plan(server: Planned, _call: Call) -> tuple[int, Any]:
        return 200, f"kvcourier_router_in_flight {3 - len(server.calls)}.0\n"

    server = planned(plan)
    done = run(server.url, "--only-wait")
    assert done.exit_code == 0, done.stderr
    assert [call[1] for call in server.calls] == ["/metrics"] * 3
    other = planned(lambda *_: (200, "something 1\n"))
    assert "is that a router?" in run(other.url, "--only-wait").stderr


def test_taken_back_at_a_router_and_at_an_instance(planned: Any) -> None:
    router, instance = planned(a_router()), planned(empties(0))
    assert (
        run("http://p1:8100", "--role=prefill", f"--router={router.url}", "--resume").exit_code == 0
    )
    assert router.calls[0][1] == "/kvcourier/admin/resume"
    assert run(instance.url, "--resume").exit_code == 0
    assert instance.calls[0][:2] == ("DELETE", "/drain")


def test_a_name_with_several_addresses_is_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(0, 0, 0, "", (address, 8192)) for address in ("10.0.0.1", "10.0.0.2", "10.0.0.1")]
    monkeypatch.setattr(draining.socket, "getaddrinfo", lambda *_, **__: found)
    urls = ["http://routers:8192", "https://router"]
    assert list(draining.every_address(urls)) == [
        "http://10.0.0.1:8192",
        "http://10.0.0.2:8192",
        "https://router",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "URL: expected an address"),
        (["http://d", "--router=http://r"], "--role: expected"),
        (["http://r", "--only-wait", "--resume"], "--only-wait"),
    ],
)
def test_flags_that_do_not_fit(arguments: list[str], sentence: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
