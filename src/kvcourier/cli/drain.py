"""`kvcourier drain`.

Decides its flags. Refuses to know how it is done (`draining.py`).
"""

from pathlib import Path
from typing import Annotated

import typer

from kvcourier.api_keys import read_api_keys
from kvcourier.cli.config_file import ConfigFile
from kvcourier.errors import ConfigError
from kvcourier.router.events import LegName


def drain(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="The instance, as its routers call it; or a router."),
    ],
    router: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A router to drain it at; repeatable. A name with several addresses stands for "
            "all of them. Default: the instance is told itself.",
        ),
    ] = None,
    role: Annotated[
        LegName | None, typer.Option(help="What the instance is to the routers.")
    ] = None,
    only_wait: Annotated[
        bool,
        typer.Option(
            "--only-wait",
            help="URL is a router that gets nothing new any more: wait until it has answered all.",
        ),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Take it back instead, and do not wait.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.0, max=86400.0, help="Seconds to wait until it is empty.")
    ] = 300.0,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The key to show to the instance, the first line."),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The key to show to the routers, the first line."),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Take an instance out of service and wait until nothing runs there.

    Meant for the moment before it is stopped. An embedded instance refuses what is new itself. For
    vLLM, or any other, its routers are told to send it nothing.

    \b
      kvcourier drain http://127.0.0.1:8100
      kvcourier drain http://d1:8200 --role decode --router http://router:8192 \\
                      --admin-key-file admin.keys
      kvcourier drain http://127.0.0.1:8192 --only-wait

    A router that cannot be reached, or does not have the instance, sends nothing, and is not waited
    for.

    \b
    Exit codes: 0 if it is empty, 1 if it is not within --timeout or cannot be drained, 2 for a flag
    that cannot be used.
    """
    from kvcourier.cli.draining import Drains, every_address, make_client, wait_until_empty
    from kvcourier.story.ask import check_url

    url = check_url(url, "URL")
    routers = [check_url(each, "--router") for each in router or ()]
    if only_wait and (routers or resume):
        raise ConfigError("--only-wait: expected neither --router nor --resume with it")
    if routers and role is None:
        raise ConfigError("--role: expected prefill or decode, as routers know it by both")
    api_key, admin_key = (
        None if file is None else read_api_keys(file)[0] for file in (api_key_file, admin_key_file)
    )
    with make_client() as client:
        drains = Drains(client)
        addresses = list(every_address(routers))
        if resume and role is not None and routers:
            for address in addresses:
                drains.resume_at_router(address, role, url, admin_key)
        elif resume:
            drains.resume_instance(url, api_key)
        elif only_wait:
            wait_until_empty([drains.whole_router(url)], timeout)
        elif role is not None and routers:
            everybody = [drains.at_router(each, role, url, admin_key) for each in addresses]
            wait_until_empty(everybody, timeout)
        else:
            wait_until_empty([drains.instance(url, api_key)], timeout)
