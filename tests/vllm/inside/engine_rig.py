"""Real engines of vLLM with our connector, of which only the model is made by hand.

An `Instance` is vLLM's EngineCore with its own scheduler, cache manager, KV cache tensors and
executor, stepped by the test. What stands for the model writes into every slot a number that only
the prompt up to there gives, and reads all of them back before it names a token: one block that is
stale, shifted or somebody else's changes the answer. Couriers are real, on the memory transport.
"""

import itertools
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from kvcourier.transport.interface import Operation
from kvcourier.transport.memory import Fate, InFlight, MemoryNetwork

BLOCK = 32
NUM_BLOCKS = 32
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
VOCABULARY = 512
GARBAGE = VOCABULARY - 1
"""What the hand-made model answers if a slot does not hold what it should."""
MODES = ["pull", "push"]
OPERATION = {"pull": Operation.READ, "push": Operation.WRITE}
BYTES_PER_BLOCK = LAYERS * KV_HEADS * BLOCK * 2 * HEAD_DIM * 4
LIMIT_S = 20.0
"""Less than a lease, so that blocks which only the lease's end brings back are not waited for."""

_ids = itertools.count()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids of a prompt; others for another seed."""
    return [(7 * seed + 13 * i) % 500 + 5 for i in range(length)]


def prefix_numbers(tokens: Sequence[int]) -> list[int]:
    """What belongs into each token's slot: whole numbers that float32 can hold."""
    running, numbers = 0, []
    for token in tokens:
        running = zlib.crc32(token.to_bytes(4, "big"), running)
        numbers.append(running >> 10)
    return numbers


