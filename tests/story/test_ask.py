"""Asking: every kind of answer has its sentence, keys go where they belong, and it ends."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcourier.cli.app import app
from kvcourier.runtime.diary import CLOCK_HEADER
from kvcourier.story.accounts import Part
from kvcourier.story.ask import LOOKS, Place, ask_all
from loopback import Handler, Listener
from ports import free_port

Answer = tuple[int, Any]
OFFSET_S = 1000.0


class Teller:
    """A server that answers by a table of paths, on a clock that is `OFFSET_S` ahead."""

    def __init__(self, answers: dict[str, Answer], *, tells_clock: bool = True) -> None:
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        teller = self

        class Answers(Handler):
            def do_GET(self) -> None:
                teller.paths.append(self.path)
                teller.keys.append(self.headers.get("authorization"))
                status, content = answers.get(self.path, (404, {}))
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                clock = {CLOCK_HEADER: f"{time.time() + OFFSET_S:.6f}"} if tells_clock else {}
                self.answer(status, body, clock)

        self._listener = Listener(Answers)
        self.url = self._listener.url

    def close(self) -> None:
        self._listener.close()


MakeTeller = Callable[..., Teller]


@pytest.fixture
def teller() -> Iterator[MakeTeller]:
    made: list[Teller] = []

    def make(answers: dict[str, Answer], **options: Any) -> Teller:
        made.append(Teller(answers, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def entry(what: str, at: float = 5.0, **details: Any) -> dict[str, Any]:
    return {"at_unix_s": at + OFFSET_S, "what": what, **details}


STORY = "/kvcourier/story/t"


def problem_of(url: str, timeout_s: float = 5.0) -> str:
    (asked,) = asyncio.run(ask_all("t", [Place(Part.DECODE, url)], timeout_s))
    assert asked.account is None
    return asked.problem


def test_a_clock_is_compared_by_several_questions(teller: MakeTeller) -> None:
    told = teller({STORY: (200, [entry("received")])})
    (asked,) = asyncio.run(ask_all("t", [Place(Part.DECODE, told.url)], 5.0))
    assert asked.account is not None and asked.account.clock is not None
    assert len(told.paths) == LOOKS
    clock = asked.account.clock
    assert abs(clock.offset_s - OFFSET_S) <= clock.uncertainty_s + 1e-3


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((404, {}), "does not know it"),
        ((401, {}), "wants an API key"),
        ((500, {}), "answered 500"),
        ((200, b"<html>"), "not JSON"),
        ((200, b"[" * 100_000), "not JSON"),
        ((200, {"a": 1}), "told no story"),
        ((200, b" " * (5 << 20)), "answered with more than"),
    ],
)
def test_each_kind_of_answer_has_its_sentence(
    teller: MakeTeller, answer: Answer, sentence: str
) -> None:
    assert sentence in problem_of(teller({STORY: answer}).url)


def test_who_keeps_no_stories_is_told_from_who_has_none(teller: MakeTeller) -> None:
    assert "keeps no stories" in problem_of(teller({}, tells_clock=False).url)


def test_nobody_there() -> None:
    assert "cannot be reached" in problem_of(f"http://127.0.0.1:{free_port()}")


def test_a_server_that_hangs_does_not_hang_us() -> None:
    async def hang(_reader: Any, _writer: Any) -> None:
        await asyncio.Event().wait()

    async def ask() -> str:
        async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            (asked,) = await ask_all("t", [Place(Part.ROUTER, url)], 0.2)
            return asked.problem

    assert asyncio.run(ask()) == "did not answer within 0.2 s"


def test_a_key_with_slashes_is_one_part_of_the_path(teller: MakeTeller) -> None:
    told = teller({})
    asyncio.run(ask_all("a/../b?c", [Place(Part.DECODE, told.url)], 5.0))
    assert told.paths == ["/kvcourier/story/a%2F..%2Fb%3Fc"]


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"})


def test_behind_a_router_its_instances_are_asked_by_the_transfer_id(
    runner: CliRunner, teller: MakeTeller, tmp_path: Any
) -> None:
    prefill = teller({"/kvcourier/story/t-1": (200, [entry("queued", 6.0)])})
    decode = teller({"/kvcourier/story/t-1": (200, [entry("received", 7.0)])})
    known = {"prefill": [{"url": prefill.url}], "decode": [{"url": decode.url}]}
    router = teller(
        {
            "/kvcourier/story/my-request": (200, [entry("dispatched", transfer_id="t-1")]),
            "/kvcourier/instances": (200, known),
        }
    )
    (tmp_path / "router.key").write_text("router-key\n")
    (tmp_path / "instances.key").write_text("instance-key\n")
    flags = [
        f"--router={router.url}",
        f"--api-key-file={tmp_path / 'router.key'}",
        f"--instance-api-key-file={tmp_path / 'instances.key'}",
    ]
    done = runner.invoke(app, ["story", "my-request", *flags, "--json"])
    assert done.exit_code == 0, done.output
    moments = [(each["who"], each["what"]) for each in json.loads(done.stdout)["moments"]]
    assert moments == [("router", "dispatched"), ("P", "queued"), ("D", "received")]
    assert set(router.keys) == {"Bearer router-key"}
    assert set(prefill.keys) == set(decode.keys) == {"Bearer instance-key"}


def test_what_is_told_cannot_write_to_the_terminal(runner: CliRunner, teller: MakeTeller) -> None:
    nasty = entry("\x1b]0;title\x07[red]posted[/red]", reason="\x1b[2J")
    told = teller({STORY: (200, [nasty])})
    done = runner.invoke(app, ["story", "t", f"--decode={told.url}"])
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout and "\x07" not in done.stdout
    assert "[red]posted[/red]" in done.stdout


def test_one_who_knows_it_is_enough(runner: CliRunner, teller: MakeTeller) -> None:
    told = teller({STORY: (200, [entry("received")])})
    gone = f"http://127.0.0.1:{free_port()}"
    done = runner.invoke(app, ["story", "t", f"--decode={told.url}", f"--prefill={gone}"])
    assert done.exit_code == 0
    assert f"P {gone}: cannot be reached" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["t", "--decode=nowhere"], "--decode: expected an address"),
        (["t", "--router=http://"], "--router: expected an address"),
        (["\x1b"], "TRANSFER_ID"),
        (["t" * 5000], "TRANSFER_ID"),
        (["t", "--api-key-file=/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_a_flag_that_cannot_be_used(runner: CliRunner, arguments: list[str], sentence: str) -> None:
    done = runner.invoke(app, ["story", *arguments])
    assert done.exit_code == 2
    assert sentence in done.stderr
