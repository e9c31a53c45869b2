"""A job while it runs on the engine.

Decides how events of the engine's thread become text on the event loop, when an answer is
complete, and that whatever is not complete gets aborted. Refuses to know HTTP and JSON.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvcourier.core.params import HoldIntent
from kvcourier.engine.api import (
    FinishReason,
    GenerationRequest,
    ModelInfo,
    RequestRejected,
    TokenEvent,
)
from kvcourier.engine.server.errors import ApiError
from kvcourier.engine.server.job import Job
from kvcourier.engine.server.metrics import AnswerTimer, ServerMetrics
from kvcourier.engine.text import Decode, TextStream
from kvcourier.errors import KVCourierError, ParamsError, clip
from kvcourier.ids import RequestId, TransferId
from kvcourier.openai import FinishReason as ShownFinishReason
from kvcourier.runtime.diary import Diary

_SHOWN: dict[FinishReason, ShownFinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


class ServedEngine(Protocol):
    """The engine as the server uses it. All calls are quick and thread-safe."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def error(self) -> str | None:
        """Why it does not serve requests; None while it does."""

    def submit(self, request: GenerationRequest) -> None: ...

    def abort(self, request_id: RequestId) -> None: ...

    def stats(self) -> Mapping[str, float]: ...

    def progress(self, transfer_id: TransferId) -> tuple[int, int] | None:
        """Prompt tokens computed for a transfer, and all; None if none is being computed."""


class ClientGone(KVCourierError):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of `choices[index]`; `finish_reason` is None while it goes on."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: ShownFinishReason | None


class _Answer:
    """Bookkeeping of one part of a job."""

    def __init__(self, text: TextStream, timer: AnswerTimer) -> None:
        self.text = text
        self.timer = timer
        self.is_open = False
        self.num_tokens = 0
        self.num_cached_tokens = 0


