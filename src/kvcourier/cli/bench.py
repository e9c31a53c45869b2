"""`kvcourier bench sweep`, `compare` and `ablate`.

Decides their flags, output files and exit codes. Refuses to know how it is measured.
"""

import enum
import random
import shlex
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from kvcourier.bench.choices import FRAGMENT_FLAG
from kvcourier.bench.pair import MODEL, PairSpec
from kvcourier.bench.plan import Cell, Way, cells
from kvcourier.bench.report import Report
from kvcourier.bench.run import Outputs, run
from kvcourier.bench.session import LoadSettings, Session
from kvcourier.bench.target import Endpoint, parse_endpoint, parse_way
from kvcourier.cli.bench_flags import (
    Devices,
    Fragment,
    HtmlFile,
    JsonFile,
    Model,
    OutputTokens,
    Seed,
    ServeFlag,
    SharedPrefix,
    Timeout,
    TraceFile,
    VocabSize,
    WarmUp,
)
from kvcourier.cli.config_file import ConfigFile
from kvcourier.cli.serve import serve
from kvcourier.errors import ConfigError

if TYPE_CHECKING:
    from kvcourier.bench.compare import Side

_DEFAULT = LoadSettings()
# A minute in all, with the time that the processes take to end.
_QUICK_S = 46.0
_QUICK_CELL = Cell(input_tokens=512, qps=4.0, requests=1)
_QUICK_TOKENS = 8
_QUICK_TURNS = 24
_PAIR = "pair"
# Many pairs at once: each gets what its few requests need.
_QUICK_CACHE_FLAG = "--kv-cache-gb=0.125"
# Several chunks per prompt, so that moving by the chunk differs from moving the whole.
_CHUNK_FLAG = "--max-batch-tokens=256"

_Number = TypeVar("_Number", int, float)

