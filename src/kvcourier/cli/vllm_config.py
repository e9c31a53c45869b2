"""`kvcourier vllm-config`.

Decides how one vLLM node is started with our connector, and how the router is told about it.
Refuses to know vLLM: every key and flag here is one that its documentation names.
"""

import dataclasses
import enum
import json
import shlex
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvcourier.cli.config_file import ConfigFile
from kvcourier.config import (
    SIDE_CHANNEL_HOST_VARIABLE,
    SIDE_CHANNEL_PORT_VARIABLE,
    CourierConfig,
    Timing,
)
from kvcourier.errors import ConfigError
from kvcourier.router.config import MAX_PARALLEL_SIZE, parse_instance_spec
from kvcourier.vllm_connector.settings import DEFAULT_NUM_THREADS

CONNECTOR = "CourierConnector"
CONNECTOR_MODULE = "kvcourier.vllm_connector"

_TIMING = Timing()
_COURIER = CourierConfig()
_EVERY_ADDRESS = ("", "0.0.0.0", "::", "[::]")


class NodeRole(enum.StrEnum):
    """What a vLLM node is for."""

    PREFILL = "prefill"
    DECODE = "decode"


class LoadFailurePolicy(enum.StrEnum):
    """What vLLM does with a request whose KV did not come."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


_KV_ROLES = {NodeRole.PREFILL: "kv_producer", NodeRole.DECODE: "kv_consumer"}
_PORTS = {NodeRole.PREFILL: 8100, NodeRole.DECODE: 8200}
# Apart, so that a pair with default flags fits on one host.
_SIDE_CHANNEL_PORTS = {NodeRole.PREFILL: 5600, NodeRole.DECODE: 5700}


@dataclass(frozen=True, slots=True)
class VllmNode:
    """One vLLM instance that loads our connector.

    Attributes:
        host, port: its HTTP address, as the router reaches it.
        side_channel_host, side_channel_port: where peers ask for handshakes.
        kv_recompute_threshold: None leaves the connector's default.
        vllm_flags: further flags of `vllm serve`, as they are.

    Raises:
        ConfigError: an address or the engine id cannot be told to others.
    """

    role: NodeRole
    model: str
    engine_id: str
    host: str
    port: int
    side_channel_host: str
    side_channel_port: int
    backends: tuple[str, ...] = _COURIER.backends
    num_threads: int = DEFAULT_NUM_THREADS
    kv_lease_duration: float = _TIMING.kv_lease_duration
    push_registration_timeout: float = _TIMING.push_registration_timeout
    kv_recompute_threshold: int | None = None
    bidirectional_kv_xfer: bool = False
    kv_load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.FAIL
    tensor_parallel_size: int = 1
    vllm_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for flag, host in (("--host", self.host), ("--side-channel-host", self.side_channel_host)):
            if host in _EVERY_ADDRESS or not _is_one_word(host):
                raise ConfigError(
                    f"{flag}: expected the one address at which others reach this node, "
                    f"found {host!r}; name the host or its IP address"
                )
        if not self.engine_id or not _is_one_word(self.engine_id):
            raise ConfigError(
                "--engine-id: expected printable characters without spaces and commas, "
                f"found {self.engine_id!r}"
            )
        for name in ("kv_lease_duration", "push_registration_timeout"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag}: expected seconds above 0, found {value!r}")

    @property
    def url(self) -> str:
        """Its HTTP address; IPv6 in brackets."""
        host = f"[{self.host}]" if ":" in self.host and "[" not in self.host else self.host
        return f"http://{host}:{self.port}"


def kv_transfer_config(node: VllmNode) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config`; of our own keys only what is not the default."""
    defaults = {field.name: field.default for field in dataclasses.fields(VllmNode)}
    extra = {
        "backends": list(node.backends),
        "num_threads": node.num_threads,
        "kv_lease_duration": node.kv_lease_duration,
        "push_registration_timeout": node.push_registration_timeout,
        "kv_recompute_threshold": node.kv_recompute_threshold,
        "bidirectional_kv_xfer": node.bidirectional_kv_xfer,
    }
    changed = {
        name: value for name, value in extra.items() if getattr(node, name) != defaults[name]
    }
    config: dict[str, Any] = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": _kv_role(node),
        "engine_id": node.engine_id,
    }
    if node.kv_load_failure_policy is not LoadFailurePolicy.FAIL:
        config["kv_load_failure_policy"] = node.kv_load_failure_policy.value
    return config | {"kv_connector_extra_config": changed}


def _kv_role(node: VllmNode) -> str:
    """P receives as well where it fetches what D keeps of earlier turns."""
    fetches = node.bidirectional_kv_xfer and node.role is NodeRole.PREFILL
    return "kv_both" if fetches else _KV_ROLES[node.role]


