"""`kvcourier story`.

Decides its flags, whom it asks, and its exit code. Refuses to know how stories become a timeline.
"""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from kvcourier.api_keys import read_api_keys
from kvcourier.cli.config_file import ConfigFile
from kvcourier.cli.side_channel_flags import SideChannelKey, SideChannelPeerKeys
from kvcourier.errors import ConfigError, KVCourierError

_URL = "URL"
_LONGEST_KEY = 1024


def story(
    key: Annotated[
        str,
        typer.Argument(
            metavar="TRANSFER_ID",
            help="The value of X-KV-Transfer-Id in the router's answer; a request id will do.",
        ),
    ],
    router: Annotated[
        list[str] | None, typer.Option(metavar=_URL, help="A router; repeatable.")
    ] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(metavar=_URL, help="A prefill instance; repeatable.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar=_URL, help="A decode instance; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=600.0, help="Seconds until everybody must have answered.")
    ] = 5.0,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The key to show to routers, the first line; to instances as well if they have no "
            "file of their own.",
        ),
    ] = None,
    instance_api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The key to show to instances, the first line."),
    ] = None,
    engine_id: Annotated[
        str, typer.Option(help="As whom this command speaks on side channels.")
    ] = "kvcourier-story",
    side_channel_key: SideChannelKey = None,
    side_channel_peer_keys: SideChannelPeerKeys = None,
    config: ConfigFile = None,
) -> None:
    """Tell what happened to one transfer, as the router, P and D saw it.

    Everybody named is asked: routers and instances of kvcourier serve at their HTTP address, vLLM
    with our connector at its side channel, which is named as kv://ENGINE_ID@HOST:PORT or known to
    the router. Without --prefill and --decode these are the instances that the
    routers know; without any flag the router on this machine is asked.

    \b
      kvcourier story 5f1c8e02c2c64c9b
      kvcourier story 5f1c8e02c2c64c9b --router http://router:8192
      kvcourier story 5f1c8e02c2c64c9b --prefill http://p0:8100 --decode http://d0:8200 --json
      kvcourier story 5f1c8e02c2c64c9b --prefill kv://p0@10.0.0.1:5600 \\
                                       --decode kv://d0@10.0.0.2:5600

    Times are milliseconds since the first thing that happened. Processes on several machines have
    clocks of their own: each is compared with this machine's by the round trip of the questions,
    and the result says how far it is off and how sure that is.

    \b
    Exit codes: 0 if anybody knows the transfer, 1 if nobody does or answers, 2 for a flag that
    cannot be used.
    """
    from rich.console import Console

    from kvcourier.ids import EngineId
    from kvcourier.router.config import DEFAULT_ROUTER_PORT
    from kvcourier.runtime.channel_keys import read_keys
    from kvcourier.story.accounts import Part
    from kvcourier.story.ask import read_place, tell
    from kvcourier.story.show import show_asked, show_moments, unknown
    from kvcourier.story.side_channel import Keys

    if not 0 < len(key) <= _LONGEST_KEY or not key.isprintable():
        raise ConfigError(f"TRANSFER_ID: expected 1 to {_LONGEST_KEY} printable characters")
    if not (router or prefill or decode):
        router = [f"http://127.0.0.1:{DEFAULT_ROUTER_PORT}"]
    router_key = None if api_key_file is None else read_api_keys(api_key_file)[0]
    instance_key = (
        router_key if instance_api_key_file is None else read_api_keys(instance_api_key_file)[0]
    )
    places = [
        read_place(part, url, f"--{flag}", api_key)
        for part, flag, urls, api_key in (
            (Part.ROUTER, "router", router, router_key),
            (Part.PREFILL, "prefill", prefill, instance_key),
            (Part.DECODE, "decode", decode, instance_key),
        )
        for url in urls or ()
    ]
    own_id = EngineId(engine_id)
    keys = Keys(own_id, read_keys(side_channel_key, side_channel_peer_keys, own_id))
    timeline = asyncio.run(tell(key, places, instance_key, timeout, keys))
    if as_json:
        print(json.dumps(timeline.as_dict(), indent=2))
    elif timeline.moments:
        console = Console()
        console.print(show_moments(timeline))
        console.print(show_asked(timeline), soft_wrap=True)
    if not timeline.moments:
        raise KVCourierError(unknown(timeline))
