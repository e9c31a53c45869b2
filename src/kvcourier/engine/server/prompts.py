"""From the prompt of a body to token ids.

Decides which forms a prompt may have and how a conversation becomes one text. Refuses to know
sampling and the engine.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import anyio
import anyio.to_thread
from jinja2.exceptions import TemplateError

from kvcourier.engine.api import ModelInfo
from kvcourier.engine.server.errors import ApiError, bad_field
from kvcourier.openai import ChatCompletionRequest, ChatMessage, CompletionRequest

Prompt = tuple[int, ...]


class Tokenizer(Protocol):
    """What we use of a `transformers` tokenizer."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


class PromptReader:
    """Turns prompts into token ids, on a thread of its own: a long text takes a while."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, max_prompts: int) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._max_prompts = max_prompts
        # One at a time: a tokenizer is not promised to be safe for concurrent encoding.
        self._limiter = anyio.CapacityLimiter(1)

    async def of_completion(self, request: CompletionRequest) -> list[Prompt]:
        """The prompts of a /v1/completions body, in order.

        Raises:
            ApiError: 400, a prompt is of no known form, empty, too long, or has an id outside
                the vocabulary.
        """
        special = request.add_special_tokens is not False
        prompts = _split(request.prompt)
        if len(prompts) > self._max_prompts:
            raise bad_field("prompt", f"at most {self._max_prompts} prompts, found {len(prompts)}")
        result = []
        for name, prompt in prompts:
            if isinstance(prompt, str):
                ids = await self._encode(name, prompt, special=special)
            else:
                ids = self._check_ids(name, prompt)
            result.append(self._check_length(name, ids))
        return result

    async def of_chat(self, request: ChatCompletionRequest) -> Prompt:
        """The prompt of a /v1/chat/completions body.

        Raises:
            ApiError: 400, the messages are empty or of no known form, or the chat template
                refuses them.
        """
        if not request.messages:
            raise bad_field("messages", "expected at least one message")
        if not self._tokenizer.chat_template:
            raise ApiError(
                400,
                f"model {self._info.name} has no chat template; use /v1/completions",
                code="no_chat_template",
            )
        conversation = [
            _plain(f"messages[{index}]", message) for index, message in enumerate(request.messages)
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise bad_field("messages", f"the chat template refuses them: {error}") from error
        special = request.add_special_tokens is True
        return self._check_length("messages", await self._encode("messages", text, special=special))

    async def _encode(self, name: str, text: str, *, special: bool) -> Prompt:
        def work() -> Prompt:
            return tuple(self._tokenizer.encode(text, add_special_tokens=special))

        try:
            return await anyio.to_thread.run_sync(
                work, limiter=self._limiter, abandon_on_cancel=True
            )
        except (ValueError, TypeError) as error:
            raise bad_field(name, f"the tokenizer refuses it: {error}") from error

    def _check_ids(self, name: str, ids: Sequence[Any]) -> Prompt:
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < self._info.vocab_size:
                raise bad_field(
                    name,
                    f"expected token ids from 0 to {self._info.vocab_size - 1}, found "
                    f"{str(token_id)[:40]}",
                )
        return tuple(ids)

    def _check_length(self, name: str, ids: Prompt) -> Prompt:
        if not ids:
            raise bad_field(name, "expected at least one token, found an empty prompt")
        if len(ids) >= self._info.max_model_len:
            raise bad_field(
                name,
                f"a prompt of {len(ids)} tokens leaves no room to generate: the context has "
                f"{self._info.max_model_len} tokens",
            )
        return ids


def _split(prompt: Any) -> list[tuple[str, str | list[Any]]]:
    """Every prompt of the `prompt` field with its path."""
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, int) for item in prompt):
            return [("prompt", prompt)]
        if all(isinstance(item, str) for item in prompt) or all(
            isinstance(item, list) for item in prompt
        ):
            return [(f"prompt[{index}]", item) for index, item in enumerate(prompt)]
    raise bad_field(
        "prompt",
        "expected a string, a list of token ids, a list of strings or a list of lists "
        "of token ids, not empty",
    )


def _plain(name: str, message: ChatMessage) -> dict[str, str]:
    """A message as chat templates take it, its text parts joined by line breaks as in vLLM."""
    for field in ("tool_calls", "function_call"):
        if getattr(message, field):
            raise bad_field(f"{name}.{field}", "not supported here; leave it out")
    content = message.content
    if content is None:
        raise bad_field(f"{name}.content", "expected a string or a list of text parts, found null")
    if isinstance(content, list):
        content = "\n".join(
            _text_part(f"{name}.content[{index}]", part) for index, part in enumerate(content)
        )
    plain = {"role": message.role, "content": content}
    return plain if message.name is None else plain | {"name": message.name}


def _text_part(name: str, part: dict[str, Any]) -> str:
    if part.get("type") != "text":
        raise bad_field(
            f"{name}.type", f"only 'text' is supported, found {str(part.get('type'))[:40]!r}"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise bad_field(f"{name}.text", "expected a string")
    return text
