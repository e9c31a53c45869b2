"""Stands in for `kvcourier serve` and `kvcourier route`: the same flags, lines and HTTP, no model.

The model's name says what goes wrong. Every process leaves its number in $FAKE_PIDS.
"""

import asyncio
import json
import os
import signal
import sys
import time
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvcourier.http_server import bind, serve_until_stopped

WARM_UP_TOKENS = 4

command, *flags = sys.argv[1:]
values = dict(flag.removeprefix("--").partition("=")[::2] for flag in flags)
name = values.get("engine-id", "router")


def tokens(prompt: str, count: int) -> list[int]:
    return [zlib.crc32(f"{prompt}{index}".encode()) % 1000 for index in range(count)]


async def completions(request: Request) -> Response:
    body = await request.json()
    mode = request.headers.get("X-KV-Mode", "")
    problem = body["model"]
    if problem == f"fails-{mode}":
        return JSONResponse({"error": {"message": "KV did not come"}}, 503)
    token_ids = tokens(body["prompt"], body["max_tokens"])
    if problem == f"differs-{mode}":
        token_ids[2] += 1

    async def events() -> AsyncIterator[str]:
        for token_id in token_ids:
            choice = {"index": 0, "text": f" w{token_id}", "token_ids": [token_id]}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            if problem == "hangs" and command == "route" and len(token_ids) > WARM_UP_TOKENS:
                await asyncio.Event().wait()
        yield "data: [DONE]\n\n"

    headers = {"X-KV-Transfer-Id": f"{problem}-{mode}"} if mode else {}
    return StreamingResponse(events(), headers=headers, media_type="text/event-stream")


async def story(request: Request) -> Response:
    _, _, mode = request.path_params["key"].rpartition("-")
    now = time.time()
    entries = [{"what": "accepted", "at_unix_s": now, "thread": "engine"}]
    if name == "prefill":
        entries.append({"what": "prefill_finished", "at_unix_s": now - 1.0, "thread": "engine"})
    if {"pull": "decode", "push": "prefill"}[mode] == name:
        entries.append(
            {"what": "posted", "at_unix_s": now, "thread": "courier", "bytes": 4096, "pieces": 3}
        )
    return JSONResponse(entries)


def main() -> None:
    (Path(os.environ["FAKE_PIDS"]) / str(os.getpid())).touch()
    if values.get("model") == "never-ready":
        print("loading ...", flush=True)
        signal.pause()
    if values.get("model") == "decode-dies" and name == "decode":
        sys.exit("decode: out of memory")
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/kvcourier/story/{key}", story),
        ]
    )
    serve_until_stopped(app, bind("127.0.0.1", 0))


if __name__ == "__main__":
    main()
