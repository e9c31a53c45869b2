"""Requests that are cancelled at every moment, on real sockets: what becomes of connections."""

import asyncio

import httpx
import pytest

from kvcourier.router.cancelling import CancelSafeTransport

MOMENTS = range(80)
"""Turns of the event loop until a request is cancelled: from before it connects until long after it
was sent."""
LIMIT_S = 20.0


class Server:
    """Answers each request, or lets all of them wait; knows how many connections are open."""

    def __init__(self, *, answers: bool) -> None:
        self._answers = answers
        self._changed = asyncio.Condition()
        self.num_requests = 0
        self.num_open = 0
        self.url = ""

    async def start(self) -> asyncio.Server:
        """On loopback."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def all_closed(self) -> None:
        """Until no connection is open."""
        async with self._changed, asyncio.timeout(LIMIT_S):
            await self._changed.wait_for(lambda: self.num_open == 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.num_requests += 1
                if self._answers:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            async with self._changed:
                self.num_open -= 1
                self._changed.notify_all()


@pytest.mark.parametrize("answers", [True, False], ids=["answered", "waiting"])
def test_no_connection_is_lost(answers: bool) -> None:
    async def run() -> None:
        server = Server(answers=answers)
        transport = CancelSafeTransport(limits=httpx.Limits(max_keepalive_connections=0))
        async with (
            await server.start() as listener,
            httpx.AsyncClient(transport=transport, trust_env=False) as client,
        ):
            for num_turns in MOMENTS:
                request = asyncio.create_task(client.get(server.url))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                request.cancel()
                (outcome,) = await asyncio.gather(request, return_exceptions=True)
                if not isinstance(outcome, asyncio.CancelledError):
                    assert answers and outcome.text == "ok"
            await server.all_closed()
            assert server.num_requests > len(MOMENTS) // 4, "cancelled before anything happened"
            listener.close()

    asyncio.run(run())


def test_who_is_cancelled_again_goes_at_once() -> None:
    """A router that is shut down does not wait for a connection that does not come about."""

    async def run() -> None:
        may_connect = asyncio.Event()

        server = Server(answers=False)
        transport = CancelSafeTransport(limits=httpx.Limits(max_keepalive_connections=0))
        backend = transport._pool._network_backend
        connect = backend.connect_tcp

        async def connect_when_it_may(*arguments: object, **options: object) -> object:
            await may_connect.wait()
            return await connect(*arguments, **options)

        backend.connect_tcp = connect_when_it_may  # type: ignore[method-assign]
        async with await server.start() as listener:
            client = httpx.AsyncClient(transport=transport, trust_env=False)
            request = asyncio.create_task(client.get(server.url))
            for _ in MOMENTS:
                await asyncio.sleep(0)
            for _ in range(2):
                request.cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            async with asyncio.timeout(LIMIT_S):
                await asyncio.gather(request, return_exceptions=True)
            assert request.cancelled() and not may_connect.is_set()
            may_connect.set()
            await asyncio.gather(*transport._ending)
            await server.all_closed()
            await client.aclose()
            listener.close()

    asyncio.run(run())
