"""From text to the objects of the OpenAI API.

Decides the order and content of chunks and bodies. Refuses to know bytes, sockets and engines.

A stream has, per choice: (chat only) a chunk with the role, chunks with text, one chunk with the
finish reason and no text; then one chunk with the usage if asked for. `kv_transfer_params` are on
the last chunk of all, as in vLLM.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType

from kvcourier.engine.server.generation import Delta, Generation
from kvcourier.engine.server.prompts import Prompt
from kvcourier.openai import (
    AssistantMessage,
    ChatChoice,
    CompletionChoice,
    FinishReason,
    GenerationResponse,
    PromptTokensDetails,
    Usage,
)

Body = GenerationResponse[CompletionChoice] | GenerationResponse[ChatChoice]


@dataclass(slots=True)
class _Whole:
    """One answer as collected so far."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Renderer:
    """Shows one generation, either by `body` or by `chunks` and `closing`."""

    def __init__(self, generation: Generation, model: str) -> None:
        self._generation = generation
        self._job = generation.job
        self._model = model
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._wholes = [_Whole() for _ in self._job.parts]

    def collect(self, delta: Delta) -> None:
        """Take one delta of an answer that is shown whole."""
        whole = self._wholes[delta.index]
        whole.pieces.append(delta.text)
        whole.token_ids += delta.token_ids
        whole.finish_reason = delta.finish_reason

    def body(self) -> Body:
        """All answers, once all deltas are collected."""
        choices = [
            self._whole_choice(index, whole, self._job.parts[index].prompt)
            for index, whole in enumerate(self._wholes)
        ]
        body = self._envelope(choices, usage=self._usage())
        if self._job.is_chat:
            body.prompt_token_ids = self._ids(self._job.parts[0].prompt)
        self._add_kv_transfer_params(body)
        return body

    def chunks(self, delta: Delta) -> Iterator[Body]:
        """The chunks that show one delta."""
        index = delta.index
        if self._job.is_chat and index not in self._begun:
            self._begun.add(index)
            opening = self._chunk(index, AssistantMessage("assistant", ""))
            opening.prompt_token_ids = self._ids(self._job.parts[index].prompt)
            yield opening
        if delta.text or (self._job.return_token_ids and delta.token_ids):
            yield self._chunk(index, delta.text, token_ids=delta.token_ids)
        if delta.finish_reason is not None:
            last = self._chunk(index, None, finish_reason=delta.finish_reason)
            if not self._job.include_usage:
                self._add_kv_transfer_params(last)
            yield last

    def closing(self) -> Iterator[Body]:
        """The chunks that come when all answers are complete."""
        if self._job.include_usage:
            usage = self._envelope([], usage=self._usage(), is_chunk=True)
            self._add_kv_transfer_params(usage)
            yield usage

    def _whole_choice(self, index: int, whole: _Whole, prompt: Prompt) -> Any:
        text = "".join(whole.pieces)
        if self._job.is_chat:
            return ChatChoice(
                index=index,
                message=AssistantMessage("assistant", text),
                finish_reason=whole.finish_reason,
                token_ids=self._ids(whole.token_ids),
            )
        return CompletionChoice(
            index=index,
            text=text,
            finish_reason=whole.finish_reason,
            token_ids=self._ids(whole.token_ids),
            prompt_token_ids=self._ids(prompt),
        )

    def _chunk(
        self,
        index: int,
        content: AssistantMessage | str | None,
        *,
        token_ids: tuple[int, ...] = (),
        finish_reason: FinishReason | None = None,
    ) -> Body:
        choice: Any
        if self._job.is_chat:
            if not isinstance(content, AssistantMessage):
                content = AssistantMessage(content=UNSET if content is None else content)
            choice = ChatChoice(
                index=index,
                delta=content,
                finish_reason=finish_reason,
                token_ids=self._ids(token_ids),
            )
        else:
            choice = CompletionChoice(
                index=index,
                text=content if isinstance(content, str) else "",
                finish_reason=finish_reason,
                token_ids=self._ids(token_ids),
            )
            if index not in self._begun:
                self._begun.add(index)
                choice.prompt_token_ids = self._ids(self._job.parts[index].prompt)
        usage = None if self._job.include_usage else UNSET
        return self._envelope([choice], usage=usage, is_chunk=True)

    def _envelope(
        self, choices: list[Any], *, usage: Usage | UnsetType | None, is_chunk: bool = False
    ) -> Body:
        kind = "text_completion"
        if self._job.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return GenerationResponse(
            id=self._job.response_id,
            object=kind,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )

    def _add_kv_transfer_params(self, body: Body) -> None:
        if self._generation.kv_transfer_params is not None:
            body.kv_transfer_params = self._generation.kv_transfer_params

    def _ids(self, token_ids: tuple[int, ...] | list[int]) -> list[int] | UnsetType:
        return list(token_ids) if self._job.return_token_ids else UNSET

    def _usage(self) -> Usage:
        prompt, completion = self._generation.prompt_tokens, self._generation.completion_tokens
        details = PromptTokensDetails(self._generation.cached_tokens)
        return Usage(prompt, completion, prompt + completion, details)
