"""An OpenAI server without a model, as a process: `fake_openai.py good` or `... hangs`."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvcourier.http_server import bind, serve_until_stopped

(behaviour,) = sys.argv[1:]


async def completions(request: Request) -> Response:
    body = await request.json()

    async def events() -> AsyncIterator[str]:
        for number in range(body["max_tokens"]):
            choice = {"index": 0, "text": "", "token_ids": [number]}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            if behaviour == "hangs":
                # The test waits for this line: from now on a request is under way.
                print("asked", flush=True)
                await asyncio.Event().wait()
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def models(_: Request) -> Response:
    return JSONResponse({"data": [{"id": "nothing"}]})


if __name__ == "__main__":
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
        ]
    )
    serve_until_stopped(app, bind("127.0.0.1", 0))
