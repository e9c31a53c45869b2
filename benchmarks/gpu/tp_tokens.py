"""Whether tokens are right where P and D split the model differently: P on one GPU, D on two.

Decides the models and prompts, and what counts as equal. How servers are started is
`pair_servers`'. Weights are random but written to disk, so that both servers load the same ones.
In float32 every token must be that of D alone; bfloat16 rounds differently on one and on two
GPUs, so there only the first tokens are expected to agree, and shares are reported.

    python3 benchmarks/gpu/tp_tokens.py --models gqa-float32,mla-bfloat16
"""

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.request
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_folders import VOCAB_SIZE, write_tokenizer
from pair_load import FIRST_TOKEN_ID, PATH
from pair_servers import HOST, MODEL_NAME, PairSpec, ServerFailed, ServerPair, ServerSpec
from pair_settings import SERVERS

DEFAULT_OUT = Path(__file__).with_name("results") / "tp-tokens.json"
LENGTHS = (5, 16, 17, 500, 3000)
OUTPUT_TOKENS = 32
PORTS, SIDE_CHANNEL_PORTS = (8100, 8200), (5600, 5700)
MAX_MODEL_LEN = 4096
ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is made on the spot.

    Attributes:
        kind: name of its classes in transformers.
        shape: arguments of its configuration.
        exact: whether all tokens must be equal.
        flags: of both servers.
    """

    kind: str
    dtype: str
    shape: dict[str, Any]
    exact: bool
    flags: tuple[str, ...] = ()


_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GQA = {**_COMMON, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
_MLA = {
    **_COMMON,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 6,
}
_TRITON = ("--attention-backend", "TRITON_ATTN")
_TRITON_MLA = ("--attention-backend", "TRITON_MLA")
MODELS = {
    "gqa-float32": Model("Qwen3", "float32", _GQA, exact=True, flags=_TRITON),
    "gqa-bfloat16": Model("Qwen3", "bfloat16", _GQA, exact=False),
    "mla-bfloat16": Model("DeepseekV2", "bfloat16", _MLA, exact=False, flags=_TRITON_MLA),
}


def write_model(parent: Path, name: str) -> Path:
    """Write a model of MODELS with weights from a fixed seed."""
    import torch
    import transformers

    model = MODELS[name]
    folder = parent / name
    config = getattr(transformers, f"{model.kind}Config")(**model.shape)
    torch.manual_seed(0)
    weights = getattr(transformers, f"{model.kind}ForCausalLM")(config)
    weights.to(getattr(torch, model.dtype)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def make_spec(name: str, folder: Path, logs: Path) -> PairSpec:
    """P on GPU 0, D on GPUs 0 and 1; GPU 0's memory is split."""
    model = MODELS[name]
    servers = [
        ServerSpec(
            role, role[0], gpu, port, side_channel_port, config, ("--tensor-parallel-size", size)
        )
        for role, gpu, size, port, side_channel_port, config in zip(
            ("prefill", "decode"),
            ("0", "0,1"),
            ("1", "2"),
            PORTS,
            SIDE_CHANNEL_PORTS,
            SERVERS["kvcourier"],
            strict=True,
        )
    ]
    return PairSpec(
        model_folder=folder,
        max_model_len=MAX_MODEL_LEN,
        servers=(servers[0], servers[1]),
        log_folder=logs,
        log_name=f"tp-{name}",
        start_timeout_s=240.0,
        flags=(
            *("--load-format", "auto", "--dtype", model.dtype, "--enforce-eager"),
            *("--gpu-memory-utilization", "0.35"),
            # Prompts of the longest length go over in several chunks.
            *("--max-num-batched-tokens", "2048"),
            *model.flags,
        ),
    )


