"""Whole HTTP applications as decoders: any request gets a status that is not our fault.

Decides how bytes become a request, as an HTTP server would hand it over. The format of an input
is that of HTTP: a line with method and path, headers, an empty line, the body.
"""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

from engine.server.fakes import INFO, MODEL, FakeEndpoint, FakeEngine, byte_tokenizer, make_app, say
from fuzz.inputs import JSON, Codec
from fuzz.targets import BODIES, Target
from kvcourier.config import Limits
from kvcourier.core.params import Intent
from kvcourier.engine.admission import RequestLimits
from kvcourier.engine.api import GenerationRequest, RequestRejected
from kvcourier.engine.server.body import parse_body
from kvcourier.engine.server.errors import ApiError
from kvcourier.engine.server.job import JobReader
from kvcourier.engine.server.prompts import PromptReader
from kvcourier.openai import ChatCompletionRequest, CompletionRequest
from kvcourier.router.app import create_app
from kvcourier.router.config import InstanceSpec, RouterConfig, Timeouts

_NOBODY = "http://127.0.0.1:1"
_MAX_BODY = 1 << 20
# All that an HTTP server lets pass as a header.
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_MAX_CALLS = 500_000
"""A short body may ask for as many answers as there may be in one request, and gets them."""


def _apart(payload: bytes) -> list[Any]:
    """[method and path, headers, body]; ValueError if it is no such request."""
    head, _, body = payload.partition(b"\n\n")
    line, *headers = head.decode("latin-1").split("\n")
    return [line, [each.split(":", 1) for each in headers], json.loads(body) if body else ""]


def _together(parts: list[Any]) -> bytes:
    line, headers, body = parts
    head = "\n".join([line, *(f"{name}:{value}" for name, value in headers)])
    return head.encode("latin-1") + b"\n\n" + (json.dumps(body).encode() if body != "" else b"")


HTTP = Codec(_apart, _together, JSON.nests)


class Knowing(FakeEndpoint):
    """Takes what a refused request lets go of."""

    def expect(self, request_id: str, intent: Intent) -> None:
        """See runtime.interface."""

    def decline(self, request_id: str) -> None:
        """See runtime.interface."""


class Application:
    """An ASGI application, called in an event loop of its own."""

    def __init__(self, application: Any, allowed: Callable[[int, Any], bool]) -> None:
        self._application = application
        self._allowed = allowed
        self._loop = asyncio.new_event_loop()

    def feed(self, payload: bytes) -> bool:
        """Answer one request; whether it went well."""
        status, content = self._loop.run_until_complete(self._answer(payload))
        if status < 400:
            return True
        body = json.loads(content)
        assert self._allowed(status, body) or (status < 500 and body["error"]["message"]), body
        return False

    async def _answer(self, payload: bytes) -> tuple[int, bytes]:
        head, _, body = payload.partition(b"\n\n")
        line, *headers = head.split(b"\n")
        method, _, target = line.decode("latin-1").partition(" ")
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method or "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode("latin-1"),
            "query_string": query.encode("latin-1"),
            "root_path": "",
            "headers": [
                (name.lower(), value.strip())
                for name, _, value in (each.partition(b":") for each in headers)
                if _TOKEN.fullmatch(name) and _VALUE.fullmatch(value)
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        incoming = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if incoming:
                return incoming.pop()
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await self._application(scope, receive, send)
        start, *bodies = sent
        return start["status"], b"".join(each.get("body", b"") for each in bodies)


class Admission:
    """A body on its way to the engine, as far as it gets before anything is kept for it."""

    def __init__(self) -> None:
        limits = Limits()
        reader = PromptReader(byte_tokenizer(), INFO, limits.max_parts)
        self._jobs = JobReader(reader, INFO, MODEL, limits)
        self._limits = RequestLimits(INFO, num_blocks=8, block_size=16, has_endpoint=True)
        self._loop = asyncio.new_event_loop()

    def feed(self, payload: bytes) -> bool:
        """Whether an engine would serve it, as a completion or a conversation."""
        kinds = (CompletionRequest, ChatCompletionRequest)
        return any([self._admits(payload, kind) for kind in kinds])

    def _admits(self, payload: bytes, kind: type[Any]) -> bool:
        try:
            job = self._loop.run_until_complete(self._jobs.read(parse_body(payload, kind), "x"))
            for part in job.parts:
                self._limits.check(
                    GenerationRequest(
                        part.request_id, part.prompt, part.sampling, lambda _: None, job.intent
                    )
                )
        except ApiError as error:
            assert 400 <= error.status < 500, error
            return False
        except RequestRejected as error:
            assert str(error)
            return False
        return True


_LET_GO = b"DELETE /kvcourier/transfers/a/b\nauthorization: Bearer x\n\n"


def _requests(page: str) -> list[bytes]:
    headers = "content-type: application/json\nx-request-id: a-1\nx-kv-mode: push"
    calls = [
        f"POST {path}\n{headers}\n\n{json.dumps(body)}".encode()
        for body in BODIES
        for path in ("/v1/completions", "/v1/chat/completions")
    ]
    pages = ("/health", "/metrics?name[]=x", "/v1/models", "/kvcourier/instance", page)
    return [*calls, *(f"GET {page}\naccept: */*\n\n".encode() for page in pages), _LET_GO]


def _nobody_is_there(status: int, body: Any) -> bool:
    """Everything that the router takes goes to instances that do not exist."""
    error = body.get("error", {})
    words = (body.get("status"), error.get("code"), error.get("message", "")[:20])
    return status == 503 and any(
        word in words for word in ("unavailable", "no_instance", "connect", "No prefill instance ")
    )


def targets() -> list[Target]:
    """The applications, made anew."""
    instance = make_app(FakeEngine(say("ok")), endpoint=Knowing(), max_body_bytes=_MAX_BODY)
    spec = InstanceSpec(_NOBODY)
    timeouts = Timeouts(connect_s=1.0, learn_s=1.0)
    router = create_app(RouterConfig(prefill=(spec,), decode=(spec,), timeouts=timeouts))
    return [
        Target(
            "instance: body", [json.dumps(body).encode() for body in BODIES], JSON, Admission().feed
        ),
        Target(
            "instance: HTTP",
            _requests("/kvcourier/story/a/b"),
            HTTP,
            Application(instance, lambda status, body: False).feed,
            _MAX_CALLS,
        ),
        Target(
            "router: HTTP",
            _requests("/kvcourier/instances"),
            HTTP,
            Application(router, _nobody_is_there).feed,
        ),
    ]
