"""Turn 2 of a conversation on vLLM and two GPUs: the history fetched from D, or computed again.

Starts P and D with `CourierConnector` and `bidirectional_kv_xfer`, and sends both legs itself, as a
router would. Both sides are measured in every round, in alternating order, on histories of their
own. P has no prefix cache, as if another P had served turn 1; D has one, on both sides.

    python3 benchmarks/gpu/vllm_turns.py --model 8b --histories 8000 24000 --json turns.json
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from http_stream import BadAnswer, post
from model_folders import SIZES, VOCAB_SIZE, write_model_folder
from pair_servers import (
    DECODE_ENGINE_ID,
    HOST,
    MODEL_NAME,
    PREFILL_ENGINE_ID,
    PairSpec,
    ServerFailed,
    ServerPair,
    ServerSpec,
)

from kvcourier.bench.stats import paired_ratio

MODES = ("pull", "push")
SIDES = ("computed", "fetched")
NUM_NEW, NUM_ANSWER = 64, 16
MARGIN_TOKENS = 256
_COURIER = {
    "kv_connector": "CourierConnector",
    "kv_connector_module_path": "kvcourier.vllm_connector",
    "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
}


@dataclass(frozen=True)
class Pair:
    """Where P and D listen, and how a turn is sent to both."""

    prefill_port: int
    decode_port: int
    prefill_channel: int

    async def turn(
        self, prompt: list[int], mode: str, state: Mapping[str, Any] | None
    ) -> tuple[float, list[int], dict[str, Any]]:
        """Seconds to the first token, the answer, and what D says that it keeps."""
        name = uuid.uuid4().hex
        hold = {**(state or {}), "do_remote_decode": True, "do_remote_prefill": False}
        hold |= {"transfer_id": name, "transfer_mode": mode}
        began = time.perf_counter()
        prefill = asyncio.create_task(self._answer(self.prefill_port, prompt, 1, hold))
        if mode == "pull":
            params = (await prefill)["kv_transfer_params"]
        else:
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": PREFILL_ENGINE_ID,
                "remote_host": HOST,
                "remote_port": self.prefill_channel,
                "tp_size": 1,
                "pp_size": 1,
                "remote_request_id": name,
                "transfer_id": name,
            }
        if state is None:
            # Streams of vLLM do not say what is kept, which the first turn must.
            answer = await self._answer(self.decode_port, prompt, NUM_ANSWER, params)
            first_s, tokens = time.perf_counter() - began, answer["choices"][0]["token_ids"]
        else:
            answer = {}
            first_s, tokens = await self._first_token(prompt, params, began)
        await prefill
        return first_s, tokens, answer.get("kv_transfer_params") or {}

    async def _answer(
        self, port: int, prompt: list[int], num_tokens: int, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        body = _body(prompt, num_tokens, params)
        async with post(HOST, port, "/v1/completions", body, {}) as answer:
            content = await answer.read()
        if answer.status != 200:
            raise BadAnswer(f"port {port} answered {answer.status}: {content[:500]!r}")
        found: dict[str, Any] = json.loads(content)
        return found

    async def _first_token(
        self, prompt: list[int], params: Mapping[str, Any], began: float
    ) -> tuple[float, list[int]]:
        body = _body(prompt, NUM_ANSWER, params, stream=True)
        content, first_s = b"", 0.0
        async with post(HOST, self.decode_port, "/v1/completions", body, {}) as answer:
            async for piece in answer.pieces:
                first_s = first_s or time.perf_counter() - began
                content += piece
        if answer.status != 200:
            raise BadAnswer(f"D answered {answer.status}: {content[:500]!r}")
        events = [line[6:] for line in content.splitlines() if line.startswith(b"data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return first_s, [token for choice in choices for token in choice["token_ids"]]

    def fetched(self) -> float:
        """Histories that P has fetched so far."""
        url = f"http://{HOST}:{self.prefill_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        name = "kvcourier:histories_fetched_total{"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def measure(pair: Pair, num_history: int, mode: str, rounds: int) -> dict[str, Any]:
    """One cell; each round has its own order."""
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    before = pair.fetched()
    for index in range(rounds + 1):
        for side in SIDES if index % 2 else SIDES[::-1]:
            name = f"{num_history}-{mode}-{index}-{side}"
            prompt = _tokens(num_history - NUM_ANSWER, name)
            _, answer, state = await pair.turn(prompt, mode, None)
            prompt = [*prompt, *answer, *_tokens(NUM_NEW, name + "-new")]
            # An empty state is one: it is streamed, and nothing is fetched.
            told = state if side == "fetched" else {}
            seconds, _, _ = await pair.turn(prompt, mode, told)
            if index:  # the first round connects, and warms up
                times[side].append(seconds)
    await asyncio.sleep(1.0)  # until vLLM has told its counters
    fetched = pair.fetched() - before
    ratio = paired_ratio([[each] for each in zip(*(times[side] for side in SIDES), strict=True)])
    assert ratio is not None
    return {
        "history_tokens": num_history,
        "mode": mode,
        "fetched": fetched,
        "times_s": times,
        "median_s": {side: statistics.median(values) for side, values in times.items()},
        "ratio": [ratio.estimate.value, ratio.estimate.low, ratio.estimate.high],
    }


async def run(options: argparse.Namespace) -> int:
    """Start both, measure all cells, stop both."""
    longest = max(options.histories) + NUM_NEW + MARGIN_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        spec = PairSpec(
            model_folder=write_model_folder(Path(folder), options.model),
            max_model_len=longest,
            servers=_servers(options),
            log_folder=options.logs,
            log_name="turns",
            start_timeout_s=options.start_timeout,
            flags=("--enforce-eager", "--gpu-memory-utilization", options.gpu_memory_utilization),
        )
        results = []
        async with ServerPair(spec) as servers:
            await servers.until_healthy()
            pair = Pair(options.port, options.port + 1, options.side_channel_port)
            print("| history | mode | computed | fetched | fetched / computed |")
            print("| --- | --- | --- | --- | --- |")
            for num_history in options.histories:
                for mode in MODES:
                    results.append(await measure(pair, num_history, mode, options.rounds))
                    print(_row(results[-1]), flush=True)
    if options.json:
        content = {"model": options.model, "rounds": options.rounds, "results": results}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    missing = [row for row in results if row["fetched"] != options.rounds + 1]
    for row in missing:
        print(f"only {row['fetched']:g} fetched: {row['history_tokens']} {row['mode']}")
    return 1 if missing else 0


def _servers(options: argparse.Namespace) -> tuple[ServerSpec, ServerSpec]:
    prefill = ServerSpec(
        name="prefill",
        engine_id=PREFILL_ENGINE_ID,
        gpu=options.gpus[0],
        port=options.port,
        side_channel_port=options.side_channel_port,
        kv_transfer_config=_COURIER | {"kv_role": "kv_both"},
    )
    decode = ServerSpec(
        name="decode",
        engine_id=DECODE_ENGINE_ID,
        gpu=options.gpus[1],
        port=options.port + 1,
        side_channel_port=options.side_channel_port + 1,
        kv_transfer_config=_COURIER | {"kv_role": "kv_consumer"},
        flags=("--enable-prefix-caching",),
    )
    return prefill, decode


def _row(result: dict[str, Any]) -> str:
    shown = [
        f"{1e3 * result['median_s'][side]:.1f} "
        f"({1e3 * min(result['times_s'][side]):.1f}-{1e3 * max(result['times_s'][side]):.1f})"
        for side in SIDES
    ]
    value, low, high = result["ratio"]
    cells = [f"{result['history_tokens']:,}", result["mode"], *shown]
    return "| " + " | ".join([*cells, f"{value:.2f} ({low:.2f}-{high:.2f})"]) + " |"


def _body(
    prompt: list[int], num_tokens: int, params: Mapping[str, Any], *, stream: bool = False
) -> bytes:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
        "kv_transfer_params": params,
    }
    return json.dumps(body).encode()


def _tokens(count: int, seed: str) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2, VOCAB_SIZE) for _ in range(count)]


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="8b")
    parser.add_argument("--histories", type=int, nargs="+", default=[8000, 24000])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--gpus", nargs=2, default=["0", "1"])
    parser.add_argument(
        "--gpu-memory-utilization", default="0.8", help="0.4 where both share a GPU"
    )
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--side-channel-port", type=int, default=5700)
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--logs", type=Path, default=Path("/tmp/vllm-turns"))
    parser.add_argument("--json", type=Path)
    try:
        return asyncio.run(run(parser.parse_args()))
    except (ServerFailed, BadAnswer, OSError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
