"""`kvcourier trial`.

Decides its flags, output files and exit codes. Refuses to know how it is measured and judged.
"""

import time
from pathlib import Path
from typing import Annotated

import typer

from kvcourier.bench.plan import Cell, cells
from kvcourier.bench.report import Report
from kvcourier.bench.run import Outputs
from kvcourier.bench.session import LoadSettings
from kvcourier.cli.bench_flags import (
    Fragment,
    HtmlFile,
    JsonFile,
    Model,
    OutputTokens,
    Seed,
    ServeFlag,
    Timeout,
    TraceFile,
    TurnRequests,
    VocabSize,
    WarmUp,
)
from kvcourier.cli.bench_values import (
    read_numbers,
    read_pair,
    read_seconds,
    read_seed,
    read_side,
    run_and_show,
    settings_told,
)
from kvcourier.cli.config_file import ConfigFile
from kvcourier.errors import ConfigError
from kvcourier.trial.traffic import Traffic, read_traffic

_DEFAULT = LoadSettings()
_TIMES_ITS_OWN = (0.5, 1.0, 2.0)


def trial(
    baseline: Annotated[
        str,
        typer.Argument(
            metavar="BASELINE", help="What runs now: URL[#MODE], FILE.toml[#MODE] or pair[#MODE]."
        ),
    ],
    candidate: Annotated[
        str, typer.Argument(metavar="CANDIDATE", help="What may take its place; the same forms.")
    ],
    traffic: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A log of lengths and arrival times, CSV or JSON lines: arrival_s, input_tokens, "
            "output_tokens; or as Mooncake, Azure or BurstGPT publish theirs.",
        ),
    ] = None,
    input_tokens: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Lengths of prompts, where there is no log.")
    ] = "512",
    qps: Annotated[
        str | None,
        typer.Option(
            metavar="RATE[,RATE...]",
            help="Requests per second, on average. Default: 1,2,4; with a log half, one and two "
            "times its own rate.",
        ),
    ] = None,
    requests: TurnRequests = 6,
    turns: Annotated[
        int, typer.Option(min=1, help="Turns of each side at each rate; from 6 on there is a word.")
    ] = 10,
    margin: Annotated[
        float,
        typer.Option(min=0, max=0.5, help="A difference that surely is smaller counts as none."),
    ] = 0.03,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Seconds after which no turn begins; every rate gets its share."),
    ] = None,
    baseline_flags: Annotated[
        str, typer.Option(help="Flags of `kvcourier serve`, if the baseline is started here.")
    ] = "",
    candidate_flags: Annotated[str, typer.Option(help="The same for the candidate.")] = "",
    model: Model = None,
    serve_flag: ServeFlag = None,
    fragment: Fragment = None,
    output_tokens: OutputTokens = _DEFAULT.output_tokens,
    vocab_size: VocabSize = _DEFAULT.vocab_size,
    warm_up: WarmUp = _DEFAULT.warm_up,
    timeout: Timeout = _DEFAULT.timeout_s,
    seed: Seed = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    trace_file: TraceFile = None,
    config: ConfigFile = None,
) -> None:
    """Try a change on your own traffic: is it better, from which rate on, and is that sure?

    Looks first whether the traffic is such that the change can help; then both sides have turns at
    each rate, on the same lengths and gaps. Says what was found of TTFT, TPOT and token 2, what was
    not, and what to type to switch on and to switch back. Nothing is switched.

    \b
      kvcourier trial http://router:8192#pull http://router:8192#push --traffic log.csv
      kvcourier trial now.toml next.toml --input-tokens 2000,16000 --qps 0.5,1,2 --html trial.html
      kvcourier trial pair#pull pair#push

    Exit code 0 if no request failed, whatever the advice.
    """
    from kvcourier.trial.run import TrialSettings, run_trial

    start_s = time.monotonic()
    outputs = Outputs(json_file, html_file, trace_file)
    pair = read_pair(model, serve_flag, fragment)
    now = read_side("baseline", baseline, baseline_flags, pair, model)
    instead = read_side("candidate", candidate, candidate_flags, pair, model)
    only_urls = isinstance(now.where, str) and isinstance(instead.where, str)
    load = LoadSettings(
        output_tokens,
        read_seconds(timeout, "--timeout"),
        read_seed(seed),
        vocab_size,
        warm_up=warm_up,
        model=model if only_urls else None,
    )
    log = None if traffic is None else _read(traffic)
    limit_s = float("inf") if time_limit is None else read_seconds(time_limit, "--time-limit")
    settings = TrialSettings(
        now,
        instead,
        _cells(log, input_tokens, qps, requests),
        log,
        turns,
        margin,
        start_s + limit_s,
    )
    report = Report("trial", f"{now.name}; {instead.name}", _told(log, load, settings.turns))
    if log is not None and log.num_unanswered:
        report.notes.append(f"{log.num_unanswered:,} requests of the log had no answer")
    run_and_show(report, load, outputs, lambda session: run_trial(settings, session, report))


def _read(path: Path) -> Traffic:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--traffic: cannot read {path}: {error}") from error
    return read_traffic(text, str(path))


def _cells(
    log: Traffic | None, input_tokens: str, qps: str | None, requests: int
) -> tuple[Cell, ...]:
    if log is None:
        lengths = read_numbers(input_tokens, int, "--input-tokens")
        return cells(lengths, read_numbers(qps or "1,2,4", float, "--qps"), requests)
    own = [round(log.qps * times, 4) for times in _TIMES_ITS_OWN]
    rates = own if qps is None else read_numbers(qps, float, "--qps")
    return cells([log.mean_input_tokens], rates, min(requests, len(log)))


def _told(log: Traffic | None, load: LoadSettings, turns: int) -> dict[str, object]:
    told = settings_told(load) | {"turns": turns}
    if log is None:
        return told
    told["output tokens"] = "as logged"
    return {"log": f"{len(log):,} requests, {log.qps:.3g}/s", **told}
