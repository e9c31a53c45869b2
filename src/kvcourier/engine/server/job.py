"""One HTTP request, checked, as the work it asks of the engine.

Decides names of requests, how many sub-requests there are, and which combinations are refused.
Refuses to know the engine's events and the shape of answers.

The engine's name of a sub-request is `cmpl-<X-Request-Id>-<index>-<8 hex>` for completions and
`chatcmpl-<X-Request-Id>-<8 hex>` for chat, as in vLLM. A router gives P and D the same
X-Request-Id, and a retry carries it again: the random end keeps the names of two engines, or of
two attempts on one engine, apart. Peers strip it when no transfer id tells what belongs together.
The `id` of the answer is `cmpl-<X-Request-Id>` or `chatcmpl-<X-Request-Id>`.
"""

import secrets
import uuid
from dataclasses import dataclass

from kvcourier.config import Limits
from kvcourier.core.params import Intent, parse_params
from kvcourier.engine.api import ModelInfo, SamplingParams
from kvcourier.engine.server.errors import ApiError, bad_field
from kvcourier.engine.server.prompts import Prompt, PromptReader
from kvcourier.engine.server.sampling import (
    num_choices,
    sampling_of,
    spread_seeds,
    stop_strings,
)
from kvcourier.errors import ParamsError
from kvcourier.ids import RequestId, fetched_as
from kvcourier.openai import ChatCompletionRequest, CompletionRequest

_NAME_OVERHEAD = len("chatcmpl-") + len("-255") + len(fetched_as(RequestId("-01234567")))


@dataclass(frozen=True, slots=True)
class Part:
    """One sub-request: one answer to one prompt."""

    request_id: RequestId
    prompt: Prompt
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """All of one HTTP request. `parts[i]` becomes `choices[i]`: all answers to the first prompt
    first."""

    response_id: str
    parts: tuple[Part, ...]
    choices_per_prompt: int
    stops: tuple[str, ...]
    intent: Intent | None
    is_chat: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool


class JobReader:
    """Checks requests against the model and the limits."""

    def __init__(
        self, prompts: PromptReader, info: ModelInfo, served_model_name: str, limits: Limits
    ) -> None:
        self._prompts = prompts
        self._info = info
        self._served_model_name = served_model_name
        self._limits = limits

    async def read(
        self, request: CompletionRequest | ChatCompletionRequest, x_request_id: str | None
    ) -> Job:
        """What the request asks for.

        Raises:
            ApiError: 400 or 404, naming the field where it is one field's fault.
        """
        if request.model is not None and request.model != self._served_model_name:
            raise ApiError(
                404,
                f"model {request.model[:200]!r} is not served here; {self._served_model_name!r} is",
                param="model",
                code="model_not_found",
            )
        name = self._check_name(x_request_id)
        intent = self._read_intent(request.kv_transfer_params)
        stops = stop_strings(request)
        include_usage = _read_stream_options(request)
        choices = num_choices(request)
        is_chat = isinstance(request, ChatCompletionRequest)
        if isinstance(request, ChatCompletionRequest):
            prompts = [await self._prompts.of_chat(request)]
        else:
            prompts = await self._prompts.of_completion(request)
        num_parts = len(prompts) * choices
        if num_parts > self._limits.max_parts:
            raise bad_field(
                "n",
                f"at most {self._limits.max_parts} answers in one request, found {num_parts}",
            )
        if intent is not None and num_parts > 1:
            raise bad_field(
                "kv_transfer_params",
                f"they describe the KV of one prompt, but this request asks for {len(prompts)} "
                f"prompt(s) with {choices} answer(s) each; send one request per answer",
            )
        stem = f"chatcmpl-{name}" if is_chat else f"cmpl-{name}"
        parts: list[Part] = []
        for prompt in prompts:
            sampling = sampling_of(request, len(prompt), self._info)
            for own_sampling in spread_seeds(sampling, choices):
                middle = "" if is_chat else f"-{len(parts)}"
                request_id = RequestId(f"{stem}{middle}-{secrets.token_hex(4)}")
                parts.append(Part(request_id, prompt, own_sampling))
        return Job(
            response_id=stem,
            parts=tuple(parts),
            choices_per_prompt=choices,
            stops=stops,
            intent=intent,
            is_chat=is_chat,
            stream=bool(request.stream),
            include_usage=include_usage,
            return_token_ids=bool(request.return_token_ids),
        )

    def _check_name(self, x_request_id: str | None) -> str:
        if x_request_id is None:
            return uuid.uuid4().hex
        # The whole name goes to peers, which hold it to max_id_bytes.
        longest = self._limits.max_id_bytes - _NAME_OVERHEAD
        if (
            not 0 < len(x_request_id) <= longest
            or not x_request_id.isascii()
            or not x_request_id.isprintable()
        ):
            raise ApiError(
                400,
                f"X-Request-Id: expected 1 to {longest} printable ASCII characters",
                param="X-Request-Id",
            )
        return x_request_id

    def _read_intent(self, params: object) -> Intent | None:
        try:
            return parse_params(params, self._limits)
        except ParamsError as error:
            raise ApiError(400, str(error), param=f"kv_transfer_params.{error.field}") from error


def _read_stream_options(request: CompletionRequest | ChatCompletionRequest) -> bool:
    options = request.stream_options
    if options is None:
        return False
    if not request.stream:
        raise bad_field("stream_options", "only allowed with stream: true")
    if options.continuous_usage_stats:
        raise bad_field("stream_options.continuous_usage_stats", "not supported; leave it out")
    return bool(options.include_usage)
