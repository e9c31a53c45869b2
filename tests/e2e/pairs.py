"""Engines with their real endpoints and NIXL agents in this process, without HTTP.

Decides how a prompt travels from one of them to another, with the `kv_transfer_params` that the
router would send. Refuses to know processes. Engines are made once per shape: any pair of them
can transfer, as the engine id tells them apart.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from e2e.cluster import BLOCK_SIZE, CHUNK_TOKENS, NUM_TOKENS, until
from engine.rig import Listener, generate, submit, tiny_model
from kvcourier.bench.plan import ASKED, Way
from kvcourier.cli.instance import make_endpoint
from kvcourier.config import (
    Binding,
    CourierConfig,
    EndpointConfig,
    Limits,
    PathPolicy,
    StagingConfig,
)
from kvcourier.core.params import Intent, parse_params
from kvcourier.engine.api import FinishReason
from kvcourier.engine.config import EngineConfig, make_cache
from kvcourier.engine.engine import Engine
from kvcourier.ids import EngineId, RequestId, TransferId
from kvcourier.router.config import Coordinates
from kvcourier.router.legs import Call, early_params, late_params, prefill_params
from kvcourier.runtime.endpoint import KvEndpoint

SHAPE = "layers=4,hidden=64,heads=4,kv_heads=2,head_dim=16,max_position=512"
QWEN3 = f"random-qwen3:{SHAPE}"
NUM_BLOCK_TOKENS = 1024


@dataclass(frozen=True)
class Instance:
    """One engine and its endpoint."""

    engine: Engine
    endpoint: KvEndpoint

    def coordinates(self) -> Coordinates:
        """What a router learns of it."""
        info = self.endpoint.instance_info()
        return Coordinates(
            info["engine_id"],
            info["side_channel_host"],
            info["side_channel_port"],
            info["tp_size"],
            info["pp_size"],
        )

    def busy(self) -> dict[str, float]:
        """What is not as on an idle instance: blocks in use, requests, transfers."""
        stats = self.engine.stats()
        names = ("running", "waiting", "waiting_remote", "kv_blocks_used", "kv_loans")
        found: dict[str, float] = {name: stats[name] for name in names if stats[name]}
        for rank, (_, gauges) in self.endpoint.snapshots().items():
            found |= {
                f"{rank} {name}": value
                for name, value in gauges.items()
                if value and name != "peers"
            }
        return found


@dataclass(frozen=True)
class Zoo:
    """Instances by shape, made when first asked for; all end with the stack.

    A shape has settings of the engine, and `path`.
    """

    stack: ExitStack
    model: str = QWEN3
    _made: dict[tuple[Any, ...], Instance] = field(default_factory=dict)

    def instance(self, role: str, **shape: Any) -> Instance:
        """The instance of this role and shape, always the same one."""
        key = (role, *sorted(shape.items()))
        if key not in self._made:
            self._made[key] = self._make("-".join(map(str, key)), shape)
        return self._made[key]

    def _make(self, name: str, shape: dict[str, Any]) -> Instance:
        block_size = shape.get("block_size", BLOCK_SIZE)
        settings = {
            "num_blocks": NUM_BLOCK_TOKENS // block_size,
            "max_batch_tokens": CHUNK_TOKENS,
        }
        path = PathPolicy(shape.pop("path", StagingConfig().path))
        config = EngineConfig(model=self.model, dtype="float32", **settings | shape)
        model = tiny_model(self.model)
        cache = make_cache(model, config)
        endpoint = make_endpoint(
            EndpointConfig(
                EngineId(name),
                self.model,
                side_channel_port=0,
                courier=CourierConfig(staging=StagingConfig(path=path)),
            ),
            cache,
            CollectorRegistry(),
        )
        engine = Engine(model, config, endpoint, cache=cache)
        self.stack.callback(engine.close)
        engine.start()
        return Instance(engine, endpoint)


@dataclass(frozen=True)
class Pair:
    """A prompt computed by one instance is continued by another."""

    prefill: Instance
    decode: Instance

    def start(self, mode: str, name: str, prompt: Sequence[int], **sampling: Any) -> Listener:
        """Send both legs as the router does; the listener gets what D generates."""
        asked, binding = ASKED[Way(mode)]
        call = Call(asked, TransferId(name), RequestId(name), body={}, binding=binding)
        sampling = {"max_tokens": NUM_TOKENS} | sampling
        held = submit(
            self.prefill.engine,
            f"p-{name}",
            prompt,
            intent=_intent(prefill_params(call)),
            **sampling | {"max_tokens": 1},
        )
        if call.when is Binding.EARLY:
            params = early_params(call, self.prefill.coordinates())
        else:
            handoff = held.finish().kv_transfer_params
            assert handoff is not None, held.last
            params = late_params(call, handoff)
        return submit(self.decode.engine, f"d-{name}", prompt, intent=_intent(params), **sampling)

    def ask(
        self, mode: str, name: str, prompts: Sequence[Sequence[int]], **sampling: Any
    ) -> list[list[int]]:
        """Answers of prompts that travel at the same time."""
        listeners = [
            self.start(mode, f"{name}-{index}", prompt, **sampling)
            for index, prompt in enumerate(prompts)
        ]
        for listener in listeners:
            assert listener.finish().finish_reason is FinishReason.LENGTH, listener.last
        return [listener.tokens for listener in listeners]

    def warm(self, prompt: Sequence[int]) -> None:
        """Let D compute a prompt itself, so that its blocks are cached there."""
        generate(self.decode.engine, [prompt], max_tokens=1)

    def wait_idle(self) -> None:
        """Until all blocks are back on both sides."""
        for side in (self.prefill, self.decode):
            until(lambda side=side: not side.busy(), f"still busy: {side.busy()}")


def _intent(params: dict[str, Any]) -> Intent:
    intent = parse_params(params, Limits())
    assert intent is not None
    return intent