def serve_command(node: VllmNode) -> str:
    """The line for a POSIX shell that starts this node."""
    variables = {
        SIDE_CHANNEL_HOST_VARIABLE: node.side_channel_host,
        SIDE_CHANNEL_PORT_VARIABLE: str(node.side_channel_port),
    }
    flags = ["--host", node.host.strip("[]"), "--port", str(node.port)]
    if node.tensor_parallel_size > 1:
        flags += ["--tensor-parallel-size", str(node.tensor_parallel_size)]
    flags += ["--kv-transfer-config", _compact(kv_transfer_config(node)), *node.vllm_flags]
    settings = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*settings, shlex.join(["vllm", "serve", node.model, *flags])])


def route_flags(node: VllmNode) -> str:
    """The flag of `kvcourier route` that names this node, quoted for a shell.

    Coordinates are given of whose KV is looked for by others: a prefill node's, and that of turns
    that a decode node keeps.

    Raises:
        ConfigError: the router could not read it.
    """
    spec = node.url
    if node.role is NodeRole.PREFILL or node.bidirectional_kv_xfer:
        spec += (
            f",engine_id={node.engine_id},kv_host={node.side_channel_host}"
            f",kv_port={node.side_channel_port},tp_size={node.tensor_parallel_size}"
        )
    parse_instance_spec(spec)
    return shlex.join([f"--{node.role.value}", spec])


def vllm_config(
    role: Annotated[NodeRole, typer.Option(help="What this node is for.")],
    model: Annotated[str, typer.Option(help="Model, as `vllm serve` takes it.")],
    vllm_flags: Annotated[
        list[str] | None, typer.Argument(help="After --: more flags of `vllm serve`, as they are.")
    ] = None,
    engine_id: Annotated[
        str | None,
        typer.Option(
            help="Stable name, one per node. Default: kvcourier-prefill, kvcourier-decode."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="HTTP address of this node, as the router reaches it.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="HTTP port. Default: prefill 8100, decode 8200."),
    ] = None,
    side_channel_host: Annotated[
        str | None, typer.Option(help="For handshakes, also told to peers. Default: --host.")
    ] = None,
    side_channel_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: prefill 5600, decode 5700.")
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, max=MAX_PARALLEL_SIZE, help="GPUs that share the KV heads.")
    ] = 1,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="NIXL backend: UCX, LIBFABRIC, ...; repeatable. Default: UCX."),
    ] = None,
    num_threads: Annotated[
        int,
        typer.Option(min=0, max=256, help="NIXL threads per backend; 0 leaves NIXL's default."),
    ] = DEFAULT_NUM_THREADS,
    kv_lease_duration: Annotated[
        float, typer.Option(help="Seconds to keep KV for a decode instance that is silent.")
    ] = _TIMING.kv_lease_duration,
    push_registration_timeout: Annotated[
        float, typer.Option(help="Seconds until a decode instance gives up on a push.")
    ] = _TIMING.push_registration_timeout,
    kv_recompute_threshold: Annotated[
        int | None,
        typer.Option(min=0, help="Missing prompt tokens that are computed rather than fetched."),
    ] = None,
    bidirectional_kv_xfer: Annotated[
        bool,
        typer.Option(
            "--bidirectional-kv-xfer",
            help="Keep an answer's KV for the conversation's next turn, and fetch it; on both.",
        ),
    ] = False,
    kv_load_failure_policy: Annotated[
        LoadFailurePolicy, typer.Option(help="If KV does not come.")
    ] = LoadFailurePolicy.FAIL,
    json_only: Annotated[
        bool, typer.Option("--json", help="Print only the value of --kv-transfer-config.")
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Print the command that starts one vLLM node with kvcourier's connector.

    Below it, as a comment, the flag that tells the router about this node.

    \b
      kvcourier vllm-config --role prefill --model Qwen/Qwen3-8B --host 10.0.0.1
      kvcourier vllm-config --role decode --model Qwen/Qwen3-8B --host 10.0.0.2 \\
                            --tensor-parallel-size 2 -- --max-model-len 32768
    """
    node = VllmNode(
        role=role,
        model=model,
        engine_id=f"kvcourier-{role.value}" if engine_id is None else engine_id,
        host=host,
        port=_PORTS[role] if port is None else port,
        side_channel_host=host.strip("[]") if side_channel_host is None else side_channel_host,
        side_channel_port=(
            _SIDE_CHANNEL_PORTS[role] if side_channel_port is None else side_channel_port
        ),
        backends=tuple(backend) if backend else _COURIER.backends,
        num_threads=num_threads,
        kv_lease_duration=kv_lease_duration,
        push_registration_timeout=push_registration_timeout,
        kv_recompute_threshold=kv_recompute_threshold,
        bidirectional_kv_xfer=bidirectional_kv_xfer,
        kv_load_failure_policy=kv_load_failure_policy,
        tensor_parallel_size=tensor_parallel_size,
        vllm_flags=tuple(vllm_flags or ()),
    )
    if json_only:
        typer.echo(_compact(kv_transfer_config(node)))
        return
    typer.echo(serve_command(node))
    typer.echo(f"# kvcourier route {route_flags(node)}")


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _is_one_word(text: str) -> bool:
    """Whether it can stand in the router's comma-separated form."""
    return text.isprintable() and not any(each.isspace() or each == "," for each in text)
