"""An engine, an endpoint and tokenizers for tests of the HTTP server.

The engine runs every request on a thread of its own, as events come from another thread in
reality too. A plan says which events a request gets.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvcourier.config import Limits
from kvcourier.engine.api import (
    FinishReason,
    GenerationRequest,
    ModelInfo,
    RequestRejected,
    TokenEvent,
)
from kvcourier.engine.server import create_app
from kvcourier.ids import RequestId

WAIT_S = 60
EOS = 256
MODEL = "tiny"
INFO = ModelInfo(name="org/tiny", vocab_size=257, max_model_len=512, eos_token_ids=frozenset({EOS}))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer without merges: one token per byte, plus an end token."""
    # The visible stand-ins of bytes, in the order of the bytes' own values.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    names = {byte: chr(byte) for byte in visible}
    names |= {byte: chr(256 + position) for position, byte in enumerate(hidden)}
    vocab = {names[byte]: byte for byte in range(256)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    assert tokenizer.eos_token_id == EOS
    tokenizer.chat_template = chat_template
    return tokenizer


class Context:
    """What a plan knows of its request."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.aborted = threading.Event()

    def tokens(self, text: str | bytes) -> TokenEvent:
        data = text.encode() if isinstance(text, str) else text
        return TokenEvent(self.request.request_id, tuple(data))

    def end(self, reason: FinishReason = FinishReason.LENGTH, **fields: Any) -> TokenEvent:
        return TokenEvent(self.request.request_id, finish_reason=reason, **fields)


Plan = Callable[[Context], Iterator[TokenEvent]]


def say(text: str | bytes, **end: Any) -> Plan:
    """One event per byte of `text`, then the end."""

    def plan(context: Context) -> Iterator[TokenEvent]:
        data = text.encode() if isinstance(text, str) else text
        for byte in data:
            yield context.tokens(bytes([byte]))
        yield context.end(**end)

    return plan


def begin_and_hang(text: str = "") -> Plan:
    """Say `text`, then nothing until aborted."""

    def plan(context: Context) -> Iterator[TokenEvent]:
        if text:
            yield context.tokens(text)
        assert context.aborted.wait(WAIT_S)

    return plan


def fail(error: str, after: str = "") -> Plan:
    def plan(context: Context) -> Iterator[TokenEvent]:
        if after:
            yield context.tokens(after)
        yield context.end(FinishReason.ERROR, error=error)

    return plan


class FakeEngine:
    """Serves requests by a plan; after an abort a request gets no more events.

    With `rejection`, all requests but the first `num_accepted` are refused.
    """

    def __init__(self, plan: Plan, rejection: str = "", num_accepted: int = 0) -> None:
        self.num_accepted = num_accepted
        self.info = INFO
        self.error: str | None = None
        self.plan = plan
        self.rejection = rejection
        self.computed: dict[str, tuple[int, int]] = {}
        self.numbers: dict[str, float] = {"running": 2, "generated_tokens": 7, "other": 1}
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[RequestId] = []
        self.has_submitted = threading.Event()
        self.has_aborted = threading.Event()
        self._contexts: dict[RequestId, Context] = {}

    @property
    def is_alive(self) -> bool:
        return self.error is None

    def submit(self, request: GenerationRequest) -> None:
        if self.rejection and len(self.submitted) >= self.num_accepted:
            raise RequestRejected(self.rejection)
        assert request.request_id not in self._contexts
        context = Context(request)
        self._contexts[request.request_id] = context
        self.submitted.append(request)
        threading.Thread(target=self._run, args=(context,), daemon=True).start()
        self.has_submitted.set()

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)
        self._contexts[request_id].aborted.set()
        self.has_aborted.set()

    def stats(self) -> dict[str, float]:
        return self.numbers

    def progress(self, transfer_id: str) -> tuple[int, int] | None:
        return self.computed.get(transfer_id)

    def _run(self, context: Context) -> None:
        for event in self.plan(context):
            if context.aborted.is_set():
                return
            context.request.on_event(event)


class FakeEndpoint:
    """The calls that the server makes."""

    def instance_info(self) -> dict[str, Any]:
        return {"engine_id": "e1", "side_channel_port": 5600}

    def story(self, key: str) -> list[dict[str, Any]] | None:
        return [{"at_unix_s": 1.0, "what": "registered", "thread": "t"}] if key == "a/b" else None

    def let_go(self, transfer_id: str) -> bool:
        return transfer_id == "a/b"


def make_app(engine: FakeEngine, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "endpoint": None,
        "role": "decode",
        "limits": Limits(),
        "served_model_name": MODEL,
    } | changes
    tokenizer = settings.pop("tokenizer", None) or byte_tokenizer()
    return create_app(engine, tokenizer, **settings)


def call(app: Any, method: str, path: str, **options: Any) -> httpx.Response:
    """One request to the application, without a socket."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            async with asyncio.timeout(WAIT_S):
                return await client.request(method, path, **options)

    return asyncio.run(run())


def complete(app: Any, **body: Any) -> httpx.Response:
    return call(app, "POST", "/v1/completions", json={"prompt": "hi", "max_tokens": 50} | body)


def chat(app: Any, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return call(app, "POST", "/v1/chat/completions", json={"messages": messages} | body)


def sse(response: httpx.Response) -> list[Any]:
    """The events of a stream, parsed; checks its framing. `[DONE]` stays a string."""
    assert response.headers["content-type"].startswith("text/event-stream")
    return parse_sse(response.content)


def parse_sse(content: bytes) -> list[Any]:
    assert content.endswith(b"\n\n")
    events = content[:-2].split(b"\n\n")
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    texts = [event.removeprefix(b"data: ").decode() for event in events]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def joined(chunks: Sequence[Any], index: int = 0) -> str:
    """The text of one choice of a stream of completions."""
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)
