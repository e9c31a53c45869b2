"""Takes the flags of vLLM's API server and answers as it does; a process that tests can start.

Each server checks what only vLLM would notice (a leg that names no KV), and obeys prompts of some
lengths: the ENDS_ATth of ENDS_TOKENS ends the process, REFUSED_TOKENS is answered with 400.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

ENDS_TOKENS = 13
ENDS_AT = 6
REFUSED_TOKENS = 17
# A child in the server's process group, as vLLM's engine is; a test looks for it.
CHILD = "import signal; signal.pause()"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config", type=json.loads)
    parser.add_argument("--fail-to-start", action="store_true")
    parser.add_argument("--ignore-sigterm", action="store_true")
    flags, _ = parser.parse_known_args()
    assert json.loads((flags.model / "config.json").read_text())["vocab_size"]
    if flags.fail_to_start:
        sys.exit("no such kernel")
    if os.fork() == 0:
        if flags.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.execv(sys.executable, [sys.executable, "-c", CHILD])
    started = {
        "pid": os.getpid(),
        "kv": flags.kv_transfer_config,
        "gpu": os.environ["CUDA_VISIBLE_DEVICES"],
        "side_channel": os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"],
        "argv": sys.argv[1:],
    }
    with (flags.model.parent / "started.jsonl").open("a") as file:
        file.write(json.dumps(started) + "\n")
    engine_id = flags.kv_transfer_config["engine_id"]
    routes = [
        Route("/health", lambda _: Response()),
        Route("/v1/completions", Completions(engine_id).answer, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=flags.port, log_level="warning")


class Completions:
    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._num_ending = 0

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self._num_ending += len(body["prompt"]) == ENDS_TOKENS
        if self._num_ending == ENDS_AT:
            print("the engine died", flush=True)
            os._exit(9)
        if len(body["prompt"]) == REFUSED_TOKENS:
            return JSONResponse({"error": {"message": "too odd"}}, 400)
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            assert (self._engine_id, body["max_tokens"], body["stream"]) == ("p", 1, False)
            return JSONResponse({"choices": [{}], "kv_transfer_params": self._handoff(request)})
        assert self._engine_id == "d"
        if params:
            assert params["do_remote_prefill"] and params["remote_engine_id"] == "p"
            assert params.get("remote_block_ids") or params["transfer_id"]
        return StreamingResponse(tokens(body["max_tokens"]), media_type="text/event-stream")

    def _handoff(self, request: Request) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.headers["x-request-id"],
            "remote_block_ids": [[1, 2]],
        }


async def tokens(count: int) -> AsyncIterator[bytes]:
    for index in range(count):
        reason = "length" if index == count - 1 else None
        yield event(choices=[{"text": "w", "finish_reason": reason}])
        await asyncio.sleep(0)
    yield event(choices=[], usage={"completion_tokens": count})
    yield b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


if __name__ == "__main__":
    main()
