"""Tests that run in vLLM's own environment; test_inside.py, one folder up, starts them there."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# `vllm` alone would be found everywhere: tests/ is on the path, so this folder's parent is it.
if importlib.util.find_spec("vllm.v1") is None:
    collect_ignore_glob = ["*"]
else:
    import torch
    from transformers import Qwen3Config
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from kvcourier.transport.memory import MemoryTransport
    from ports import free_port

    from . import engine_rig
    from .engine_rig import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCABULARY, Instance, Network


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tells vLLM the shape of a model; no weights are ever read."""
    folder = tmp_path_factory.mktemp("model")
    Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def process_groups() -> None:
    """What a worker of vLLM sets up before all else."""
    torch.set_num_threads(1)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo"
        )
        parallel_state.ensure_model_parallel_initialized(1, 1)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> "Network":
    """What carries KV between the instances of a test."""
    network = Network()
    monkeypatch.setattr(
        "kvcourier.vllm_connector.worker_side.nixl_factory",
        lambda config: lambda name: MemoryTransport(network, name),
    )
    return network


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def make(
    request: pytest.FixtureRequest,
    model: Path,
    network: "Network",
    monkeypatch: pytest.MonkeyPatch,
) -> "Iterator[Callable[..., Instance]]":
    """Makes instances, with and without vLLM's asynchronous scheduling.

    When the test is over, all must have all blocks back and still serve; then they are closed.
    Of one that is not `exact`, whose cache cannot hold the hand-made model's numbers, no answer is
    asked.
    """
    made: list[Instance] = []
    with contextlib.ExitStack() as stack:

        def make_one(engine_id: str, role: str, *, exact: bool = True, **options: Any) -> Instance:
            port = free_port()
            monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
            monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
            options.setdefault("async_scheduling", request.param)
            instance = Instance(model, engine_id, role, port, **options)
            stack.callback(instance.close)
            if exact:
                made.append(instance)
            return instance

        yield make_one
        network.heal()
        alive = [instance for instance in made if not instance.closed]
        for instance in alive:
            engine_rig.still_serves(instance, *alive)


@pytest.fixture
def pair(make: "Callable[..., Instance]") -> "tuple[Instance, Instance]":
    """(P, D)"""
    return make("p", "kv_producer"), make("d", "kv_consumer")
