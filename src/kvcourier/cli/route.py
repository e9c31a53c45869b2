"""`kvcourier route`.

Decides the router's flags. Refuses to know how requests are routed.
"""

from pathlib import Path
from typing import Annotated

import typer

from kvcourier.api_keys import api_keys, read_api_keys
from kvcourier.cli.config_file import ConfigFile
from kvcourier.config import Binding, TransferMode
from kvcourier.ids import EngineId
from kvcourier.router.breaker import BreakerSettings
from kvcourier.router.config import (
    DEFAULT_ENGINE_ID,
    DEFAULT_ROUTER_PORT,
    ConversationLimits,
    RouterConfig,
    RouterLimits,
    Timeouts,
    parse_instance_spec,
)
from kvcourier.router.policy import POLICIES

_TIMEOUTS = Timeouts()
_LIMITS = RouterLimits()
_BREAKER = BreakerSettings()
_CONVERSATIONS = ConversationLimits()
_INSTANCE = "URL[,KEY=VALUE...]"


def route(
    prefill: Annotated[
        list[str] | None, typer.Option(metavar=_INSTANCE, help="A prefill instance; repeatable.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar=_INSTANCE, help="A decode instance; repeatable.")
    ] = None,
    instances: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Further instances: TOML with the lists prefill and decode. Read again whenever "
            "it changes.",
        ),
    ] = None,
    mode: Annotated[
        TransferMode,
        typer.Option(help="How KV moves where a request has no X-KV-Mode header."),
    ] = TransferMode.PULL,
    binding: Annotated[
        Binding | None,
        typer.Option(
            help="When the decode instance is chosen and asked where a request has no X-KV-Binding "
            "header: at once with the prefill instance, when that is nearly done, or after it. "
            "Default: late for pull, early for push."
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help=f"Who serves the next request: {', '.join(POLICIES)}.")
    ] = "round_robin",
    prefill_policy: Annotated[
        str | None, typer.Option(help="The same for prefill instances alone.")
    ] = None,
    decode_policy: Annotated[
        str | None, typer.Option(help="The same for decode instances alone.")
    ] = None,
    skip_below: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="A prompt of which the decode instance lacks fewer tokens goes there alone; 0: "
            "never. Text counts four bytes a token.",
        ),
    ] = 0,
    rebinds: Annotated[
        int,
        typer.Option(
            min=0,
            max=16,
            help="How often another decode instance gets a prompt that is computed, or being "
            "computed, when one fails before its first byte or stalls.",
        ),
    ] = 0,
    retries: Annotated[
        int,
        typer.Option(
            min=0,
            max=16,
            help="Further tries after an instance was not reached, was lost, or answered 429, 502, "
            "503 or 504, as long as the client has got nothing.",
        ),
    ] = 0,
    breaker_failures: Annotated[
        int,
        typer.Option(
            min=0,
            help="Failures in a row after which an instance is left alone for a while; 0: never.",
        ),
    ] = _BREAKER.failures,
    breaker_open: Annotated[
        float,
        typer.Option(help="Seconds until one request tries it again; longer each time it fails."),
    ] = _BREAKER.open_s,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")
    ] = DEFAULT_ROUTER_PORT,
    connect_timeout: Annotated[
        float, typer.Option(help="Seconds until a connection to an instance stands.")
    ] = _TIMEOUTS.connect_s,
    prefill_timeout: Annotated[
        float, typer.Option(help="Seconds for a whole prefill.")
    ] = _TIMEOUTS.prefill_s,
    first_byte_timeout: Annotated[
        float, typer.Option(help="Seconds until the decode instance's first byte.")
    ] = _TIMEOUTS.first_byte_s,
    near_lead: Annotated[
        float,
        typer.Option(
            help="Seconds before the end of a prefill at which the decode instance is bound, where "
            "it is bound near."
        ),
    ] = _TIMEOUTS.near_lead_s,
    stall_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds after a prefill until a decode instance that has not begun is given up "
            "for one that is less busy, where --rebinds allows it."
        ),
    ] = _TIMEOUTS.stall_s,
    total_timeout: Annotated[
        float, typer.Option(help="Seconds for a whole answer.")
    ] = _TIMEOUTS.total_s,
    max_in_flight: Annotated[
        int, typer.Option(help="Requests at a time; more are refused with 503.")
    ] = _LIMITS.max_in_flight,
    max_body_mib: Annotated[
        int, typer.Option(min=1, help="Largest body of a request; more is refused with 413.")
    ] = _LIMITS.max_body_bytes >> 20,
    load_interval: Annotated[
        float,
        typer.Option(
            help="Seconds between two questions how busy an instance is, where a policy needs that."
        ),
    ] = _TIMEOUTS.load_s,
    conversation_ttl: Annotated[
        float,
        typer.Option(
            help="Seconds to remember where the KV of a conversation (X-Conversation-Id) is kept."
        ),
    ] = _CONVERSATIONS.ttl_s,
    max_conversations: Annotated[
        int, typer.Option(min=0, help="Conversations to remember that of; 0: of none.")
    ] = _CONVERSATIONS.max_conversations,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keys, one a line, of which clients must have one (Authorization: Bearer), but "
            "for /health and /metrics. Default: open to all.",
        ),
    ] = None,
    instance_api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The key that the router shows to every instance, the first line. Default: none, "
            "and the client's is passed on if the router has no keys of its own.",
        ),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keys, one a line, of which whoever adds, removes and drains instances must have "
            "one. Default: nobody may.",
        ),
    ] = None,
    engine_id: Annotated[
        str, typer.Option(help="As whom the router speaks on side channels.")
    ] = DEFAULT_ENGINE_ID,
    side_channel_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Its secret key there, as for kvcourier serve: to ask a vLLM instance what it "
            "keeps of a streamed turn.",
        ),
    ] = None,
    side_channel_peer_keys: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Public keys of the decode instances."),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where spans go, by OTLP over HTTP. Default: as the variables OTEL_* say; without "
            "them there are none.",
        ),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Speak the OpenAI API in front of prefill and decode instances.

    Each request goes to one of each. Pull asks the prefill instance first and then the decode
    instance; push asks both at once.

    \b
      kvcourier route --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
      kvcourier route --prefill http://p1:8100 --prefill http://p2:8100 \\
                      --decode http://d1:8200 --mode push --policy least_loaded
      kvcourier route --instances instances.toml --retries 2

    kvcourier's own instances say themselves where their KV is found. For push from vLLM, and for
    streamed turns of conversations that a vLLM instance keeps, say it:

    \b
      --prefill http://p1:8000,engine_id=p1,kv_host=p1,kv_port=5600,tp_size=2
    """
    from kvcourier.http_server import bind, serve_until_stopped
    from kvcourier.router.app import create_app
    from kvcourier.runtime.channel_keys import read_keys
    from kvcourier.tracing.otel import tracing_of

    settings = RouterConfig(
        prefill=tuple(parse_instance_spec(text) for text in prefill or ()),
        decode=tuple(parse_instance_spec(text) for text in decode or ()),
        mode=mode,
        binding=binding,
        policy=policy,
        prefill_policy=prefill_policy,
        decode_policy=decode_policy,
        skip_below=skip_below,
        rebinds=rebinds,
        retries=retries,
        breaker=BreakerSettings(
            failures=breaker_failures,
            open_s=breaker_open,
            max_open_s=max(breaker_open, _BREAKER.max_open_s),
        ),
        instances_file=instances,
        admin_keys=None if admin_key_file is None else api_keys(read_api_keys(admin_key_file)),
        timeouts=Timeouts(
            connect_s=connect_timeout,
            prefill_s=prefill_timeout,
            first_byte_s=first_byte_timeout,
            near_lead_s=near_lead,
            stall_s=stall_timeout,
            total_s=total_timeout,
            load_s=load_interval,
        ),
        limits=RouterLimits(max_body_bytes=max_body_mib << 20, max_in_flight=max_in_flight),
        conversations=ConversationLimits(max_conversations, conversation_ttl),
        api_keys=None if api_key_file is None else api_keys(read_api_keys(api_key_file)),
        instance_api_key=(
            None if instance_api_key_file is None else read_api_keys(instance_api_key_file)[0]
        ),
        engine_id=EngineId(engine_id),
        channel_keys=read_keys(side_channel_key, side_channel_peer_keys, EngineId(engine_id)),
    )
    listener = bind(host, port)
    with tracing_of("kvcourier-router", otlp_traces_endpoint) as tracing:
        serve_until_stopped(create_app(settings, tracing), listener)