def answer_to(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What an instance must answer."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(prefix_numbers(tokens)[-1] % GARBAGE)
    return tokens[len(prompt) :]


@dataclass
class _Sequence:
    """A request as the worker knows it."""

    tokens: list[int]
    blocks: list[int]
    num_prompt_tokens: int


class HandWorker(WorkerBase):
    """A worker with vLLM's attention layers and caches, and our connector; it has no model."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config, local_rank=0, rank=0, distributed_init_method="")
        with set_current_vllm_config(vllm_config):
            self.layers = [
                Attention(
                    HEADS,
                    HEAD_DIM,
                    1.0,
                    num_kv_heads=KV_HEADS,
                    cache_config=vllm_config.cache_config,
                    prefix=f"model.layers.{layer}.self_attn.attn",
                )
                for layer in range(LAYERS)
            ]
        self.sequences: dict[str, _Sequence] = {}
        self.sampled: deque[ModelRunnerOutput] = deque()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {
            layer.layer_name: layer.get_kv_cache_spec(self.vllm_config) for layer in self.layers
        }

    def determine_available_memory(self) -> int:
        return 1 << 30

    def initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        layout = self.cache_config.get_resolved_kv_cache_layout()
        self.caches = allocate_kv_cache(configs[0], torch.device("cpu"), layout, [BLOCK])
        self.connector = KVConnectorFactory.create_connector(
            config=self.vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=configs[0]
        )
        self.connector.register_kv_caches(self.caches)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any]:
        return {(0, 0): self.connector.get_handshake_metadata()}

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        if scheduled.total_num_scheduled_tokens == 0:
            self._forget(scheduled)
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self.vllm_config)
        with (
            set_forward_context(None, self.vllm_config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled) as from_connector,
        ):
            self._forget(scheduled)
            self._update(scheduled)
            answers = {
                request_id: self._compute(request_id, num_tokens)
                for request_id, num_tokens in scheduled.num_scheduled_tokens.items()
            }
        ids = list(answers)
        self.sampled.append(
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=list(answers.values()),
                kv_connector_output=from_connector,
            )
        )
        return None

    def sample_tokens(self, grammar: object) -> ModelRunnerOutput:
        return self.sampled.popleft()

    def shutdown(self) -> None:
        self.connector.shutdown()

    def _forget(self, scheduled: SchedulerOutput) -> None:
        for request_id in scheduled.finished_req_ids:
            self.sequences.pop(request_id, None)
        for block in scheduled.new_block_ids_to_zero or ():
            for cache in self.caches.values():
                cache[block] = 0

    def _update(self, scheduled: SchedulerOutput) -> None:
        self.starts: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids or ())
            self.sequences[new.req_id] = _Sequence(prompt, list(new.block_ids[0]), len(prompt))
            self.starts[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for request_id, blocks, num_computed, num_output in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            strict=True,
        ):
            sequence = self.sequences[request_id]
            if request_id in cached.resumed_req_ids:
                sequence.blocks = []
                # Sampled in a step that vLLM threw away.
                del sequence.tokens[sequence.num_prompt_tokens + num_output :]
            sequence.blocks += blocks[0] if blocks is not None else []
            self.starts[request_id] = num_computed

    def _compute(self, request_id: str, num_tokens: int) -> list[int]:
        """Write the slots of these tokens; the next token if it is known what comes before it."""
        sequence = self.sequences[request_id]
        start = self.starts[request_id]
        stop = start + num_tokens
        numbers = torch.tensor(prefix_numbers(sequence.tokens[:stop]), dtype=torch.float32)
        blocks = torch.tensor(sequence.blocks)
        positions = torch.arange(stop)
        block, slot = blocks[positions // BLOCK], positions % BLOCK
        garbage = False
        for layer, cache in enumerate(self.caches.values()):
            expected = (numbers + layer)[:, None, None].expand(-1, *cache.shape[1::2])
            cache[block[start:], :, slot[start:]] = expected[start:]
            garbage |= not torch.equal(cache[block, :, slot], expected)
        if stop < len(sequence.tokens):
            return []
        token = GARBAGE if garbage else int(numbers[-1]) % GARBAGE
        sequence.tokens.append(token)
        return [token]


class HandExecutor(UniProcExecutor):
    """vLLM's executor in one process, with the worker above."""

    def _init_executor(self) -> None:
        self.driver_worker = HandWorker(self.vllm_config)


@dataclass
class Asked:
    """What a client of an instance has seen of its request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    params: dict[str, Any] | None = None


class Instance:
    """One engine, stepped by the test.

    Args:
        port: its side channel's; must be in the environment while it is made.
        options: of vLLM's EngineArgs.
    """

    def __init__(
        self,
        model: Path,
        engine_id: str,
        role: str,
        port: int,
        policy: str = "fail",
        extra: dict[str, object] | None = None,
        **options: Any,
    ) -> None:
        self.port = port
        self.engine_id = engine_id
        transfer = KVTransferConfig(
            kv_connector="CourierConnector",
            kv_connector_module_path="kvcourier.vllm_connector",
            kv_role=role,
            engine_id=engine_id,
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra or {},
        )
        defaults = {
            "max_model_len": 512,
            "block_size": BLOCK,
            "num_gpu_blocks_override": NUM_BLOCKS,
            "async_scheduling": False,
            "dtype": "float32",
        }
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_transfer_config=transfer,
            **(defaults | options),
        ).create_engine_config()
        self.core = EngineCore(config, HandExecutor, log_stats=True)
        self.scheduler = self.core.scheduler
        self.asked: dict[str, Asked] = {}
        self.requests: dict[str, Request] = {}
        self.transfer_ids: dict[str, str] = {}
        self.records: list[dict[str, Any]] = []
        self.closed = False
        self.num_free_at_start = self.num_free

    @property
    def num_free(self) -> int:
        """Blocks that vLLM can give out now."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def is_idle(self) -> bool:
        """Whether vLLM knows no request and has every block back."""
        return not self.scheduler.requests and self.num_free == self.num_free_at_start

    @property
    def worker(self) -> HandWorker:
        return self.core.model_executor.driver_worker

    @property
    def num_preemptions(self) -> int:
        """Of all requests so far."""
        return sum(request.num_preemptions for request in self.requests.values())

    def status(self, request_id: str) -> RequestStatus | None:
        """None once vLLM has forgotten it."""
        request = self.scheduler.requests.get(request_id)
        return None if request is None else request.status

    def ask(
        self,
        prompt: Sequence[int],
        params: object = None,
        *,
        max_tokens: int = 4,
        abort_immediately: bool = False,
        **sampling: Any,
    ) -> str:
        """Add a request; returns vLLM's id of it."""
        request_id = f"cmpl-{next(_ids)}-{self.engine_id}"
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                temperature=0,
                ignore_eos=True,
                extra_args=None if params is None else {"kv_transfer_params": params},
                **sampling,
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            abort_immediately=abort_immediately,
        )
        self.asked[request_id] = Asked()
        added, wave = self.core.preprocess_add_request(request)
        self.requests[request_id] = added
        self.core.add_request(added, wave)
        return request_id

    def abort(self, request_id: str) -> None:
        """The client has left."""
        self.core.abort_requests([request_id])

    def step(self) -> None:
        """One step of vLLM, if there is anything to do."""
        if not (self.scheduler.has_requests() or self.core.batch_queue):
            return
        outputs, _ = self.core.step_fn()
        for output in (outputs or {}).values():
            stats = output.scheduler_stats
            if stats is not None and stats.kv_connector_stats is not None:
                self.records.append(stats.kv_connector_stats)
            for each in output.outputs:
                asked = self.asked[each.request_id]
                asked.tokens += each.new_token_ids
                if each.finish_reason is not None:
                    assert asked.finish_reason is None, "a request ends once"
                    asked.finish_reason = each.finish_reason
                    asked.params = each.kv_transfer_params

    def early_params(self, transfer_id: str) -> dict[str, object]:
        """What a router tells D of a prompt that is prefilled here."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": 1,
            "pp_size": 1,
            "remote_request_id": "router",
            "transfer_id": transfer_id,
        }

    def close(self) -> None:
        """Free threads and sockets; vLLM's process groups are shared by all instances."""
        if self.closed:
            return
        self.closed = True
        self.scheduler.shutdown()
        self.worker.shutdown()


