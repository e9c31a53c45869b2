"""Instances and a router on real loopback sockets, with every step under the test's control.

A fake instance answers like a prefill or a decode instance; a test replaces its `script` to hold,
refuse, tear or count. Nothing here waits without a bound: `bounded()` ends any test that hangs.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from kvcourier.config import TransferMode
from kvcourier.router.app import create_app
from kvcourier.router.config import InstanceSpec, RouterConfig
from kvcourier.router.services import Services

BOUND_S = 60.0
COMPLETIONS = "/v1/completions"
MODES = tuple(TransferMode)


def bounded() -> asyncio.Timeout:
    """A bound for everything that a test waits for."""
    return asyncio.timeout(BOUND_S)


class Server:
    """One ASGI app on a free loopback port, in this event loop."""

    def __init__(self, app: Any, port: int = 0) -> None:
        # Named, or asyncio leaves Nagle on, and every second packet waits for 40 ms.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, log_config=None, http="h11", interface="asgi3")
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)

    async def start(self) -> None:
        await self._server.startup(sockets=[self._socket])

    async def stop(self) -> None:
        """Close all connections, also those in use."""
        open_ones = self._server.server_state.connections
        for connection in list(open_ones):
            connection.transport.abort()
        # uvicorn looks ten times a second whether they have gone.
        while open_ones:
            await asyncio.sleep(0)
        await self._server.shutdown(sockets=[self._socket])


@dataclass
class Received:
    """One leg as an instance got it."""

    path: str
    headers: list[tuple[str, str]]
    body: dict[str, Any]
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) <= 1
        return values[0] if values else None

    @property
    def params(self) -> dict[str, Any]:
        params = self.body["kv_transfer_params"]
        assert isinstance(params, dict)
        return params


class Connection:
    """The instance's end of one leg."""

    def __init__(self, receive: Any, send: Any, leg: Received) -> None:
        self._receive = receive
        self._send = send
        self._leg = leg

    async def answer(
        self, content: bytes, status: int = 200, content_type: str = "application/json"
    ) -> None:
        await self.head(status, content_type, len(content))
        await self._send({"type": "http.response.body", "body": content})

    async def head(
        self, status: int = 200, content_type: str = "text/event-stream", length: int | None = None
    ) -> None:
        headers = [(b"content-type", content_type.encode())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def chunk(self, content: bytes) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def die(self) -> None:
        """Reset the connection, as a killed process does."""
        self._send.__self__.transport.abort()

    async def until_gone(self) -> None:
        """Wait until the router has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leg.gone.set()


Script = Callable[[Received, Connection], Awaitable[None]]


async def hold(_leg: Received, connection: Connection) -> None:
    """Never answer; notice when the router leaves."""
    await connection.until_gone()


async def die(_leg: Received, connection: Connection) -> None:
    """Drop the connection without an answer."""
    connection.die()


def answering(status: int, content: bytes, content_type: str = "application/json") -> Script:
    """Give one fixed answer."""

    async def script(_leg: Received, connection: Connection) -> None:
        await connection.answer(content, status, content_type)

    return script


def holding_until(gate: asyncio.Event, then: Script) -> Script:
    """Go on once `gate` is set, or notice that the router has left."""

    async def script(leg: Received, connection: Connection) -> None:
        gone = asyncio.create_task(connection.until_gone())
        opened = asyncio.create_task(gate.wait())
        await asyncio.wait({gone, opened}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        opened.cancel()
        await asyncio.gather(gone, opened, return_exceptions=True)
        if not leg.gone.is_set():
            await then(leg, connection)

    return script


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
CHUNKS = (event("a"), event("\u00e9\u4e16"), event("c"))


class FakeInstance:
    """An instance that records its legs, in order, and follows a script."""

    def __init__(self, engine_id: str, port: int = 0) -> None:
        self.engine_id = engine_id
        self.incarnation = f"{engine_id}-life-1"
        self.side_channel_port = 5600
        self.modes: list[str] = ["pull", "push"]
        self.tells = True
        self.healthy = True
        self.draining = False
        self.progress: tuple[int, int] | None = None
        self.questions: list[str] = []
        self.load: tuple[int, float] | None = None
        self.models = ["tiny"]
        self.script: Script = self.serve
        self.legs: list[Received] = []
        self.let_go: asyncio.Queue[str] = asyncio.Queue()
        self.arrived = asyncio.Event()
        self.asked = asyncio.Event()
        self.asked_load = asyncio.Event()
        self.server = Server(self._app, port)

    @property
    def url(self) -> str:
        return self.server.url

    def info(self) -> dict[str, Any]:
        return {
            "engine_id": self.engine_id,
            "incarnation": self.incarnation,
            "side_channel_host": f"{self.engine_id}.host",
            "side_channel_port": self.side_channel_port,
            "tp_size": 2,
            "pp_size": 3,
            "block_size": 16,
            "modes": self.modes,
            "model": self.models[0] if self.models else "none",
            "draining": self.draining,
        }

    def metrics(self) -> str:
        """A page as the embedded engine's, where a test sets a load."""
        if self.load is None:
            return ""
        running, used = self.load
        return (
            f'kvcourier:num_requests_running{{model_name="tiny"}} {running}\n'
            f'kvcourier:kv_cache_usage_perc{{model_name="tiny"}} {used}\n'
        )

    def handoff(self, leg: Received) -> dict[str, Any]:
        """What P answers: vLLM's keys, and one that the router has never heard of."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[3, 1, 2]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": f"cmpl-{leg.header('x-request-id')}-0-1a2b3c4d",
            "remote_host": f"{self.engine_id}.host",
            "remote_port": self.side_channel_port,
            "tp_size": 2,
            "dcp_size": 1,
            "pp_size": 3,
            "remote_num_tokens": 40,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_incarnation": self.incarnation,
            "of_a_later_release": {"kept": [1, None, "x"]},
        }

    async def serve(self, leg: Received, connection: Connection) -> None:
        """What a well-behaved instance does on either leg, or alone."""
        if leg.body.get("kv_transfer_params") and leg.params["do_remote_decode"]:
            answer = {"choices": [{"text": "a"}], "kv_transfer_params": self.handoff(leg)}
            await connection.answer(json.dumps(answer).encode())
        elif leg.body.get("stream"):
            await connection.head()
            for chunk in (*CHUNKS, DONE):
                await connection.chunk(chunk)
            await connection.end()
        else:
            text = json.dumps({"id": leg.header("x-request-id"), "by": self.engine_id})
            await connection.answer(text.encode())

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        if scope["method"] == "POST":
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message.get("body", b"")
                more = message.get("more_body", False)
            headers = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"]]
            leg = Received(scope["path"], headers, json.loads(body))
            self.legs.append(leg)
            self.arrived.set()
            await self.script(leg, Connection(receive, send, leg))
            return
        if scope["method"] == "DELETE":
            self.let_go.put_nowait(scope["path"].removeprefix("/kvcourier/transfers/"))
            await Connection(receive, send, Received(scope["path"], [], {})).answer(b"", 204)
            return
        if scope["path"].startswith("/kvcourier/transfers/"):
            self.questions.append(scope["path"].removeprefix("/kvcourier/transfers/"))
            done, all_ = self.progress or (0, 0)
            page = {"num_tokens": done, "num_prompt_tokens": all_}
            connection = Connection(receive, send, Received(scope["path"], [], {}))
            await connection.answer(json.dumps(page).encode(), 200 if self.progress else 404)
            return
        if scope["path"] == "/metrics":
            connection = Connection(receive, send, Received(scope["path"], [], {}))
            await connection.answer(self.metrics().encode(), 200, "text/plain")
            self.asked_load.set()
            return
        pages: dict[str, tuple[int, Any]] = {
            "/health": (200 if self.healthy else 503, {}),
            "/v1/models": (200, {"object": "list", "data": [{"id": n} for n in self.models]}),
            "/kvcourier/instance": (200, self.info()) if self.tells else (404, {}),
        }
        status, content = pages[scope["path"]]
        connection = Connection(receive, send, Received(scope["path"], [], {}))
        await connection.answer(json.dumps(content).encode(), status)
        self.asked.set()


@dataclass
class World:
    """Fakes behind a router, and a client of it."""

    prefill: list[FakeInstance]
    decode: list[FakeInstance]
    services: Services
    url: str
    client: httpx.AsyncClient

    async def post(
        self, body: Any = None, mode: str | None = None, path: str = COMPLETIONS, **headers: str
    ) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if mode is not None:
            named["x-kv-mode"] = mode
        return await self.client.post(path, json=prompt() if body is None else body, headers=named)

    def count(self, name: str, **labels: str) -> float:
        return self.services.metrics.registry.get_sample_value(name, labels) or 0.0

    def failures(self, leg: str, kind: str) -> float:
        return self.count("kvcourier_router_failures_total", leg=leg, kind=kind)

    def calls(self, mode: str, outcome: str) -> float:
        return self.count("kvcourier_router_requests_total", mode=mode, outcome=outcome)


def prompt(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Say it.", "max_tokens": 3} | fields


@contextlib.asynccontextmanager
async def world(
    num_prefill: int = 1,
    num_decode: int = 1,
    specs: Callable[[FakeInstance], InstanceSpec] = lambda fake: InstanceSpec(fake.url),
    decode_specs: Callable[[FakeInstance], InstanceSpec] = lambda fake: InstanceSpec(fake.url),
    prepare: Callable[[list[FakeInstance]], None] = lambda fakes: None,
    prefill_port: int = 0,
    **settings: Any,
) -> AsyncIterator[World]:
    """Run fakes and a router; `prepare` changes the fakes before anybody asks them.

    A prefill instance whose place another one is to take has a `prefill_port` from `free_port`.
    """
    prefill = [FakeInstance(f"p{index}", prefill_port) for index in range(num_prefill)]
    decode = [FakeInstance(f"d{index}") for index in range(num_decode)]
    prepare([*prefill, *decode])
    config = RouterConfig(
        prefill=tuple(specs(fake) for fake in prefill),
        decode=tuple(decode_specs(fake) for fake in decode),
        **settings,
    )
    app = create_app(config)
    router = Server(app)
    async with bounded():
        for fake in (*prefill, *decode):
            await fake.server.start()
        await router.start()
    client = httpx.AsyncClient(base_url=router.url, timeout=None, trust_env=False, verify=False)
    try:
        yield World(prefill, decode, app.state.services, router.url, client)
    finally:
        async with bounded():
            await client.aclose()
            servers = [router, *(fake.server for fake in (*prefill, *decode))]
            await asyncio.gather(*(server.stop() for server in servers))
