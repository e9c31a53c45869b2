"""Flags that the commands of `kvcourier bench` and `kvcourier trial` have in common.

Decides their names, bounds and meanings. Refuses to know their defaults and what is done with them.
"""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str | None,
    typer.Option(
        help="Of a pair started here: as for `kvcourier serve`; else the name to ask for. Default: "
        "a generated model with much KV; the target's first."
    ),
]
ServeFlag = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="A further flag for instances started here, e.g. --serve-flag=--block-size=32.",
    ),
]
Fragment = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Part of the order of free blocks that is shuffled in pairs started here.",
    ),
]
PromptLengths = Annotated[str, typer.Option(metavar="N[,N...]", help="Lengths of prompts.")]
TurnQps = Annotated[float, typer.Option(help="Requests per second within a turn, on average.")]
TurnRequests = Annotated[int, typer.Option(min=1, help="Requests per turn.")]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="P,D",
        help="Of pairs started here: where P and D compute, e.g. cuda:0,cuda:1. Default: cpu,cpu.",
    ),
]
OutputTokens = Annotated[
    int, typer.Option(min=1, help="Tokens to generate; from 2 on there is a TPOT.")
]
SharedPrefix = Annotated[
    float, typer.Option(min=0, max=1, help="Part of each prompt that all begin with.")
]
VocabSize = Annotated[int, typer.Option(help="Token ids of the prompts are drawn below it.")]
WarmUp = Annotated[
    int, typer.Option(min=0, help="Requests per side and prompt length that do not count.")
]
Timeout = Annotated[float, typer.Option(help="Seconds per request.")]
Seed = Annotated[
    int | None,
    typer.Option(help="Repeats prompts and arrivals of another run; prefix caches may know them."),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result there, too.")
]
HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a page with plots; needs kvcourier[bench]."),
]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Write a Chrome trace, for Perfetto."),
]
