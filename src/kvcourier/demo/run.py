"""The demo from start to end.

Decides which processes run when, and in which order the prompts are asked. Refuses to know how KV
is moved: it speaks HTTP to the instances and the router, as any client would.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from kvcourier.config import TransferMode
from kvcourier.demo.client import Answer, RequestFailed, complete
from kvcourier.demo.processes import Child, Children
from kvcourier.demo.prompts import PROMPTS, WARM_UP
from kvcourier.demo.report import ModeResult, Report, Sample
from kvcourier.demo.traffic import StoryMissing, read_traffic

PROGRAM = (sys.executable, "-m", "kvcourier")
"""What the children run, before their own arguments."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""One thread per process: three engines on two cores would only wait for each other, and the order
of additions in a matrix product, so the tokens, must not depend on the number of cores."""
_REQUEST_TIMEOUT_S = 60.0
_WARM_UP_TOKENS = 4
MODE_HEADER = "X-KV-Mode"
TRANSFER_ID_HEADER = "X-KV-Transfer-Id"
_MODES = (TransferMode.PULL, TransferMode.PUSH)


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the demo runs.

    Attributes:
        model: as for `kvcourier serve --model`.
        num_tokens: tokens generated per prompt.
        serve_flags: further flags for all instances.
    """

    model: str
    num_tokens: int
    serve_flags: tuple[str, ...] = ()


def run_demo(settings: DemoSettings, console: Console) -> Report:
    """Start everything, ask every prompt in both modes, compare, stop everything.

    Blocks for a minute or two. The children's logs are kept if it fails, and named.

    Raises:
        ProcessFailed: a child did not start, or died.
        RequestFailed: the single instance, which nothing is compared with, did not answer.
    """
    log_dir = Path(tempfile.mkdtemp(prefix="kvcourier-demo-"))
    keep_logs = True
    try:
        with Children(log_dir) as children:
            report = _Demo(settings, console, children).run()
        keep_logs = not report.succeeded
        return report
    except KeyboardInterrupt:
        console.print()  # ends the line of text that was streaming
        keep_logs = False
        raise
    finally:
        if keep_logs:
            console.print(f"The logs of all processes are in {log_dir}", style="yellow")
        else:
            shutil.rmtree(log_dir, ignore_errors=True)


