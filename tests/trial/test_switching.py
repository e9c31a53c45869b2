"""What an operator has to type to switch on and back."""

from pathlib import Path

import pytest

from kvcourier.bench.compare import Side
from kvcourier.bench.pair import PairSpec
from kvcourier.bench.plan import ASKED, Way
from kvcourier.trial.switching import differences, steps_to

ROUTER = "http://router:8192"


def side(where: str | PairSpec = ROUTER, way: Way = Way.DEFAULT) -> Side:
    return Side("a side", where, way)


@pytest.mark.parametrize("way", ASKED)
def test_a_mode_is_a_flag_of_the_router_or_a_header(way: Way) -> None:
    steps = steps_to(side(way=way), side(way=Way.SINGLE))
    mode, binding = ASKED[way]
    (sentence,) = steps.sentences
    (command,) = steps.commands
    assert f"X-KV-Mode: {mode}" in sentence
    assert f"--mode={mode}" in command
    assert (f"--binding={binding}" in command) == (binding is not None)
    assert ("X-KV-Binding" in sentence) == (binding is not None)


def test_equal_sides_need_nothing() -> None:
    steps = steps_to(side(), side())
    assert (steps.sentences, steps.commands) == ((), ())


def test_another_address_is_where_clients_go() -> None:
    steps = steps_to(side("http://new:1"), side("http://old:1"))
    assert steps.sentences == ("Send clients to http://new:1.",)


def test_flags_and_files_are_lines_for_a_shell() -> None:
    pair = PairSpec("a model", ("--block-size=64",), Path("next.toml"))
    steps = steps_to(side(pair, Way.PUSH), side(PairSpec(), Way.PULL))
    assert steps.commands == (
        "kvcourier serve --role=prefill '--model=a model' --config=next.toml --block-size=64",
        "kvcourier serve --role=decode '--model=a model' --config=next.toml --block-size=64",
        "kvcourier route --config=next.toml",
        "kvcourier route --mode=push --prefill=... --decode=...",
    )


def test_differences_of_files_are_named_key_by_key() -> None:
    before = {"serve": {"block-size": 16, "path": "auto"}, "route": {"mode": "pull"}}
    after = {"serve": {"block-size": 64, "path": "auto"}, "route": {}, "demo": {"prompts": 2}}
    assert differences(before, after) == [
        "[serve] block-size: 16 -> 64",
        "[route] mode: 'pull' -> (not set)",
        "[demo] prompts: (not set) -> 2",
    ]
    assert differences(before, before) == []