def run(*instances: Instance, until: Callable[[], object]) -> None:
    """Step these in turn until something holds."""
    deadline = time.monotonic() + LIMIT_S
    pause = threading.Event()
    while not until():
        states = [dict(each.scheduler.requests) for each in instances]
        assert time.monotonic() < deadline, f"it did not come to pass: {states}"
        for instance in instances:
            instance.step()
        pause.wait(0.001)


def handed_over(
    p: Instance,
    d: Instance,
    prompt: Sequence[int],
    mode: str,
    *,
    prefill_tokens: int = 1,
    want: bool = True,
    traceparent: str | None = None,
    **options: Any,
) -> tuple[str, str]:
    """Send both legs as a router does; returns (P's request, D's request).

    In pull, D is asked when P has answered; in push, at once. `want` False leaves D out, and its
    id empty. `traceparent` is the span of both legs. `options` are D's.
    """
    span = {} if traceparent is None else {"traceparent": traceparent}
    params: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False, **span}
    transfer_id = f"transfer-{next(_ids)}"
    if mode == "push":
        params["transfer_id"] = transfer_id
    held = p.ask(prompt, params, max_tokens=prefill_tokens)
    p.transfer_ids[held] = transfer_id
    if mode == "pull":
        run(p, until=lambda: p.asked[held].finish_reason is not None)
        for_d = p.asked[held].params
        assert for_d is not None, "P hands over what it computed"
    else:
        for_d = p.early_params(transfer_id)
    return held, d.ask(prompt, {**for_d, **span}, **options) if want else ""


class Network(MemoryNetwork):
    """What carries KV between instances, in place of NIXL."""

    def plan(self, operation: Operation, fate: Fate) -> None:
        """From now on this becomes of operations of this kind."""
        self.fault_plan = lambda item: fate if item.operation is operation else Fate.DELIVER

    def plan_all(self, fate: Fate) -> None:
        """Of all operations, as a push that fails is repaired by a READ."""
        self.fault_plan = lambda item: fate if item.operation else Fate.DELIVER

    def heal(self) -> None:
        """Everything arrives again, also what was held."""
        self.fault_plan = lambda item: Fate.DELIVER
        if held := [item for item in self.pending if item.held]:
            self.deliver(*held)

    def pending_of(self, operation: Operation) -> list[InFlight]:
        """Operations under way."""
        return [item for item in self.pending if item.operation is operation]

    @property
    def num_moved(self) -> int:
        """Bytes that have crossed so far."""
        return sum(piece.size_bytes for piece in self.landed)


def still_serves(instance: Instance, *all_instances: Instance) -> None:
    """Whatever happened before, it has every block back and answers the next request."""
    run(*all_instances, until=lambda: instance.is_idle)
    prompt = prompt_of(40, seed=next(_ids))
    request_id = instance.ask(prompt)
    run(instance, until=lambda: instance.is_idle)
    assert instance.asked[request_id].tokens == answer_to(prompt, 4)
