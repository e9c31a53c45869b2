"""`kvcourier doctor`.

Decides its flags, where the report goes and how the process ends. Refuses to know what is asked
and how it is judged.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcourier.cli.config_file import ConfigFile
from kvcourier.cli.side_channel_flags import SideChannelKey, SideChannelPeerKeys
from kvcourier.config import TransferMode
from kvcourier.doctor.facts import Load
from kvcourier.errors import ConfigError
from kvcourier.ids import EngineId

if TYPE_CHECKING:
    from kvcourier.doctor.findings import Finding
    from kvcourier.doctor.gather import Address

_STDOUT = "-"
_LOAD = Load()


def doctor(
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[,KEY=VALUE...]",
            help="A prefill instance, as for kvcourier route; repeatable.",
        ),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(metavar="URL[,KEY=VALUE...]", help="A decode instance; repeatable."),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The router in front of them. Without --prefill and --decode: its instances.",
        ),
    ] = None,
    mode: Annotated[
        list[TransferMode] | None,
        typer.Option(help="A mode that must work; repeatable. Default: any that both have."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=1 << 24, help="Length of a typical prompt.")
    ] = _LOAD.tokens,
    rate: Annotated[
        float | None,
        typer.Option(min=0, help="Requests per second that one pair is going to get."),
    ] = None,
    client_timeout: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds that clients wait for their first byte."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The key that is shown to everybody, the first line."),
    ] = None,
    engine_id: Annotated[
        str, typer.Option(help="As whom the doctor speaks on side channels.")
    ] = "kvcourier-doctor",
    side_channel_key: SideChannelKey = None,
    side_channel_peer_keys: SideChannelPeerKeys = None,
    prompts: Annotated[
        bool,
        typer.Option(
            help="Send short prompts, and fetch their KV; without, nothing but questions."
        ),
    ] = True,
    own_host: Annotated[
        str,
        typer.Option(
            help="Address of this machine as the instances reach it. Default: that of the way "
            "to each."
        ),
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds for one question.")
    ] = 5.0,
    answer_timeout: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds for one answer of a model.")
    ] = 30.0,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the findings there, too; - is standard output."
        ),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Find out what is wrong with a prefill and a decode instance before users do.

    Each finding has a severity, what was seen, and what to do.

    \b
      kvcourier doctor --prefill http://p:8100 --decode http://d:8200
      kvcourier doctor --router http://127.0.0.1:8192 --tokens 4000 --rate 3
      kvcourier doctor --prefill http://p:8100,engine_id=p,kv_host=p,kv_port=5600 \\
                       --decode http://d:8200,engine_id=d,kv_host=d,kv_port=5700 --json -

    \b
    Exit codes:
        0    nothing wrong
        1    at least one error: KV does not move, or requests will fail
        2    a flag cannot be used
        3    warnings, and no error
        130  interrupted
    """
    from rich.console import Console

    from kvcourier.api_keys import read_api_keys
    from kvcourier.cli.own_router import router_opener
    from kvcourier.doctor.attempts import attempt
    from kvcourier.doctor.checks import judge
    from kvcourier.doctor.findings import exit_code
    from kvcourier.doctor.gather import Question, gather
    from kvcourier.doctor.pages import Pages
    from kvcourier.router.config import parse_instance_spec
    from kvcourier.runtime.channel_keys import read_keys

    if json_file not in (None, _STDOUT) and not Path(json_file).absolute().parent.is_dir():
        raise ConfigError(f"--json: the folder {Path(json_file).absolute().parent} does not exist")
    own_id = EngineId(engine_id)
    api_key = None if api_key_file is None else read_api_keys(api_key_file)[0]
    question = Question(
        prefill=_addresses(prefill),
        decode=_addresses(decode),
        router=None if router is None else parse_instance_spec(router).url,
        load=Load(tokens, rate, client_timeout),
        modes=tuple(mode or ()),
        timeout_s=timeout,
        answer_s=answer_timeout,
        keys=read_keys(side_channel_key, side_channel_peer_keys, own_id),
        secret_key_file=None if side_channel_key is None else str(side_channel_key),
        peer_keys=None if side_channel_peer_keys is None else str(side_channel_peer_keys),
        own_host=own_host,
        api_key=api_key,
        own_id=own_id,
    )
    if not (question.prefill or question.decode or question.router):
        raise ConfigError("doctor: expected --prefill and --decode, or --router, found neither")
    # Shown on a terminal only.
    status = Console(stderr=True).status("asking the instances")
    with Pages(api_key, timeout) as pages, status:
        facts = gather(question, pages)
        if prompts:
            facts = attempt(facts, question, pages, router_opener(api_key), status.update)
    findings = judge(facts)
    _show(findings, json_file)
    raise typer.Exit(exit_code(findings))


def _addresses(texts: list[str] | None) -> tuple["Address", ...]:
    from kvcourier.doctor.facts import Place
    from kvcourier.doctor.gather import Address
    from kvcourier.router.config import parse_instance_spec

    specs = [parse_instance_spec(text) for text in texts or ()]
    return tuple(
        Address(
            spec.url,
            None
            if (where := spec.coordinates) is None
            else Place(where.engine_id, where.host, where.port),
        )
        for spec in specs
    )


def _show(findings: list["Finding"], json_file: str | None) -> None:
    """Text for people, unless standard output belongs to a program."""
    from rich.console import Console

    from kvcourier.doctor.report import as_dict, as_text

    content = json.dumps(as_dict(findings), indent=2) + "\n"
    if json_file == _STDOUT:
        sys.stdout.write(content)
        return
    Console(soft_wrap=True, highlight=False).print(as_text(findings))
    if json_file is not None:
        try:
            Path(json_file).write_text(content)
        except OSError as error:
            raise ConfigError(f"--json: cannot write {json_file}: {error.strerror}") from None
