"""From the fields of a body to sampling parameters and stop strings.

Decides defaults and allowed ranges. Refuses to know prompts beyond their length.

Defaults are vLLM's: temperature 1, top_p 1, no top_k; max_tokens 16 for completions, and what is
left of the context for chat.
"""

import dataclasses
from collections.abc import Iterator

from kvcourier.engine.api import ModelInfo, SamplingParams
from kvcourier.engine.server.errors import bad_field
from kvcourier.openai import CompletionRequest, GenerationFields

DEFAULT_COMPLETION_TOKENS = 16
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
_SEEDS = range(-(2**63), 2**63)


def sampling_of(request: GenerationFields, prompt_tokens: int, info: ModelInfo) -> SamplingParams:
    """The sampling parameters for a prompt of `prompt_tokens` tokens.

    Raises:
        ApiError: 400, naming the field.
    """
    max_tokens = _max_tokens(request, prompt_tokens, info)
    temperature = 1.0 if request.temperature is None else request.temperature
    if not 0 <= temperature <= 1e6:
        raise bad_field("temperature", f"expected a number of 0 or more, found {temperature:g}")
    top_p = 1.0 if request.top_p is None else request.top_p
    if not 0 < top_p <= 1:
        raise bad_field("top_p", f"expected a number above 0 and at most 1, found {top_p:g}")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        # vLLM takes both -1 and 0 for "all tokens".
        top_k=max(0, _whole("top_k", request.top_k, range(-1, 2**31), 0)),
        seed=None if request.seed is None else _whole("seed", request.seed, _SEEDS, 0),
        stop_token_ids=_stop_token_ids(request, info),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=_whole("min_tokens", request.min_tokens, range(max_tokens + 1), 0),
    )


def num_choices(request: GenerationFields) -> int:
    """How many answers are wanted per prompt. Raises ApiError (400) if out of range."""
    return _whole("n", request.n, range(1, MAX_CHOICES + 1), 1)


def spread_seeds(sampling: SamplingParams, num: int) -> Iterator[SamplingParams]:
    """The parameters of `num` independent answers; a given seed is different for each."""
    for index in range(num):
        if sampling.seed is None:
            yield sampling
        else:
            seed = (sampling.seed - _SEEDS.start + index) % 2**64 + _SEEDS.start
            yield dataclasses.replace(sampling, seed=seed)


def stop_strings(request: GenerationFields) -> tuple[str, ...]:
    """The stop strings. Raises ApiError (400) if there are too many, or one is empty."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOP_STRINGS:
        raise bad_field("stop", f"at most {MAX_STOP_STRINGS} strings, found {len(stops)}")
    if "" in stops:
        raise bad_field("stop", "a stop string must not be empty")
    return tuple(stops)


def _max_tokens(request: GenerationFields, prompt_tokens: int, info: ModelInfo) -> int:
    room = info.max_model_len - prompt_tokens
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked = getattr(request, name)
    if asked is None:
        is_completion = isinstance(request, CompletionRequest)
        return min(room, DEFAULT_COMPLETION_TOKENS) if is_completion else room
    if asked < 1:
        raise bad_field(name, f"expected a whole number of 1 or more, found {_short(asked)}")
    if asked > room:
        raise bad_field(
            name,
            f"{prompt_tokens} tokens of prompt and {_short(asked)} to generate do not fit the "
            f"context of {info.max_model_len} tokens",
        )
    return int(asked)


def _stop_token_ids(request: GenerationFields, info: ModelInfo) -> frozenset[int]:
    ids = request.stop_token_ids or []
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise bad_field("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, found {len(ids)}")
    for token_id in ids:
        _whole("stop_token_ids", token_id, range(info.vocab_size), 0)
    return frozenset(ids)


def _whole(name: str, value: int | None, allowed: range, default: int) -> int:
    if value is None:
        return default
    if value not in allowed:
        raise bad_field(
            name,
            f"expected a whole number from {allowed.start} to {allowed.stop - 1}, found "
            f"{_short(value)}",
        )
    return value


def _short(value: int) -> str:
    # Python refuses to print integers of thousands of digits, which JSON may carry.
    return str(value) if abs(value) < 10**20 else "a number of more than 20 digits"