bench = typer.Typer(
    help="Compare modes, servers and the choices inside a transfer under load.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.command("sweep")
def bench_sweep(
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[#MODE]",
            help="A router or server; repeatable. Without one a pair is started here.",
        ),
    ] = None,
    input_tokens: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Lengths of prompts.")
    ] = "128,512",
    qps: Annotated[
        str, typer.Option(metavar="RATE[,RATE...]", help="Requests per second, on average.")
    ] = "1,2,4",
    modes: Annotated[
        str,
        typer.Option(
            metavar="MODE[,MODE]",
            help="pull, push, single (one instance alone), default (as the server chooses).",
        ),
    ] = "pull,push,single",
    requests: Annotated[int, typer.Option(min=1, help="Requests per cell and round.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="How often every cell is measured.")] = 1,
    model: Model = None,
    serve_flag: ServeFlag = None,
    fragment: Fragment = None,
    output_tokens: OutputTokens = _DEFAULT.output_tokens,
    shared_prefix: SharedPrefix = _DEFAULT.shared_prefix,
    vocab_size: VocabSize = _DEFAULT.vocab_size,
    warm_up: WarmUp = _DEFAULT.warm_up,
    timeout: Timeout = _DEFAULT.timeout_s,
    seed: Seed = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    trace_file: TraceFile = None,
    config: ConfigFile = None,
) -> None:
    """Measure prompt lengths x request rates x modes with Poisson arrivals (open loop).

    All modes of a cell meet the same arrival times.

    \b
      kvcourier bench sweep
      kvcourier bench sweep --target http://127.0.0.1:8192 --input-tokens 2000,16000 --qps 0.5,1,2
      kvcourier bench sweep --modes pull,push --html report.html --trace trace.json

    Exit code 0 only if no request failed.
    """
    from kvcourier.bench.sweep import SweepSettings, run_sweep

    outputs = Outputs(json_file, html_file, trace_file)
    endpoints = [parse_endpoint(each, "--target") for each in target or ()]
    load = LoadSettings(
        output_tokens,
        _positive(timeout, "--timeout"),
        _drawn(seed),
        vocab_size,
        shared_prefix,
        warm_up,
        model if endpoints else None,
    )
    settings = SweepSettings(
        endpoints,
        _pair(model, serve_flag, fragment),
        _ways(modes),
        cells(
            _numbers(input_tokens, int, "--input-tokens"), _numbers(qps, float, "--qps"), requests
        ),
        rounds,
    )
    report = Report(
        "sweep", f"Sweep of {', '.join(target or ['a pair on this machine'])}", _told(load)
    )
    _run(report, load, outputs, lambda session: run_sweep(settings, session, report))


@bench.command("compare")
def bench_compare(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="URL[#MODE], FILE.toml[#MODE] or pair[#MODE]."),
    ] = _PAIR,
    b: Annotated[str, typer.Argument(metavar="B", help="The same for the other side.")] = _PAIR,
    a_flags: Annotated[
        str, typer.Option(help="Flags of `kvcourier serve` for A, if it is started here.")
    ] = "",
    b_flags: Annotated[str, typer.Option(help="The same for B.")] = "",
    input_tokens: Annotated[int, typer.Option(min=1, help="Length of prompts.")] = 512,
    qps: Annotated[
        float, typer.Option(help="Requests per second within a turn, on average.")
    ] = 2.0,
    requests: Annotated[int, typer.Option(min=1, help="Requests per turn.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each side.")] = 12,
    model: Model = None,
    serve_flag: ServeFlag = None,
    fragment: Fragment = None,
    output_tokens: OutputTokens = _DEFAULT.output_tokens,
    shared_prefix: SharedPrefix = _DEFAULT.shared_prefix,
    vocab_size: VocabSize = _DEFAULT.vocab_size,
    warm_up: WarmUp = _DEFAULT.warm_up,
    timeout: Timeout = _DEFAULT.timeout_s,
    seed: Seed = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    trace_file: TraceFile = None,
    config: ConfigFile = None,
) -> None:
    """Compare two sides in turns on the same prompts and gaps: which is faster, and is it sure?

    A side is an address, or a pair started here: from a file with the tables [serve] and [route],
    or with flags. Sides with equal settings share a pair.

    \b
      kvcourier bench compare pair#pull pair#push
      kvcourier bench compare http://127.0.0.1:8192#pull http://127.0.0.1:8192#push
      kvcourier bench compare pair#push pair#push --b-flags "--block-size 64"
      kvcourier bench compare old.toml new.toml --html report.html

    Exit code 0 if no request failed, whatever the verdict.
    """
    from kvcourier.bench.compare import CompareSettings, run_compare

    outputs = Outputs(json_file, html_file, trace_file)
    pair = _pair(model, serve_flag, fragment)
    from_file = replace(pair, model=model)
    sides = [_side("A", a, a_flags, pair, from_file), _side("B", b, b_flags, pair, from_file)]
    only_urls = all(isinstance(side.where, str) for side in sides)
    load = LoadSettings(
        output_tokens,
        _positive(timeout, "--timeout"),
        _drawn(seed),
        vocab_size,
        shared_prefix,
        warm_up,
        model if only_urls else None,
    )
    settings = CompareSettings(sides, Cell(input_tokens, qps, requests), turns)
    report = Report(
        "compare", f"{sides[0].name} against {sides[1].name}", _told(load, settings.cell)
    )
    _run(report, load, outputs, lambda session: run_compare(settings, session, report))


@bench.command("ablate")
def bench_ablate(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Short prompts, and as many rounds as fit into a minute."),
    ] = False,
    input_tokens: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Lengths of prompts.")
    ] = "1024",
    qps: Annotated[
        float, typer.Option(help="Requests per second within a turn, on average.")
    ] = 2.0,
    requests: Annotated[int, typer.Option(min=1, help="Requests per turn.")] = 2,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each combination.")] = 12,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Seconds after which no round begins, nor one that would end later."),
    ] = None,
    model: Model = None,
    serve_flag: ServeFlag = None,
    fragment: Fragment = None,
    devices: Devices = None,
    output_tokens: OutputTokens = 16,
    vocab_size: VocabSize = _DEFAULT.vocab_size,
    warm_up: WarmUp = _DEFAULT.warm_up,
    timeout: Timeout = _DEFAULT.timeout_s,
    seed: Seed = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    trace_file: TraceFile = None,
    config: ConfigFile = None,
) -> None:
    """Compare combinations of the choices inside a transfer, on pairs started here.

    What kvcourier does, what other connectors do, and kvcourier's and NixlConnector's with one
    choice changed: binding, initiator, posting, granularity, path, first token. All have their
    turns on the same prompts. A combination that this version cannot run is listed as not
    available.

    \b
      kvcourier bench ablate --quick
      kvcourier bench ablate --fragment 1 --html report.html --json ablation.json
      kvcourier bench ablate --devices cuda:0,cuda:1 --input-tokens 2000,16000 --time-limit 120

    Exit code 0 only if no request failed.
    """
    from kvcourier.bench.ablate import AblateSettings, run_ablate

    start_s = time.monotonic()
    limit_s = _QUICK_S if quick else float("inf")
    if time_limit is not None:
        limit_s = _positive(time_limit, "--time-limit")
    outputs = Outputs(json_file, html_file, trace_file)
    load = LoadSettings(
        _QUICK_TOKENS if quick else output_tokens,
        _positive(timeout, "--timeout"),
        _drawn(seed),
        vocab_size,
        warm_up=1 if quick else warm_up,
    )
    flags = [_CHUNK_FLAG, *([_QUICK_CACHE_FLAG] if quick else []), *(serve_flag or ())]
    settings = AblateSettings(
        replace(_pair(model, flags, fragment), devices=_devices(devices)),
        serve_flags(),
        [_QUICK_CELL]
        if quick
        else cells(_numbers(input_tokens, int, "--input-tokens"), [qps], requests),
        _QUICK_TURNS if quick else turns,
        start_s + limit_s,
    )
    report = Report("ablate", "Ablation on this machine", _told(load, settings.cells[0]))
    _run(report, load, outputs, lambda session: run_ablate(settings, session, report))