class Generation:
    """Runs one job. Made and used on the event loop; `close` it in any case."""

    def __init__(
        self,
        job: Job,
        engine: ServedEngine,
        decode: Decode,
        metrics: ServerMetrics,
        arrival_s: float,
        diary: Diary,
    ) -> None:
        self.job = job
        self.kv_transfer_params: dict[str, Any] | None = None
        self._engine = engine
        self._diary = diary
        self._queue: asyncio.Queue[tuple[int, TokenEvent] | None] = asyncio.Queue()
        self._failure: KVCourierError | None = None
        # Whoever keeps KV for somebody else must reach its end, which carries the KV's address;
        # a stop string is the business of the instance that shows the text.
        stops = () if isinstance(job.intent, HoldIntent) else job.stops
        self._answers = [
            _Answer(
                TextStream(decode, stops, part.sampling.min_tokens),
                AnswerTimer(metrics, arrival_s),
            )
            for part in job.parts
        ]

    def start(self) -> None:
        """Hand all parts to the engine, or none.

        Raises:
            ApiError: 400, the engine refuses a part; 503, it has stopped.
        """
        loop = asyncio.get_running_loop()
        for index, part in enumerate(self.job.parts):

            def on_event(event: TokenEvent, index: int = index) -> None:
                # The loop may have ended together with the server; the event is of no use then.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))

            request = GenerationRequest(
                part.request_id,
                part.prompt,
                part.sampling,
                on_event,
                self.job.intent,
                functools.partial(self._note, index, "scheduled"),
            )
            if self.job.intent is not None and self.job.intent.transfer_id is not None:
                self._diary.alias(self.job.intent.transfer_id, part.request_id)
            self._note(index, "queued", prompt_tokens=len(part.prompt))
            try:
                self._engine.submit(request)
            except RequestRejected as error:
                self._note(index, "refused", reason=clip(str(error)))
                self.close()
                raise ApiError(400, str(error)) from error
            except ParamsError as error:
                self.close()
                param = f"kv_transfer_params.{error.field}"
                raise ApiError(400, str(error), param=param) from error
            except KVCourierError as error:
                self.close()
                raise ApiError(503, str(error), code="engine_dead") from error
            self._answers[index].is_open = True

    async def deltas(self) -> AsyncIterator[Delta]:
        """What the engine generates, until all answers are complete.

        Raises:
            ApiError: the engine failed at a part; the caller must still `close`.
            ClientGone: see `fail`.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if not any(answer.is_open for answer in self._answers):
                return
            item = await self._queue.get()
            # A part that we ended early may have had events under way.
            if item is not None and self._answers[item[0]].is_open:
                yield self._take(*item)

    def fail(self, reason: KVCourierError) -> None:
        """Abort, and make `deltas` raise `reason` at once. On the event loop only."""
        self.close()
        self._failure = self._failure or reason
        self._queue.put_nowait(None)

    def close(self) -> None:
        """Abort every part that is not complete; idempotent."""
        for index, answer in enumerate(self._answers):
            if answer.is_open:
                self._abort(index)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(part.prompt) for part in self.job.parts[:: self.job.choices_per_prompt])

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return sum(
            answer.num_cached_tokens for answer in self._answers[:: self.job.choices_per_prompt]
        )

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(answer.num_tokens for answer in self._answers)

    def _abort(self, index: int) -> None:
        self._answers[index].is_open = False
        self._note(index, "ended_early", tokens=self._answers[index].num_tokens)
        self._engine.abort(self.job.parts[index].request_id)

    def _note(self, index: int, what: str, **details: Any) -> None:
        self._diary.note(self.job.parts[index].request_id, what, **details)

    def _take(self, index: int, event: TokenEvent) -> Delta:
        answer = self._answers[index]
        if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            answer.is_open = False
            self._note(index, "failed", reason=clip(event.error or event.finish_reason))
            raise self._engine_failure(answer, event)
        answer.num_cached_tokens = max(answer.num_cached_tokens, event.num_cached_tokens)
        self.kv_transfer_params = event.kv_transfer_params or self.kv_transfer_params
        text, token_ids = self._read_tokens(index, event)
        if token_ids:
            if answer.num_tokens == 0:
                self._note(index, "first_token")
            answer.num_tokens += len(token_ids)
            answer.timer.observe_tokens(len(token_ids))
        shown = None if event.finish_reason is None else _SHOWN[event.finish_reason]
        if shown is not None:
            answer.is_open = False
            text += answer.text.finish()
        if answer.text.stopped:
            shown = "stop"
            if answer.is_open:
                self._abort(index)
        if shown is not None:
            answer.timer.observe_end(shown)
            self._note(index, "answered", reason=shown, tokens=answer.num_tokens)
        return Delta(index, text, token_ids, shown)

    def _read_tokens(self, index: int, event: TokenEvent) -> tuple[str, tuple[int, ...]]:
        """The event's text and tokens, both up to a stop string."""
        answer = self._answers[index]
        sampling = self.job.parts[index].sampling
        end_ids = self._engine.info.eos_token_ids | sampling.stop_token_ids
        pieces = []
        last = len(event.token_ids) - 1
        for position, token_id in enumerate(event.token_ids):
            if (
                position == last
                and event.finish_reason is FinishReason.STOP
                and token_id in end_ids
            ):
                break  # the token that ended the answer counts, but has no text
            pieces.append(answer.text.push(token_id))
            if answer.text.stopped:
                return "".join(pieces), event.token_ids[: position + 1]
        return "".join(pieces), event.token_ids

    def _engine_failure(self, answer: _Answer, event: TokenEvent) -> ApiError:
        if event.finish_reason is FinishReason.ABORT:
            reason = event.error or "the engine aborted the request"
            return ApiError(503, reason, code="aborted")
        reason = event.error or "the engine failed at the request"
        # What fails before the first token of a request that waits for KV is the transfer.
        # Another dispatch can succeed, so tell the router to retry.
        wants_kv = self.job.intent is not None and not isinstance(self.job.intent, HoldIntent)
        if wants_kv and answer.num_tokens == 0:
            return ApiError(503, reason, code="kv_transfer_failed")
        return ApiError(500, reason)


class ActiveGenerations:
    """The generations of one server, so that they can be ended together."""

    def __init__(self) -> None:
        self.is_draining = False
        """Whether nothing new is taken while what runs goes on; may be set and unset."""
        self._all: set[Generation] = set()
        self._is_stopping = False

    def __len__(self) -> int:
        return len(self._all)

    @contextlib.contextmanager
    def running(self, generation: Generation) -> Iterator[None]:
        """Keep track of `generation`, and close it at the end.

        Raises:
            ApiError: 503, the server is stopping.
        """
        if self._is_stopping:
            raise _shutting_down()
        self._all.add(generation)
        try:
            yield
        finally:
            self._all.discard(generation)
            generation.close()

    def require_open(self) -> None:
        """Refuse what comes while drained.

        Raises:
            ApiError: 503, and another instance may well take it.
        """
        if self.is_draining:
            message = "the instance is being drained and takes no new requests"
            raise ApiError(503, message, code="draining")

    def fail_all(self, reason: ApiError) -> None:
        """End what runs with `reason`. On the event loop only."""
        for generation in tuple(self._all):
            generation.fail(reason)

    def stop(self) -> None:
        """The server is stopping: end what runs, refuse what comes. On the event loop only."""
        self._is_stopping = True
        self.fail_all(_shutting_down())


def _shutting_down() -> ApiError:
    return ApiError(503, "the instance is shutting down", code="shutting_down")
