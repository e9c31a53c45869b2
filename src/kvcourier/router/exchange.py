"""One client call, from a checked body to the end of its answer.

Decides which instances serve it, and whether a failed dispatch is followed by another. Refuses to
know how a dispatch goes (`attempt`, `dispatch`).
"""

import asyncio
import logging

from starlette.types import Receive

from kvcourier.config import Binding
from kvcourier.router.answers import send_answer, send_error
from kvcourier.router.attempt import Attempt
from kvcourier.router.client_call import ClientCall
from kvcourier.router.events import STATUS_OF, CallOutcome, LegName, ReplyError
from kvcourier.router.instances import Instance
from kvcourier.router.policy import Skipped, why_alone
from kvcourier.router.services import Services

_log = logging.getLogger(__name__)


class _NoInstance(Exception):
    """Nobody can serve the call."""


class Exchange:
    """Serves one call: one dispatch, and further ones where retries are on."""

    def __init__(self, services: Services, call: ClientCall) -> None:
        self._services = services
        self._call = call

    async def run(self) -> CallOutcome:
        """Answer the client. Cancelling it ends both legs."""
        left = asyncio.create_task(_until_disconnect(self._call.receive))
        try:
            return await self._serve(left)
        finally:
            left.cancel()

    async def _serve(self, left: asyncio.Task[None]) -> CallOutcome:
        services, call = self._services, self._call
        tried: set[Instance] = set()
        decode, is_alone = self._alone()
        try:
            prefill = None if is_alone else await self._pick_prefill(tried)
        except _NoInstance as error:
            await send_error(call.send, 503, str(error), call.answer_headers, code="no_instance")
            return CallOutcome.FAILED
        retries = services.config.retries
        while True:
            attempt = Attempt(services, call, prefill, tried, left, decode)
            decode = None
            outcome = await attempt.run()
            failure = attempt.failure
            if failure is None:
                return outcome
            if failure.retryable and retries > 0:
                retries -= 1
                try:
                    prefill = None if is_alone else await self._pick_prefill(tried)
                except _NoInstance:
                    _log.debug("no other %s instance for %s", failure.leg, call.request_id)
                else:
                    services.metrics.retries.labels(failure.leg).inc()
                    continue
            await self._tell(attempt, failure)
            return outcome

    def _alone(self) -> tuple[Instance | None, bool]:
        """Whether D computes the prompt itself, and who, if one of them has most of it already."""
        below, prompt = self._services.config.skip_below, self._call.prompt
        if not below or self._call.conversation:
            # What a turn's D keeps travels to P with the next one, whoever D is then.
            return None, False
        decode, num_known = self._services.sides[LegName.DECODE].most_known(prompt) or (None, 0)
        why = why_alone(prompt.num_tokens, num_known, below)
        if why is None:
            return None, False
        self._services.metrics.skipped.labels(why).inc()
        return (decode if why is Skipped.CACHED else None), True

    async def _tell(self, attempt: Attempt, failure: ReplyError) -> None:
        send = self._call.send
        if failure.answer is not None:
            answer = failure.answer
            await send_answer(
                send, answer.status, answer.content, attempt.headers, answer.content_type
            )
            return
        who = attempt.pairing.subject(failure.leg, failure.kind)
        message = f"{who[0].upper()}{who[1:]} {failure.reason}."
        status = STATUS_OF[failure.kind]
        await send_error(send, status, message, attempt.headers, code=failure.kind)

    async def _pick_prefill(self, tried: set[Instance]) -> Instance:
        """Who computes the prompt. Early binding needs its coordinates."""
        call, mode = self._call, self._call.mode
        side = self._services.sides[LegName.PREFILL]
        prefill = side.pick(mode, tried, call.prompt, call.conversation)
        if prefill is None:
            raise _NoInstance(f"No prefill instance takes part in {mode}.")
        self._require_decode(tried)
        if call.binding is not Binding.LATE and prefill.coordinates is None:
            await prefill.learn()
            if not prefill.takes_part_in(mode):
                raise _NoInstance(f"The prefill instance {prefill.name} takes no part in {mode}.")
            if prefill.coordinates is None:
                raise _NoInstance(
                    "Binding before P answers, as push has it, needs to know where the prefill "
                    f"instance {prefill.name} keeps its KV cache, but it {prefill.problem}. For "
                    "vLLM, give engine_id, kv_host and kv_port with its address."
                )
        return prefill

    def _require_decode(self, tried: set[Instance]) -> None:
        """No prompt is computed that nobody can go on from."""
        if not self._services.sides[LegName.DECODE].can_serve(self._call.mode, tried):
            raise _NoInstance(f"No decode instance takes part in {self._call.mode}.")


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
