"""`kvcourier bench sweep`, `compare` and `ablate`.

Decides their flags, output files and exit codes. Refuses to know how it is measured.
"""

import time
from dataclasses import replace
from typing import Annotated

import typer

from kvcourier.bench.plan import Cell, cells
from kvcourier.bench.report import Report
from kvcourier.bench.run import Outputs
from kvcourier.bench.session import LoadSettings
from kvcourier.bench.target import parse_endpoint
from kvcourier.cli.bench_flags import (
    Devices,
    Fragment,
    HtmlFile,
    JsonFile,
    Model,
    OutputTokens,
    PromptLengths,
    Seed,
    ServeFlag,
    SharedPrefix,
    Timeout,
    TraceFile,
    TurnQps,
    TurnRequests,
    VocabSize,
    WarmUp,
)
from kvcourier.cli.bench_values import (
    PAIR,
    read_devices,
    read_numbers,
    read_pair,
    read_seconds,
    read_seed,
    read_side,
    read_ways,
    run_and_show,
    serve_flags,
    settings_told,
)
from kvcourier.cli.config_file import ConfigFile

_DEFAULT = LoadSettings()
# A minute in all, with the time that the processes take to end.
_QUICK_S = 46.0
_QUICK_CELL = Cell(input_tokens=512, qps=4.0, requests=1)
_QUICK_TOKENS = 8
_QUICK_TURNS = 24
# Many pairs at once: each gets what its few requests need.
_QUICK_CACHE_FLAG = "--kv-cache-gb=0.125"
# Several chunks per prompt, so that moving by the chunk differs from moving the whole.
_CHUNK_FLAG = "--max-batch-tokens=256"

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
    input_tokens: PromptLengths = "128,512",
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
        read_seconds(timeout, "--timeout"),
        read_seed(seed),
        vocab_size,
        shared_prefix,
        warm_up,
        model if endpoints else None,
    )
    settings = SweepSettings(
        endpoints,
        read_pair(model, serve_flag, fragment),
        read_ways(modes),
        cells(
            read_numbers(input_tokens, int, "--input-tokens"),
            read_numbers(qps, float, "--qps"),
            requests,
        ),
        rounds,
    )
    report = Report(
        "sweep", f"Sweep of {', '.join(target or ['a pair on this machine'])}", settings_told(load)
    )
    run_and_show(report, load, outputs, lambda session: run_sweep(settings, session, report))


@bench.command("compare")
def bench_compare(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="URL[#MODE], FILE.toml[#MODE] or pair[#MODE]."),
    ] = PAIR,
    b: Annotated[str, typer.Argument(metavar="B", help="The same for the other side.")] = PAIR,
    a_flags: Annotated[
        str, typer.Option(help="Flags of `kvcourier serve` for A, if it is started here.")
    ] = "",
    b_flags: Annotated[str, typer.Option(help="The same for B.")] = "",
    input_tokens: Annotated[int, typer.Option(min=1, help="Length of prompts.")] = 512,
    qps: TurnQps = 2.0,
    requests: TurnRequests = 4,
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
    pair = read_pair(model, serve_flag, fragment)
    sides = [
        read_side("A", a, a_flags, pair, model),
        read_side("B", b, b_flags, pair, model),
    ]
    only_urls = all(isinstance(side.where, str) for side in sides)
    load = LoadSettings(
        output_tokens,
        read_seconds(timeout, "--timeout"),
        read_seed(seed),
        vocab_size,
        shared_prefix,
        warm_up,
        model if only_urls else None,
    )
    settings = CompareSettings(sides, Cell(input_tokens, qps, requests), turns)
    report = Report(
        "compare", f"{sides[0].name} against {sides[1].name}", settings_told(load, settings.cell)
    )
    run_and_show(report, load, outputs, lambda session: run_compare(settings, session, report))


@bench.command("ablate")
def bench_ablate(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Short prompts, and as many rounds as fit into a minute."),
    ] = False,
    input_tokens: PromptLengths = "1024",
    qps: TurnQps = 2.0,
    requests: TurnRequests = 2,
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
        limit_s = read_seconds(time_limit, "--time-limit")
    outputs = Outputs(json_file, html_file, trace_file)
    load = LoadSettings(
        _QUICK_TOKENS if quick else output_tokens,
        read_seconds(timeout, "--timeout"),
        read_seed(seed),
        vocab_size,
        warm_up=1 if quick else warm_up,
    )
    flags = [_CHUNK_FLAG, *([_QUICK_CACHE_FLAG] if quick else []), *(serve_flag or ())]
    settings = AblateSettings(
        replace(read_pair(model, flags, fragment), devices=read_devices(devices)),
        serve_flags(),
        [_QUICK_CELL]
        if quick
        else cells(read_numbers(input_tokens, int, "--input-tokens"), [qps], requests),
        _QUICK_TURNS if quick else turns,
        start_s + limit_s,
    )
    report = Report("ablate", "Ablation on this machine", settings_told(load, settings.cells[0]))
    run_and_show(report, load, outputs, lambda session: run_ablate(settings, session, report))