class _Demo:
    def __init__(self, settings: DemoSettings, console: Console, children: Children) -> None:
        self._settings = settings
        self._console = console
        self._children = children

    def run(self) -> Report:
        self._say("Starting a prefill, a decode and a single instance ...")
        single = self._start_instance("single", "--kv-modes=none")
        prefill = self._start_instance("prefill", "--role=prefill")
        decode = self._start_instance("decode", "--role=decode")
        with httpx.Client(timeout=_REQUEST_TIMEOUT_S, trust_env=False) as client:
            single_url = self._children.wait_ready(single)
            self._say(f"What the single instance generates for {len(PROMPTS)} prompts ...")
            expected: list[Answer] = []
            for prompt in PROMPTS:
                expected.append(self._ask(client, single_url, prompt, self._settings.num_tokens))
                self._children.check()
            self._children.stop(single)

            prefill_url = self._children.wait_ready(prefill)
            decode_url = self._children.wait_ready(decode)
            router_url = self._children.wait_ready(self._start_router(prefill_url, decode_url))
            self._say("The same prompts through the router, by pull and by push ...")
            results = {mode: ModeResult() for mode in _MODES}
            for mode in _MODES:
                self._warm_up(client, router_url, mode, results[mode])
            for index, reference in enumerate(expected):
                # Taking turns at being first: neither mode always meets the colder machine.
                for mode in _MODES if index % 2 == 0 else reversed(_MODES):
                    self._show_prompt(mode, index)
                    self._compare(
                        client,
                        (router_url, prefill_url, decode_url),
                        mode,
                        index,
                        reference,
                        results[mode],
                    )
                    self._children.check()
        return Report({mode.value: results[mode] for mode in _MODES})

    def _compare(
        self,
        client: httpx.Client,
        urls: tuple[str, str, str],
        mode: TransferMode,
        index: int,
        reference: Answer,
        result: ModeResult,
    ) -> None:
        """Ask one prompt in one mode and add what was seen to `result`."""
        router_url, prefill_url, decode_url = urls
        try:
            answer = self._ask(
                client, router_url, PROMPTS[index], self._settings.num_tokens, mode, self._show
            )
            transfer_id = answer.headers.get(TRANSFER_ID_HEADER, "")
            traffic = read_traffic(client, prefill_url, decode_url, transfer_id)
        except (RequestFailed, StoryMissing) as error:
            self._console.print(f" {error}", style="red", markup=False, highlight=False)
            result.failures.append(f"prompt {index + 1}: {error}")
            return
        result.samples.append(
            Sample(
                ttft_s=answer.ttft_s,
                after_prefill_s=answer.first_token_unix_s - traffic.prefill_finished_unix_s,
                tpot_s=answer.tpot_s,
                num_bytes=traffic.num_bytes,
                num_pieces=traffic.num_pieces,
            )
        )
        difference = first_difference(reference.token_ids, answer.token_ids)
        if difference is None:
            self._console.print(" = single instance", style="green")
        else:
            result.mismatches.append(f"prompt {index + 1}: {difference}")
            self._console.print(f" {difference}", style="red", highlight=False)

    def _warm_up(
        self, client: httpx.Client, router_url: str, mode: TransferMode, result: ModeResult
    ) -> None:
        try:
            self._ask(client, router_url, WARM_UP, _WARM_UP_TOKENS, mode)
        except RequestFailed as error:
            self._children.check()
            result.failures.append(f"warm-up: {error}")

    def _ask(
        self,
        client: httpx.Client,
        url: str,
        prompt: str,
        num_tokens: int,
        mode: TransferMode | None = None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Answer:
        body = {
            "model": self._settings.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {MODE_HEADER: mode.value} if mode else {}
        answer = complete(client, url, body, headers=headers, on_text=on_text)
        if len(answer.token_ids) != num_tokens:
            raise RequestFailed(f"expected {num_tokens} tokens, found {len(answer.token_ids)}")
        return answer

    def _show(self, text: str) -> None:
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def _start_instance(self, name: str, part: str) -> Child:
        # Without prefix caching both modes compute and move every prompt whole, so that the same
        # prompts can be compared; lost KV is an error, or D would hide it by computing again.
        flags = (
            part,
            f"--engine-id={name}",
            f"--model={self._settings.model}",
            "--port=0",
            "--side-channel-port=0",
            "--kv-cache-gb=0.25",
            "--no-prefix-caching",
            "--kv-load-failure-policy=fail",
        )
        return self._start(name, ["serve", *flags, *self._settings.serve_flags], ENVIRONMENT)

    def _start_router(self, prefill_url: str, decode_url: str) -> Child:
        return self._start(
            "router", ["route", "--prefill", prefill_url, "--decode", decode_url, "--port", "0"]
        )

    def _start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Child:
        return self._children.start(name, [*PROGRAM, *arguments], environment)

    def _say(self, sentence: str) -> None:
        self._console.print(sentence, style="bold")

    def _show_prompt(self, mode: TransferMode, index: int) -> None:
        words = PROMPTS[index].split()
        shown = " ".join(words if len(words) <= 12 else ["...", *words[-10:]])
        self._console.print(
            f"{mode.value} {index + 1}/{len(PROMPTS)}  {shown}", style="dim", markup=False, end=""
        )


def first_difference(expected: Sequence[int], found: Sequence[int]) -> str | None:
    """One sentence on the first position at which two lists of token ids differ, or None."""
    if tuple(expected) == tuple(found):
        return None
    for position, (wanted, got) in enumerate(zip(expected, found, strict=False)):
        if wanted != got:
            return f"token {position}: expected {wanted} as from the single instance, found {got}"
    return f"expected {len(expected)} tokens as from the single instance, found {len(found)}"
