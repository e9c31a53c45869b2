"""How to switch to the candidate, and how to switch back.

Decides which lines an operator has to type for either side, by what tells the sides apart: a mode,
an address, a file or flags. Refuses to know how sides are measured. Pure.
"""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvcourier.bench.compare import Side
from kvcourier.bench.pair import PairSpec
from kvcourier.bench.plan import ASKED, Way

Settings = Mapping[str, Mapping[str, Any]]
"""A file of settings: table name, key, value."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What to do to have one of the sides: sentences, and lines for a shell."""

    sentences: tuple[str, ...]
    commands: tuple[str, ...]


def steps_to(side: Side, other: Side) -> Steps:
    """How to come from `other` to `side`; nothing if they are the same."""
    sentences: list[str] = []
    commands: list[str] = []
    for said, lines in (_place(side, other), _way(side, other)):
        sentences += said
        commands += lines
    return Steps(tuple(sentences), tuple(commands))


def differences(before: Settings, after: Settings) -> list[str]:
    """What differs between two files, a line per key: `[serve] block-size: 16 -> 64`."""
    found = []
    for table in dict.fromkeys((*before, *after)):
        old, new = before.get(table, {}), after.get(table, {})
        found += [
            f"[{table}] {key}: {_shown(old, key)} -> {_shown(new, key)}"
            for key in dict.fromkeys((*old, *new))
            if old.get(key) != new.get(key)
        ]
    return found


def _shown(table: Mapping[str, Any], key: str) -> str:
    return repr(table[key]) if key in table else "(not set)"


def _place(side: Side, other: Side) -> tuple[list[str], list[str]]:
    if side.where == other.where:
        return [], []
    if isinstance(side.where, str):
        return [f"Send clients to {side.where}."], []
    return (
        ["Start the instances anew with these settings, one after the other, then the router."],
        list(_start(side.where)),
    )


def _start(pair: PairSpec) -> Iterator[str]:
    model = () if pair.model is None else (f"--model={pair.model}",)
    file = () if pair.config is None else (f"--config={pair.config}",)
    for role in ("prefill", "decode"):
        yield shlex.join(["kvcourier", "serve", f"--role={role}", *model, *file, *pair.flags])
    if file:
        yield shlex.join(["kvcourier", "route", *file])


def _way(side: Side, other: Side) -> tuple[list[str], list[str]]:
    if side.way is other.way:
        return [], []
    if side.way is Way.SINGLE:
        return ["Send requests to one instance, without the router."], []
    if side.way is Way.DEFAULT:
        return ["Send requests without X-KV-Mode and X-KV-Binding: the router chooses."], []
    mode, binding = ASKED[side.way]
    flags = [f"--mode={mode}", *([] if binding is None else [f"--binding={binding}"])]
    headers = f"X-KV-Mode: {mode}" + ("" if binding is None else f" and X-KV-Binding: {binding}")
    return (
        [
            f"For all requests, start the router with {' '.join(flags)}; nothing changes on the "
            f"instances. For single requests, send the header {headers}: a few clients can "
            "go first, and back at any time."
        ],
        [f"kvcourier route {' '.join(flags)} --prefill=... --decode=..."],
    )
