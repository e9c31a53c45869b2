"""One POST over a connection of its own, read as it comes in.

Decides as little HTTP/1.1 as an OpenAI server on the same host needs, so that the benchmark runs on
the standard library alone, and that a client library's pools and buffers are in no measurement.
Refuses to know what is sent.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

_MAX_LINE_BYTES = 1 << 16


class BadAnswer(Exception):
    """What came is no HTTP answer, or broke off."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status of an answer, and its body piece by piece as the server sent it."""

    status: int
    pieces: AsyncIterator[bytes]

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces])


@contextlib.asynccontextmanager
async def post(
    host: str, port: int, path: str, body: bytes, headers: Mapping[str, str]
) -> AsyncIterator[Answer]:
    """Send a JSON body; leaving the context closes the connection, which aborts what runs.

    Raises:
        OSError: the server was not reached or dropped the connection.
        BadAnswer: it answered something else than HTTP, or less than it announced.
    """
    reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE_BYTES)
    try:
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        try:
            status, fields = await _read_head(reader)
            yield Answer(status, _pieces(reader, fields))
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise BadAnswer(
                f"the answer of port {port} broke off or is no HTTP: {error}"
            ) from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    fields: dict[str, str] = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.decode("latin-1").partition(":")
        fields[name.strip().lower()] = value.strip()
    return status, fields


async def _pieces(reader: asyncio.StreamReader, fields: Mapping[str, str]) -> AsyncIterator[bytes]:
    if fields.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in fields:
        yield await reader.readexactly(int(fields["content-length"]))
    else:
        while piece := await reader.read(_MAX_LINE_BYTES):
            yield piece