def _run(
    report: Report, load: LoadSettings, outputs: Outputs, measure: Callable[[Session], None]
) -> None:
    from rich.console import Console

    from kvcourier.bench.tables import tables, verdicts

    console = Console()
    run(report, load, outputs, console, measure)
    for table in tables(report):
        console.print(table)
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


def _pair(model: str | None, flags: Iterable[str] | None, fragment: float | None) -> PairSpec:
    given = tuple(flags or ())
    if fragment is not None:
        if FRAGMENT_FLAG not in serve_flags():
            raise ConfigError(f"--fragment: this `kvcourier serve` has no {FRAGMENT_FLAG}")
        given = (f"{FRAGMENT_FLAG}={fragment:g}", *given)
    return PairSpec(model or MODEL, given)


def _side(name: str, text: str, flags: str, pair: PairSpec, from_file: PairSpec) -> "Side":
    """A side as the user names it; a pair of ours gets its flags on top of what all pairs have."""
    from kvcourier.bench.compare import Side

    shown = f"{name}: {text} {flags}".rstrip()
    place, _, mode = text.partition("#")
    if place.startswith(("http://", "https://")):
        if flags:
            raise ConfigError(f"--{name.lower()}-flags: {place} is not started here")
        endpoint: Endpoint = parse_endpoint(text, name)
        return Side(shown, endpoint.url, endpoint.way or Way.DEFAULT)
    way = parse_way(mode, name) if mode else Way.DEFAULT
    config = None if place == _PAIR else Path(place)
    if config is not None and (config.suffix != ".toml" or not config.is_file()):
        raise ConfigError(
            f"{name}: expected http://host:port, an existing FILE.toml, or {_PAIR}; found {place!r}"
        )
    try:
        own = tuple(shlex.split(flags))
    except ValueError as error:
        raise ConfigError(f"--{name.lower()}-flags: {error}: {flags!r}") from None
    base = pair if config is None else replace(from_file, config=config)
    return Side(shown, replace(base, flags=(*base.flags, *own)), way)


def _devices(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    match _words(text):
        case [prefill, decode]:
            return prefill, decode
    raise ConfigError(f"--devices: expected that of P and that of D, P,D; found {text!r}")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _ways(text: str) -> list[Way]:
    found = [parse_way(word, "--modes") for word in _words(text)]
    if not found:
        raise ConfigError(f"--modes: expected some of {', '.join(Way)}; found {text!r}")
    return list(dict.fromkeys(found))


def _numbers(text: str, kind: Callable[[str], _Number], flag: str) -> list[_Number]:
    try:
        found = [kind(word) for word in _words(text)]
    except ValueError:
        found = []
    if not found:
        raise ConfigError(f"{flag}: expected numbers with commas between them, found {text!r}")
    return found


def _positive(value: float, flag: str) -> float:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{flag}: expected seconds above 0, found {value:g}")
    return value


def _drawn(seed: int | None) -> int:
    return random.randrange(1 << 31) if seed is None else seed


def _told(load: LoadSettings, cell: Cell | None = None) -> dict[str, object]:
    told: dict[str, object] = {}
    if cell is not None:
        told = {"input tokens": cell.input_tokens, "qps": cell.qps, "requests": cell.requests}
    return told | {
        "output tokens": load.output_tokens,
        "shared prefix": load.shared_prefix,
        "warm-up": load.warm_up,
        "seed": load.seed,
    }
