"""`kvcourier probe`.

Decides the probe's flags and how its result is shown. Refuses to know how it is measured.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from kvcourier.cli.config_file import ConfigFile
from kvcourier.config import TransferMode
from kvcourier.errors import ConfigError

_TIMEOUT_S = 600.0


def probe(
    url: Annotated[
        str, typer.Option(help="Address of the server, without /v1; the router's by default.")
    ] = "http://127.0.0.1:8192",
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; the server's first if not given.")
    ] = None,
    num_tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Length of the prompts, in the server's tokens.")
    ] = 1000,
    num_requests: Annotated[
        int, typer.Option("--requests", min=1, help="Requests to measure, one after the other.")
    ] = 10,
    mode: Annotated[
        TransferMode | None,
        typer.Option(help="Transfer mode to ask the router for; its own choice if not given."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Makes the prompts repeatable; a prefix cache may know them then."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result there, too.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Measure the time to the first token of an OpenAI server, for prompts of one length.

    The prompts are random numbers, so that no prefix cache knows them. A few requests before
    the measurement find out how many numbers make the wanted count of tokens.

    \b
      kvcourier probe
      kvcourier probe --tokens 4000 --requests 20 --mode push
      kvcourier probe --url http://127.0.0.1:8100 --json prefill-alone.json
    """
    import httpx
    from rich.console import Console

    from kvcourier.probe.client import Answer
    from kvcourier.probe.measure import ProbeSettings
    from kvcourier.probe.measure import probe as run_probe

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: expected http://host:port, found {url!r}")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json: the folder {json_file.absolute().parent} does not exist")
    headers = {"X-KV-Mode": mode.value} if mode else {}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    settings = ProbeSettings(
        url=url.rstrip("/").removesuffix("/v1"),
        model=model,
        num_tokens=num_tokens,
        num_requests=num_requests,
        seed=seed,
        headers=headers,
    )
    console = Console(highlight=False)

    def show(answer: Answer) -> None:
        console.print(f"  {answer.ttft_s * 1e3:9.1f} ms")

    with httpx.Client(timeout=_TIMEOUT_S) as client:
        result = run_probe(settings, client, show)
    for failure in result.failures:
        console.print(f"failed: {failure}", style="red", markup=False)
    summary = result.summary
    if summary is not None:
        length = summary.num_prompt_tokens or f"about {num_tokens}"
        console.print(
            f"TTFT of {summary.num_requests} prompts of {length} tokens: "
            f"median {summary.median_ms:.1f} ms, "
            f"middle half {summary.lower_ms:.1f} to {summary.upper_ms:.1f} ms, "
            f"all {summary.lowest_ms:.1f} to {summary.highest_ms:.1f} ms"
        )
        if json_file is not None:
            content = summary.as_json() | {"failures": len(result.failures)}
            json_file.write_text(json.dumps(content, indent=2) + "\n")
    if result.failures:
        raise typer.Exit(1)