def ask(port: int, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """One completion, not streamed; raises OSError if it is refused."""
    body = {"model": MODEL_NAME, "prompt": list(prompt), "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://{HOST}:{port}{PATH}",
        json.dumps(body | fields).encode(),
        {"Content-Type": "application/json", "X-Request-Id": uuid.uuid4().hex},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def generate(prompt: Sequence[int], way: str) -> list[str]:
    """D's tokens for a prompt whose KV came by `way`, or from D itself."""
    named = {"transfer_id": uuid.uuid4().hex}
    hold: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    full = {"max_tokens": OUTPUT_TOKENS}
    match way:
        case "alone":
            answer = ask(PORTS[1], prompt, **full)
        case "pull":
            prefilled = ask(PORTS[0], prompt, max_tokens=1, kv_transfer_params=hold)
            handoff = prefilled["kv_transfer_params"]
            answer = ask(PORTS[1], prompt, kv_transfer_params=handoff, **full)
        case _:
            want = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "p",
                "remote_host": HOST,
                "remote_port": SIDE_CHANNEL_PORTS[0],
                "remote_request_id": uuid.uuid4().hex,
                "tp_size": 1,
            }
            with ThreadPoolExecutor(1) as pool:
                leg = pool.submit(
                    ask, PORTS[0], prompt, max_tokens=1, kv_transfer_params=hold | named
                )
                answer = ask(PORTS[1], prompt, kv_transfer_params=want | named, **full)
                leg.result()
    # In the model folder's tokenizer every id is a word of its own.
    words: list[str] = answer["choices"][0]["text"].split()
    assert len(words) == OUTPUT_TOKENS, answer
    return words


def moved_bytes(port: int) -> float:
    """Bytes that a server has moved by READ or WRITE."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    name = "vllm:nixl_bytes_transferred_sum"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def compare(name: str) -> list[dict[str, Any]]:
    """A row per prompt length and way."""
    rows = []
    words = random.Random(7)
    for length in LENGTHS:
        prompt = words.choices(range(FIRST_TOKEN_ID, VOCAB_SIZE), k=length)
        expected = generate(prompt, "alone")
        for way in ("pull", "push"):
            found = generate(prompt, way)
            pairs = list(zip(expected, found, strict=True))
            wrong = next((i for i, (a, b) in enumerate(pairs) if a != b), OUTPUT_TOKENS)
            row = {
                "model": name,
                "input_tokens": length,
                "way": way,
                "output_tokens": OUTPUT_TOKENS,
                "equal_tokens": wrong,
            }
            say(f"{row}")
            rows.append(row)
    return rows


async def check(name: str, work_folder: Path) -> list[dict[str, Any]]:
    """Start the pair and compare; raises ServerFailed."""
    folder = write_model(work_folder, name)
    say(f"{name}: model written, starting servers")
    async with ServerPair(make_spec(name, folder, work_folder)):
        say(f"{name}: healthy")
        rows = await asyncio.to_thread(compare, name)
        # Statistics reach a server's metrics with one of its next steps.
        await asyncio.to_thread(generate, [FIRST_TOKEN_ID] * 8, "alone")
        moved = {"P": moved_bytes(PORTS[0]), "D": moved_bytes(PORTS[1])}
    return [*rows, {"model": name, "moved_bytes": moved}]


def judge(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong, in sentences."""
    faults = []
    for row in rows:
        exact = MODELS[row["model"]].exact
        if "moved_bytes" in row:
            idle = [side for side, count in row["moved_bytes"].items() if not count]
            faults += [f"{row['model']}: {side} moved nothing" for side in idle]
        elif row["equal_tokens"] < (row["output_tokens"] if exact else 1):
            faults.append(f"wrong tokens: {row}")
    return faults


def say(text: str) -> None:
    """A line of progress, at once."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> int:
    """Run; exit status 0 if all is as it must be, 1 if not."""
    parser = argparse.ArgumentParser(prog="tp_tokens.py", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="of %(default)s")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="FILE")
    parser.add_argument("--work-folder", type=Path, default=Path("/tmp/kvcourier-tp-tokens"))
    given = parser.parse_args()
    names = given.models.split(",")
    if unknown := set(names) - MODELS.keys():
        parser.error(f"--models: expected some of {', '.join(MODELS)}, found {sorted(unknown)}")
    rows: list[dict[str, Any]] = []
    faults = []
    for name in names:
        try:
            found = asyncio.run(check(name, given.work_folder))
        except (ServerFailed, OSError) as error:
            faults.append(f"{name}: {error}")
            continue
        rows += found
        faults += judge(found)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(rows, indent=1) + "\n")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
