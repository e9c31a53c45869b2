"""What `kvcourier bench` and `kvcourier trial` have in common beside their flags' names.

Decides how the texts of flags are read, what the sentences about wrong ones are, and what is shown
of a run. Refuses to know the commands.
"""

import enum
import random
import shlex
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import typer

from kvcourier.bench.choices import FRAGMENT_FLAG
from kvcourier.bench.pair import MODEL, PairSpec
from kvcourier.bench.plan import Cell, Way
from kvcourier.bench.report import Report
from kvcourier.bench.run import Outputs, run
from kvcourier.bench.session import LoadSettings, Session
from kvcourier.bench.target import Endpoint, parse_endpoint, parse_way
from kvcourier.cli.serve import serve
from kvcourier.errors import ConfigError

if TYPE_CHECKING:
    from kvcourier.bench.compare import Side

PAIR = "pair"
"""A side that is started here."""

_Number = TypeVar("_Number", int, float)


def run_and_show(
    report: Report, load: LoadSettings, outputs: Outputs, measure: Callable[[Session], None]
) -> None:
    """Measure, write the files, print tables and sentences; exit code 1 if anything failed."""
    from rich.console import Console

    from kvcourier.bench.tables import tables, verdicts

    console = Console()
    run(report, load, outputs, console, measure)
    for table in tables(report):
        console.print(table)
    for section in report.sections:
        console.print(f"\n{section.heading}", style="bold", markup=False, highlight=False)
        for line in (*section.sentences, *(f"    {command}" for command in section.commands)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for sentence in (*verdicts(report), *report.remarks()):
        console.print(sentence, markup=False, highlight=False)
    for sentence in report.sentences():
        console.print(sentence, style="red", markup=False, highlight=False)
    if not report.succeeded:
        raise typer.Exit(1)


def serve_flags() -> dict[str, Collection[str] | None]:
    """The flags of the installed `kvcourier serve`, with the values of each that has a list."""
    own = typer.Typer(add_completion=False)
    own.command()(serve)
    command: Any = typer.main.get_command(own)
    hints = get_type_hints(serve)
    found: dict[str, Collection[str] | None] = {}
    for parameter in command.params:
        kind = hints.get(parameter.name)
        enums = [
            each
            for each in (kind, *get_args(kind))
            if isinstance(each, type) and issubclass(each, enum.Enum)
        ]
        values = frozenset(str(member.value) for member in enums[0]) if enums else None
        for flag in (*parameter.opts, *parameter.secondary_opts):
            found[flag] = values
    return found


def read_pair(model: str | None, flags: Iterable[str] | None, fragment: float | None) -> PairSpec:
    """A pair to be started here. Raises ConfigError."""
    given = tuple(flags or ())
    if fragment is not None:
        if FRAGMENT_FLAG not in serve_flags():
            raise ConfigError(f"--fragment: this `kvcourier serve` has no {FRAGMENT_FLAG}")
        given = (f"{FRAGMENT_FLAG}={fragment:g}", *given)
    return PairSpec(model or MODEL, given)


def read_side(name: str, text: str, flags: str, pair: PairSpec, model: str | None) -> "Side":
    """A side as the user names it; a pair of ours gets its flags on top of what all pairs have.

    One from a file has the file's model, unless a `model` was named. Raises ConfigError.
    """
    from kvcourier.bench.compare import Side

    shown = f"{name}: {text} {flags}".rstrip()
    place, _, mode = text.partition("#")
    if place.startswith(("http://", "https://")):
        if flags:
            raise ConfigError(f"--{name.lower()}-flags: {place} is not started here")
        endpoint: Endpoint = parse_endpoint(text, name)
        return Side(shown, endpoint.url, endpoint.way or Way.DEFAULT)
    way = parse_way(mode, name) if mode else Way.DEFAULT
    config = None if place == PAIR else Path(place)
    if config is not None and (config.suffix != ".toml" or not config.is_file()):
        raise ConfigError(
            f"{name}: expected http://host:port, an existing FILE.toml, or {PAIR}; found {place!r}"
        )
    try:
        own = tuple(shlex.split(flags))
    except ValueError as error:
        raise ConfigError(f"--{name.lower()}-flags: {error}: {flags!r}") from None
    base = pair if config is None else replace(pair, model=model, config=config)
    return Side(shown, replace(base, flags=(*base.flags, *own)), way)


def read_devices(text: str | None) -> tuple[str, str] | None:
    """Where P and D compute, `P,D`. Raises ConfigError."""
    if text is None:
        return None
    match _words(text):
        case [prefill, decode]:
            return prefill, decode
    raise ConfigError(f"--devices: expected that of P and that of D, P,D; found {text!r}")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def read_ways(text: str) -> list[Way]:
    """Modes with commas between them, each once. Raises ConfigError."""
    found = [parse_way(word, "--modes") for word in _words(text)]
    if not found:
        raise ConfigError(f"--modes: expected some of {', '.join(Way)}; found {text!r}")
    return list(dict.fromkeys(found))


def read_numbers(text: str, kind: Callable[[str], _Number], flag: str) -> list[_Number]:
    """Numbers with commas between them. Raises ConfigError."""
    try:
        found = [kind(word) for word in _words(text)]
    except ValueError:
        found = []
    if not found:
        raise ConfigError(f"{flag}: expected numbers with commas between them, found {text!r}")
    return found


def read_seconds(value: float, flag: str) -> float:
    """A duration above 0. Raises ConfigError."""
    if not 0 < value < float("inf"):
        raise ConfigError(f"{flag}: expected seconds above 0, found {value:g}")
    return value


def read_seed(seed: int | None) -> int:
    """The seed given, or a new one."""
    return random.randrange(1 << 31) if seed is None else seed


def settings_told(load: LoadSettings, cell: Cell | None = None) -> dict[str, object]:
    """The settings as a report tells them."""
    told: dict[str, object] = {}
    if cell is not None:
        told = {"input tokens": cell.input_tokens, "qps": cell.qps, "requests": cell.requests}
    return told | {
        "output tokens": load.output_tokens,
        "shared prefix": load.shared_prefix,
        "warm-up": load.warm_up,
        "seed": load.seed,
    }
