"""How long turn 2 of a conversation takes to its first token, with and without the history fetched.

Starts P, D and a router of the embedded engine. Both sides are measured in every round, in
alternating order, on histories of their own: turn 1 is a prompt of so many tokens, turn 2 adds a
few. With the header X-Conversation-Id P fetches from D what D has; without it P computes all of it.
P has no prefix cache, as if another P had served turn 1, or had had to forget it. D has one, and so
the history, on both sides.

    python benchmarks/turns.py --json turns.json
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvcourier.bench.stats import paired_ratio
from kvcourier.demo.processes import Child, Children

MODEL = "random-llama:layers=4,hidden=256,heads=4,kv_heads=2,head_dim=64,max_position=16384"
MODES = ("pull", "push")
SIDES = ("computed", "fetched")
NUM_NEW, NUM_ANSWER = 64, 16
ANSWER_S = 300.0


@dataclass(frozen=True)
class Cluster:
    """Where the three listen, and how to reach them."""

    client: httpx.Client
    prefill: str
    router: str

    def first_token_s(self, prompt: list[int], headers: dict[str, str]) -> tuple[float, list[int]]:
        """Time to the first token of a streamed answer, and the answer."""
        body = {
            "prompt": prompt,
            "max_tokens": NUM_ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        url, tokens, first_s = f"{self.router}/v1/completions", [], 0.0
        began = time.perf_counter()
        with self.client.stream("POST", url, json=body, headers=headers) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                new = [token for one in json.loads(data)["choices"] for token in one["token_ids"]]
                if new and not tokens:
                    first_s = time.perf_counter() - began
                tokens += new
        assert len(tokens) == NUM_ANSWER, tokens
        return first_s, tokens

    def fetched(self) -> float:
        """Histories that P has fetched so far."""
        lines = self.client.get(f"{self.prefill}/metrics").text.splitlines()
        name = "kvcourier:histories_fetched_total{"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def main() -> None:
    """Measure, print a table, and write the numbers to a file if asked."""
    options = _options()
    results = []
    with tempfile.TemporaryDirectory() as logs, Children(Path(logs)) as children:
        cluster = _start(children, options.model)
        print("| history | mode | computed | fetched | fetched / computed |")
        print("| --- | --- | --- | --- | --- |")
        for num_history in options.histories:
            for mode in MODES:
                result = _measure(cluster, num_history, mode, options.rounds)
                results.append(result)
                print(_row(result), flush=True)
                if options.json:
                    content = {"model": options.model, "rounds": options.rounds, "results": results}
                    options.json.write_text(json.dumps(content, indent=1) + "\n")


def _measure(cluster: Cluster, num_history: int, mode: str, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    before = cluster.fetched()
    for index in range(rounds):
        for side in SIDES if index % 2 else SIDES[::-1]:
            name = f"{num_history}-{mode}-{index}-{side}"
            headers = {"X-KV-Mode": mode}
            if side == "fetched":
                headers["X-Conversation-Id"] = name
            prompt = _tokens(num_history - NUM_ANSWER, name)
            _, answer = cluster.first_token_s(prompt, headers)
            seconds, _ = cluster.first_token_s(
                [*prompt, *answer, *_tokens(NUM_NEW, name + "-new")], headers
            )
            times[side].append(seconds)
    assert cluster.fetched() - before == rounds, "not every history was fetched"
    pairs = [[pair] for pair in zip(times["computed"], times["fetched"], strict=True)]
    ratio = paired_ratio(pairs)
    assert ratio is not None
    return {
        "history_tokens": num_history,
        "mode": mode,
        "times_s": times,
        "median_s": {side: statistics.median(values) for side, values in times.items()},
        "ratio": ratio.estimate.value,
        "ratio_low": ratio.estimate.low,
        "ratio_high": ratio.estimate.high,
    }


def _row(result: dict[str, Any]) -> str:
    shown = [
        f"{1e3 * result['median_s'][side]:.0f} "
        f"({1e3 * min(result['times_s'][side]):.0f}-{1e3 * max(result['times_s'][side]):.0f})"
        for side in SIDES
    ]
    ratio = f"{result['ratio']:.2f} ({result['ratio_low']:.2f}-{result['ratio_high']:.2f})"
    cells = [f"{result['history_tokens']:,}", result["mode"], *shown, ratio]
    return "| " + " | ".join(cells) + " |"


def _start(children: Children, model: str) -> Cluster:
    common = (
        *("serve", "--port=0", "--side-channel-port=0", "--bidirectional-kv-xfer"),
        *(f"--model={model}", "--dtype=float32", "--kv-cache-gb=0.6", "--cpu-threads=1"),
    )
    prefill = _child(children, "p", *common, "--role=prefill", "--no-prefix-caching")
    decode = _child(children, "d", *common, "--role=decode")
    urls = [children.wait_ready(child) for child in (prefill, decode)]
    flags = (f"--prefill={urls[0]}", f"--decode={urls[1]}", "--port=0")
    router = children.wait_ready(_child(children, "router", "route", *flags))
    return Cluster(httpx.Client(timeout=ANSWER_S, trust_env=False), urls[0], router)


def _child(children: Children, name: str, *flags: str) -> Child:
    return children.start(name, [sys.executable, "-m", "kvcourier", *flags])


def _tokens(count: int, seed: str) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(256) for _ in range(count)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--histories", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
