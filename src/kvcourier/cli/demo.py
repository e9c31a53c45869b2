"""`kvcourier demo`.

Decides the demo's flags, output file and exit code. Refuses to know what it runs.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from kvcourier.cli.config_file import ConfigFile
from kvcourier.errors import ConfigError


def demo(
    model: Annotated[
        str, typer.Option(help="Model of all instances, as for `kvcourier serve`.")
    ] = "smollm2",
    num_tokens: Annotated[
        int, typer.Option(min=1, max=1024, help="Tokens to generate per prompt.")
    ] = 24,
    serve_flag: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A further flag for every instance, e.g. --serve-flag=--block-size=32.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results there, too.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Run a prefill and a decode instance here and check them against a single one.

    Starts three instances and a router as processes on loopback, sends English prompts through
    the router by pull and by push, shows the text as it streams, compares every token with what
    the single instance generates, and prints a table. Needs no GPU and no network.

    \b
      kvcourier demo
      kvcourier demo --json results.json
      kvcourier demo --model random-llama --num-tokens 8

    Exit code 0 only if all tokens are equal and nothing failed.
    """
    from rich.console import Console

    from kvcourier.demo.run import DemoSettings, run_demo

    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json: the folder {json_file.absolute().parent} does not exist")
    console = Console()
    start_s = time.monotonic()
    report = run_demo(DemoSettings(model, num_tokens, tuple(serve_flag or ())), console)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    console.print()
    console.print(report.table())
    for problem in report.problems():
        console.print(problem, style="red", markup=False, highlight=False)
    if not report.succeeded:
        console.print(f"FAILED: {len(report.problems())} problems", style="bold red")
        raise typer.Exit(1)
    checked = sum(len(result.samples) for result in report.modes.values()) * num_tokens
    console.print(
        f"All {checked:,} tokens equal those of the single instance "
        f"({time.monotonic() - start_s:.0f} s in all).",
        style="bold green",
    )
