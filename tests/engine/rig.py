"""Helpers for engine tests: tiny models, transformers' answers, listeners with bounded waits."""

import functools
import queue
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvcourier.core.params import Intent
from kvcourier.engine.api import FinishReason, GenerationRequest, SamplingParams, TokenEvent
from kvcourier.engine.attention import ATTENTION_NAME
from kvcourier.engine.config import EngineConfig
from kvcourier.engine.engine import Engine
from kvcourier.engine.models import LoadedModel, load_model
from kvcourier.ids import RequestId

WAIT_S = 30.0
SHAPE = "layers=2,hidden=64,heads=4,kv_heads=2,head_dim=16,max_position=512"
LLAMA = f"random-llama:{SHAPE}"
QWEN3 = f"random-qwen3:{SHAPE}"

torch.set_num_threads(1)


@functools.cache
def tiny_model(source: str = LLAMA) -> LoadedModel:
    return load_model(source, "float32")


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    source = random.Random(f"{length}/{seed}")
    return tuple(source.randrange(256) for _ in range(length))


@functools.cache
def reference(model_source: str, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """What transformers' own generate answers, with its own attention and cache."""
    module = tiny_model(model_source).module
    module.set_attn_implementation("sdpa")
    try:
        tokens = torch.tensor([prompt])
        output = module.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
        )
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
    return tuple(output[0, len(prompt) :].tolist())


class Listener:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self._events: queue.Queue[TokenEvent] = queue.Queue()
        self.tokens: list[int] = []
        self.last: TokenEvent | None = None

    def __call__(self, event: TokenEvent) -> None:
        self._events.put(event)

    def next(self) -> TokenEvent:
        assert self.last is None, "no event may follow the last one"
        event = self._events.get(timeout=WAIT_S)
        self.tokens += event.token_ids
        if event.finish_reason is not None:
            self.last = event
        return event

    def finish(self) -> TokenEvent:
        while self.last is None:
            self.next()
        return self.last

    @property
    def is_quiet(self) -> bool:
        return self._events.empty()


def submit(
    engine: Engine,
    request_id: str,
    prompt: Sequence[int],
    *,
    intent: Intent | None = None,
    on_event: Callable[[TokenEvent], None] | None = None,
    **sampling: Any,
) -> Listener:
    """Ask for an answer; `on_event` hears of each event before the listener."""
    listener = Listener()

    def tell(event: TokenEvent) -> None:
        if on_event is not None:
            on_event(event)
        listener(event)

    sampling = {"max_tokens": 8, "ignore_eos": True} | sampling
    engine.submit(
        GenerationRequest(
            RequestId(request_id), tuple(prompt), SamplingParams(**sampling), tell, intent
        )
    )
    return listener


@contextmanager
def running_engine(source: str = LLAMA, endpoint: Any = None, **config: Any) -> Iterator[Engine]:
    settings = {"block_size": 16, "num_blocks": 64, "max_batch_tokens": 64} | config
    engine = Engine(tiny_model(source), EngineConfig(model=source, **settings), endpoint)
    engine.start()
    try:
        yield engine
        assert engine.is_alive, engine.error
    finally:
        engine.close()


def generate(engine: Engine, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    """Answers of prompts that run at the same time."""
    base = engine.stats()["finished_requests"]
    listeners = [
        submit(engine, f"request-{base}-{index}", prompt, **sampling)
        for index, prompt in enumerate(prompts)
    ]
    for listener in listeners:
        assert listener.finish().finish_reason is not FinishReason.ERROR, listener.last
    return [listener.tokens for listener in listeners]
