"""A short prompt through P and D, as a client sends it, beside the same prompt to P alone.

Decides the prompt, what is compared and what is looked at before and after. Refuses to judge.
"""

import random
import string
import time
from collections.abc import Iterable, Sequence
from typing import Any

from kvcourier.config import TransferMode
from kvcourier.doctor.exposition import read_metrics
from kvcourier.doctor.facts import AnswerFacts, Engine, InstanceFacts, Metrics
from kvcourier.doctor.pages import NotAnswered, Pages, Reply

_VERSE = 12
_ANSWER_TOKENS = 8
_METRICS_PATIENCE_S = 3.0
_PAUSE_S = 0.1


def make_prompt(block_size: int) -> str:
    """Digits in an order that no prefix cache knows, for more than one block in any tokenizer: each
    is a token at least, and with its blank rarely more than two.

    The same few again and again, so that any real model is sure of the next: where it is not, two
    kernels that round differently may choose differently, and nothing would be wrong.
    """
    verse = random.choices(string.digits, k=_VERSE)
    count = block_size + 3 * _VERSE
    return " ".join((verse * (count // _VERSE + 1))[:count])


def hold_body(model: str, prompt: str, transfer_id: str) -> dict[str, Any]:
    """A request to compute this prompt and hold its KV for somebody."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        },
    }


def handoff_of(reply: Reply) -> dict[str, Any] | None:
    """The kv_transfer_params of an answer; None if there are none."""
    answer = reply.json()
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    return params if isinstance(params, dict) else None


def try_pair(
    url: str,
    mode: TransferMode,
    pair: tuple[InstanceFacts, InstanceFacts],
    pages: Pages,
    timeout_s: float,
) -> AnswerFacts:
    """Send one prompt through a router to this pair; blocks.

    Args:
        url: of a router that has this pair, and no other or any.
        pair: P and D, which have told of themselves.
        timeout_s: for one answer.
    """
    prefill, decode = pair
    model = next(name for name in prefill.models if name in decode.models)
    prompt = make_prompt(max(map(block_size, pair)))
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    facts = AnswerFacts(mode, prefill.name, decode.name, url)
    try:
        alone = pages.post(f"{prefill.url}/v1/completions", body, timeout_s=timeout_s)
        if alone.status != 200:
            return facts.with_(problem=f"P alone answered {alone.status}: {alone.message()}")
        before = [_metrics(one, pages) for one in pair]
        headers = {"x-kv-mode": mode.value}
        through = pages.post(f"{url}/v1/completions", body, headers, timeout_s)
        if through.status != 200:
            return facts.with_(problem=f"answered {through.status}: {through.message()}")
        moved, failures = _changes(pair, before, pages)
    except NotAnswered as error:
        return facts.with_(problem=str(error))
    return facts.with_(
        expected=_text(alone), found=_text(through), num_bytes=moved, failures=failures
    )


def block_size(one: InstanceFacts) -> int:
    """Tokens of its largest block; 16 where that is not known."""
    if one.offer is None:
        return 16
    return max(
        geometry.block_size for groups in one.offer.geometries.values() for geometry in groups
    )


def _changes(
    pair: Sequence[InstanceFacts], before: Sequence[Metrics], pages: Pages
) -> tuple[float | None, tuple[str, ...]]:
    """(bytes that moved, what failed) since a look at both, once both have counted it.

    vLLM carries a connector's figures to its page with a later step only, so none is no news there.
    """
    deadline = time.monotonic() + _METRICS_PATIENCE_S
    while True:
        after = [_metrics(one, pages) for one in pair]
        pairs = list(zip(before, after, strict=True))
        moved = sum(now.num_bytes - then.num_bytes for then, now in pairs)
        if moved > 0 or time.monotonic() > deadline:
            break
        time.sleep(_PAUSE_S)
    failures = sorted(
        {
            what
            for then, now in pairs
            for what, count in now.troubles.items()
            if count > then.troubles.get(what, 0.0)
        }
    )
    late = any(one.engine is not Engine.EMBEDDED for one in pair)
    return (None if late and not moved else moved), tuple(failures)


def _metrics(one: InstanceFacts, pages: Pages) -> Metrics:
    reply = pages.get(f"{one.url}/metrics")
    return (
        read_metrics(reply.content.decode(errors="replace")) if reply.status == 200 else Metrics()
    )


def _text(reply: Reply) -> str:
    body = reply.json()
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return ""
    return str(choices[0].get("text", ""))


def modes_of(instances: Iterable[InstanceFacts]) -> list[TransferMode]:
    """The modes in which all of them take part; pull first, as it asks less of them."""
    told = [one.offer.modes for one in instances if one.offer is not None]
    return sorted(frozenset(TransferMode).intersection(*told)) if told else []
