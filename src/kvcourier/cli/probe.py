"""`kvcourier probe`.

Decides the probe's flags and output file. Refuses to know how it is measured.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from kvcourier.cli.config_file import ConfigFile
from kvcourier.config import TransferMode
from kvcourier.errors import ConfigError
from kvcourier.probe.run import ProbeConfig, PromptKind, render, run_probe

_DEFAULT = ProbeConfig()


def probe(
    url: Annotated[
        str, typer.Option(help="Address of the server, without /v1; the router's by default.")
    ] = _DEFAULT.url,
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; the server's first if not given.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt.")] = _DEFAULT.tokens,
    count: Annotated[int, typer.Option(min=1, help="Prompts to measure.")] = _DEFAULT.count,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to generate; from 2 on there is a TPOT.")
    ] = _DEFAULT.max_tokens,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests at a time.")
    ] = _DEFAULT.concurrency,
    mode: Annotated[
        TransferMode | None,
        typer.Option(help="Transfer mode to ask the router for; its own choice if not given."),
    ] = None,
    prompt: Annotated[
        PromptKind,
        typer.Option(help="text is close to --tokens, token_ids exactly that long."),
    ] = _DEFAULT.prompt,
    vocab_size: Annotated[
        int, typer.Option(help="With --prompt token_ids: ids are drawn below it.")
    ] = _DEFAULT.vocab_size,
    seed: Annotated[
        int | None,
        typer.Option(help="Repeats the prompts of another run; a prefix cache may know them."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds per request.")] = _DEFAULT.timeout_s,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result there, too.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Measure the time to the first token of any OpenAI server: median and spread.

    The prompts are random numbers, so that no prefix cache knows them.

    \b
      kvcourier probe
      kvcourier probe --tokens 4000 --count 20 --mode push
      kvcourier probe --url http://127.0.0.1:8100 --json prefill-alone.json
    """
    from rich.console import Console

    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json: the folder {json_file.absolute().parent} does not exist")
    settings = ProbeConfig(
        url=url,
        tokens=tokens,
        count=count,
        max_tokens=max_tokens,
        seed=seed,
        mode=mode,
        concurrency=concurrency,
        model=model,
        prompt=prompt,
        vocab_size=vocab_size,
        timeout_s=timeout,
    )
    console = Console()
    result = run_probe(settings, console)
    console.print(render(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_dict(), indent=2) + "\n")
