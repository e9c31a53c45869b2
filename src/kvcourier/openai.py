"""The part of the OpenAI HTTP API that we speak, as types.

Decides names, types and nullability of the fields on the wire. Refuses to know which values make
sense and how text is generated. Fields beyond OpenAI's are vLLM's, with vLLM's meanings:
`ignore_eos`, `top_k`, `min_tokens`, `stop_token_ids`, `add_special_tokens`, `return_token_ids`
(with `token_ids` and `prompt_token_ids` in answers) and `kv_transfer_params`.
"""

from typing import Any, Generic, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length"]


class StreamOptions(Struct):
    """`stream_options` of a request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(Struct, kw_only=True):
    """What both kinds of request have. A field that is absent or null takes its default."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: Any = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions. `prompt`: a string, token ids, or a list of either."""

    prompt: Any


class ChatMessage(Struct, omit_defaults=True):
    """One message of a conversation; `content` is text or a list of parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]


class PromptTokensDetails(Struct):
    """`cached_tokens`: prompt tokens whose KV was already in the cache."""

    cached_tokens: int = 0


class Usage(Struct):
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(Struct):
    """One text of /v1/completions, or what is new of it in a stream."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class AssistantMessage(Struct):
    """The answer of the model; in a stream (`delta`) either field may be absent."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One answer of /v1/chat/completions: `message` in a body, `delta` in a stream."""

    index: int
    message: AssistantMessage | UnsetType = UNSET
    delta: AssistantMessage | UnsetType = UNSET
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


ChoiceT = TypeVar("ChoiceT", CompletionChoice, ChatChoice)


class GenerationResponse(Struct, Generic[ChoiceT], kw_only=True):
    """A whole body, or one chunk of a stream.

    `object`: text_completion for both of completions; chat.completion, chat.completion.chunk.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class ModelCard(Struct, kw_only=True):
    """One entry of GET /v1/models. `max_model_len` is vLLM's addition."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvcourier"
    root: str
    max_model_len: int


class ModelList(Struct):
    """Body of GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class ErrorDetail(Struct):
    """What went wrong; `param` names the offending field of the request."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct):
    """Body of every answer with a status of 400 or more, and the error event of a stream."""

    error: ErrorDetail
