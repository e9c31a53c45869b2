"""Writes the tables of docs/configuration.md from the code they describe.

Decides the form of the tables. Refuses to know any flag or field: names, defaults, allowed values
and meanings come from the commands' signatures and from the docstrings of the settings.

    python docs/tables.py           rewrites the page
    python docs/tables.py --check   only says whether it is up to date (exit code 1: it is not)
"""

import dataclasses
import enum
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from typer.models import ArgumentInfo

from kvcourier.cli.bench import bench_ablate, bench_compare, bench_sweep
from kvcourier.cli.demo import demo
from kvcourier.cli.doctor import doctor
from kvcourier.cli.drain import drain
from kvcourier.cli.probe import probe
from kvcourier.cli.route import route
from kvcourier.cli.serve import serve
from kvcourier.cli.story import story
from kvcourier.cli.trial import trial
from kvcourier.cli.vllm_config import vllm_config
from kvcourier.config import CourierConfig, EndpointConfig, Limits, StagingConfig, Timing
from kvcourier.engine.config import EngineConfig
from kvcourier.probe.run import ProbeConfig
from kvcourier.router.breaker import BreakerSettings
from kvcourier.router.config import RouterConfig, RouterLimits, Timeouts

PAGE = Path(__file__).with_name("configuration.md")
COMMANDS: tuple[Callable[..., None], ...] = (
    *(serve, route, drain, doctor, probe, story, demo, trial, vllm_config),
    *(bench_sweep, bench_compare, bench_ablate),
)
SETTINGS: tuple[type, ...] = (
    EndpointConfig,
    Timing,
    Limits,
    CourierConfig,
    StagingConfig,
    EngineConfig,
    RouterConfig,
    Timeouts,
    RouterLimits,
    BreakerSettings,
    ProbeConfig,
)
_MORE_TEXT = {
    "timing": "every duration: see `Timing`.",
    "limits": "bounds on what comes from outside: see the limits below.",
    "courier": "how a courier waits and what NIXL it makes: see `CourierConfig`.",
    "staging": "the packed path: see `StagingConfig`.",
    "breaker": "when an instance that keeps failing is left alone: see `BreakerSettings`.",
    "timeouts": "every wait of the router: see `Timeouts`.",
    "backoff_max_s": "longest pause after an instance did not answer.",
}
"""Fields that their class does not explain in an entry of their own."""


def flag_rows(command: Callable[..., None]) -> Iterator[tuple[str, str, str]]:
    """Flag, default and meaning of each option of a command, in the order of its help."""
    hints = typing.get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind, option = typing.get_args(hints[name])[:2]
        # In `Annotated`, typer takes the first name of an option for its default.
        given = [option.default, *(option.param_decls or ())]
        names = [each for each in given if isinstance(each, str) and each.startswith("-")]
        flag = names[0] if names else f"--{name.replace('_', '-')}"
        if isinstance(option, ArgumentInfo):
            flag = option.metavar or "-- ..."
        if kind is bool and not names:
            flag = f"{flag}`, `--no-{flag.removeprefix('--')}"
        yield f"`{flag}`", _default(parameter.default), _allowed(kind, option) + option.help


def field_rows(settings: type) -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each field of a settings class."""
    meanings = _MORE_TEXT | dict(_attributes(settings))
    for spec in dataclasses.fields(settings):
        default: object = spec.default
        if spec.default_factory is not dataclasses.MISSING:
            default = spec.default_factory()
        if default is dataclasses.MISSING:
            default = inspect.Parameter.empty
        yield f"`{spec.name}`", _default(default), meanings[spec.name]


def tables() -> dict[str, str]:
    """Every generated table, by the name in its markers."""
    made = {_title(each): _table("flag", flag_rows(each)) for each in COMMANDS}
    return made | {each.__name__: _table("field", field_rows(each)) for each in SETTINGS}


def filled(page: str) -> str:
    """The page with each table between its markers.

    Raises:
        ValueError: a table has no markers; put them where it belongs.
    """
    for name, table in tables().items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if begin not in page or end not in page:
            raise ValueError(f"{PAGE.name}: expected the markers {begin} and {end}")
        before, rest = page.split(begin, 1)
        page = f"{before}{begin}\n{table}\n{end}{rest.split(end, 1)[1]}"
    return page


def _title(command: Callable[..., None]) -> str:
    return f"cli {command.__name__.replace('_', '-')}"


def _table(first: str, rows: Iterator[tuple[str, str, str]]) -> str:
    lines = [f"| {first} | default | meaning |", "| --- | --- | --- |"]
    lines += [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return "(required)"
    if dataclasses.is_dataclass(value):
        return "its own defaults"
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, frozenset | tuple):
        return ", ".join(f"`{item}`" for item in sorted(value))
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value:,}`" if isinstance(value, int) and value > 65535 else f"`{value}`"


def _allowed(kind: Any, option: Any) -> str:
    """The values a flag takes, where they are few or bounded, as the start of its meaning."""
    enums = [
        each
        for each in (kind, *typing.get_args(kind))
        if isinstance(each, type) and issubclass(each, enum.Enum)
    ]
    if enums:
        return " or ".join(f"`{member.value}`" for member in enums[0]) + ". "
    if option.min is not None and option.max is not None:
        return f"{option.min:g} to {option.max:g}. "
    return "" if option.min is None else f"At least {option.min:g}. "


def _attributes(settings: type) -> Iterator[tuple[str, str]]:
    """Field and meaning from the `Attributes:` section of a class's docstring."""
    section = inspect.getdoc(settings).partition("Attributes:\n")[2]  # type: ignore[union-attr]
    for entry in re.split(r"\n(?= {4}\S)", section):
        names, _, meaning = entry.strip().partition(": ")
        for name in names.split(", "):
            yield name, " ".join(meaning.split())


def main() -> int:
    """Rewrite or check the page; returns the exit code."""
    page = PAGE.read_text()
    wanted = filled(page)
    if "--check" in sys.argv[1:]:
        if page != wanted:
            print(f"{PAGE} is out of date: run `python docs/tables.py`", file=sys.stderr)
        return int(page != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
