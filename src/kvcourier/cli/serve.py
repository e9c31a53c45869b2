"""`kvcourier serve`.

Decides the flags of one embedded instance. Refuses to know how it is put together
(`instance.py`).
"""

import enum
from pathlib import Path
from typing import Annotated

import typer

from kvcourier.allow_list import parse_allow_list
from kvcourier.api_keys import api_keys, read_api_keys
from kvcourier.cli.config_file import ConfigFile
from kvcourier.config import (
    MIB,
    CourierConfig,
    Integrity,
    PathPolicy,
    Posting,
    Timing,
    TransferMode,
)
from kvcourier.errors import ConfigError
from kvcourier.layout.geometry import CacheLayout

_TIMING = Timing()
_COURIER = CourierConfig()
_STAGING = _COURIER.staging


class Role(enum.StrEnum):
    """What an instance is for; a router decides what it does with it."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Dtype(enum.StrEnum):
    """Number format of weights and KV cache; auto depends on the device."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LoadFailurePolicy(enum.StrEnum):
    """What happens to a request whose KV does not come."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


class Granularity(enum.StrEnum):
    """What is sent at once while a prompt is computed."""

    REQUEST = "request"
    CHUNK = "chunk"
    LAYER = "layer"


def serve(
    model: Annotated[
        str,
        typer.Option(
            help="smollm2, a folder or .gguf file on this machine, or random-llama[:KEY=VALUE,...] "
            "for a generated one."
        ),
    ] = "smollm2",
    served_model_name: Annotated[
        str | None,
        typer.Option(help="Name in the API; the model's if not given."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and KV cache.")] = Dtype.AUTO,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    cpu_threads: Annotated[
        int, typer.Option(min=0, max=1024, help="Of one step; 0 leaves torch's choice.")
    ] = 0,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one."),
    ] = 8100,
    role: Annotated[
        Role,
        typer.Option(help="What routers are told that this instance is for."),
    ] = Role.BOTH,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
    num_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="Blocks in the cache."),
    ] = None,
    kv_cache_gb: Annotated[
        float | None,
        typer.Option(min=0.001, help="Size of the cache instead of --num-blocks."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Longest prompt plus answer; the model's if not given."),
    ] = None,
    max_batch_tokens: Annotated[
        int,
        typer.Option(min=1, help="Tokens per step; longer prompts come in chunks."),
    ] = 512,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests per step.")] = 32,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV of common beginnings.")] = True,
    tp_size: Annotated[
        int,
        typer.Option(min=1, max=1024, help="Ranks that share the KV heads."),
    ] = 1,
    pp_size: Annotated[
        int,
        typer.Option(min=1, max=1024, help="Ranks that share the layers."),
    ] = 1,
    kv_layout: Annotated[CacheLayout, typer.Option(help="Order inside a block.")] = CacheLayout.NHD,
    engine_id: Annotated[
        str | None,
        typer.Option(help="Stable name; made up if not given."),
    ] = None,
    kv_modes: Annotated[
        str,
        typer.Option(
            metavar="MODE[,MODE]",
            help="Modes to take part in: pull, push; or none, to work alone.",
        ),
    ] = "pull,push",
    side_channel_host: Annotated[
        str | None,
        typer.Option(
            help="For handshakes, also told to peers. Default: $VLLM_NIXL_SIDE_CHANNEL_HOST, else "
            "localhost."
        ),
    ] = None,
    side_channel_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="0 takes a free one. Default: $VLLM_NIXL_SIDE_CHANNEL_PORT, else 5600, plus "
            "--dp-rank.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keys, one a line, of which calls must have one (Authorization: Bearer), but for "
            "/health and /metrics. Default: open to all.",
        ),
    ] = None,
    side_channel_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Secret key of this instance (CurveZMQ), by which its peers know it.",
        ),
    ] = None,
    side_channel_peer_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Public keys of the instances to exchange KV with, each in ENGINE_ID.key.",
        ),
    ] = None,
    dp_rank: Annotated[int, typer.Option(min=0, help="Data-parallel index.")] = 0,
    allow_peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST|HOST:PORT|NETWORK/BITS",
            help="Instances to exchange KV with, by their side channel's address; repeatable. "
            "Default: all.",
        ),
    ] = None,
    nixl_backend: Annotated[
        list[str] | None,
        typer.Option(help="UCX, LIBFABRIC, ...; repeatable, in order of preference. Default: UCX."),
    ] = None,
    nixl_threads: Annotated[
        int,
        typer.Option(min=0, max=256, help="Per backend; 0 leaves NIXL's default."),
    ] = _COURIER.num_threads,
    path: Annotated[
        PathPolicy,
        typer.Option(
            help="How scattered blocks are written: a descriptor for each run of them, packed into "
            "staging memory, or whatever should be faster."
        ),
    ] = _STAGING.path,
    staging_mib: Annotated[
        int,
        typer.Option(min=0, help="Staging memory per rank and direction; 0: nothing goes packed."),
    ] = _STAGING.send_bytes // MIB,
    staging_slot_mib: Annotated[
        int,
        typer.Option(min=1, help="Largest piece that is written at once from staging memory."),
    ] = _STAGING.slot_bytes // MIB,
    granularity: Annotated[
        Granularity,
        typer.Option(
            help="What is sent at once to an instance that waits for it: the whole request, each "
            "chunk when it is computed, or each layer of the last chunk as well."
        ),
    ] = Granularity.LAYER,
    first_token_seeding: Annotated[
        bool,
        typer.Option(
            help="Send the first token, which was sampled after the prompt, along with its KV, and "
            "go on from one that came."
        ),
    ] = True,
    kv_lease_duration: Annotated[
        float,
        typer.Option(help="Seconds to keep KV for a decode instance that is silent."),
    ] = _TIMING.kv_lease_duration,
    push_registration_timeout: Annotated[
        float,
        typer.Option(help="Seconds until a decode instance gives up on a push."),
    ] = _TIMING.push_registration_timeout,
    peer_silence_s: Annotated[
        float,
        typer.Option(
            help="Seconds without a sign of life until transfers with an instance fail that has "
            "stopped or cannot be reached. One that has died is known at once."
        ),
    ] = _TIMING.peer_silence_s,
    kv_integrity: Annotated[
        Integrity,
        typer.Option(
            help="How much of the KV that has come is compared with its source before it is used: "
            "nothing, a sample of every transfer, or all of it."
        ),
    ] = Integrity.OFF,
    kv_load_failure_policy: Annotated[
        LoadFailurePolicy,
        typer.Option(help="If KV does not come."),
    ] = LoadFailurePolicy.FAIL,
    kv_recompute_threshold: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Missing prompt tokens that are computed rather than fetched; of a conversation's "
            "history, fewer than that. Default: 1, and 64 of a history.",
        ),
    ] = None,
    bidirectional_kv_xfer: Annotated[
        bool,
        typer.Option(
            "--bidirectional-kv-xfer",
            help="Keep an answer's KV for the conversation's next turn, and fetch that of earlier "
            "turns from the instance that keeps it.",
        ),
    ] = False,
    decoder_kv_blocks_ttl: Annotated[
        float,
        typer.Option(help="Seconds to keep an answer's KV, if its blocks are not needed before."),
    ] = 480.0,
    posting: Annotated[
        Posting,
        typer.Option(
            help="Whether the engine's step goes on while a courier posts, or waits for it, as "
            "vLLM's default connector does; to measure what that costs."
        ),
    ] = Posting.THREAD,
    fragment: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Part of each prompt's blocks that is handed out in shuffled order; to measure "
            "transfers of scattered caches.",
        ),
    ] = 0.0,
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
    """Serve one model through the OpenAI API, as a prefill or a decode instance or both.

    Without a router in front it answers requests alone, like any server.

    \b
      kvcourier serve
      kvcourier serve --role prefill --port 8100 --side-channel-port 5600
      kvcourier serve --role decode --port 8200 --side-channel-port 5601 --block-size 32
      kvcourier serve --config instance.toml --port 8300

    A configuration file holds the same names:

    \b
      [serve]
      role = "prefill"
      num-blocks = 4096
      kv-modes = ["pull", "push"]

    Prints "kvcourier ready URL" once it answers requests.
    """
    from kvcourier.cli.instance import InstanceSettings, run_instance

    modes = parse_modes(kv_modes)
    if num_blocks is not None and kv_cache_gb is not None:
        raise ConfigError("--num-blocks and --kv-cache-gb: expected one of them, found both")
    run_instance(
        InstanceSettings(
            model=model,
            served_model_name=served_model_name,
            dtype=dtype,
            device=device,
            cpu_threads=cpu_threads,
            host=host,
            port=port,
            role=role,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_gb=kv_cache_gb,
            max_model_len=max_model_len,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            prefix_caching=prefix_caching,
            tp_size=tp_size,
            pp_size=pp_size,
            kv_layout=kv_layout,
            engine_id=engine_id,
            kv_modes=modes,
            side_channel_host=side_channel_host,
            side_channel_port=side_channel_port,
            api_keys=None if api_key_file is None else api_keys(read_api_keys(api_key_file)),
            side_channel_key=side_channel_key,
            side_channel_peer_keys=side_channel_peer_keys,
            dp_rank=dp_rank,
            allowed_peers=parse_allow_list(allow_peer, "--allow-peer") if allow_peer else None,
            nixl_backends=tuple(nixl_backend or _COURIER.backends),
            nixl_threads=nixl_threads,
            path=path,
            staging_mib=staging_mib,
            staging_slot_mib=staging_slot_mib,
            granularity=granularity,
            first_token_seeding=first_token_seeding,
            kv_lease_duration=kv_lease_duration,
            push_registration_timeout=push_registration_timeout,
            peer_silence_s=peer_silence_s,
            kv_integrity=kv_integrity,
            kv_load_failure_policy=kv_load_failure_policy,
            kv_recompute_threshold=kv_recompute_threshold,
            bidirectional_kv_xfer=bidirectional_kv_xfer,
            decoder_kv_blocks_ttl=decoder_kv_blocks_ttl,
            posting=posting,
            fragment=fragment,
            otlp_traces_endpoint=otlp_traces_endpoint,
        )
    )


def parse_modes(text: str) -> frozenset[TransferMode]:
    """Read `pull`, `push`, both with a comma between them, or `none`.

    Raises:
        ConfigError: a word is no mode, or there is none.
    """
    words = {word.strip().lower() for word in text.split(",") if word.strip()}
    if words == {"none"}:
        return frozenset()
    unknown = sorted(words - {mode.value for mode in TransferMode})
    if unknown or not words:
        found = repr(unknown[0]) if unknown else "nothing"
        allowed = ", ".join(TransferMode)
        raise ConfigError(f"--kv-modes: expected some of {allowed}, or none; found {found}")
    return frozenset(TransferMode(word) for word in words)
