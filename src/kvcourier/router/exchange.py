"""One client call, from a checked body to the end of its answer.

Decides which instances serve it, and whether a failed dispatch is followed by another. Refuses to
know how a dispatch goes (`attempt`, `dispatch`).
"""

import asyncio
import logging

from starlette.types import Receive

from kvcourier.config import Binding
from kvcourier.router.answers import send_error
from kvcourier.router.attempt import Attempt, ClientCall, Pair, Services, answer_headers
from kvcourier.router.events import (
    STATUS_OF,
    CallOutcome,
    LegName,
)
from kvcourier.router.instances import Instance

_log = logging.getLogger(__name__)


class _NoInstance(Exception):
    """No pair of instances can serve the call."""


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
        try:
            pair = await self._pick(tried)
        except _NoInstance as error:
            headers = answer_headers(call, None, None)
            await send_error(call.send, 503, str(error), headers, code="no_instance")
            return CallOutcome.FAILED
        retries = services.config.retries
        while True:
            attempt = Attempt(services, call, pair, left)
            outcome = await attempt.run()
            failure = attempt.failure
            if failure is None:
                return outcome
            tried.add(pair[failure.leg])
            if failure.retryable and retries > 0:
                retries -= 1
                try:
                    pair = await self._pick(tried)
                except _NoInstance:
                    _log.debug("no other %s instance for %s", failure.leg, call.request_id)
                else:
                    services.metrics.retries.labels(failure.leg).inc()
                    continue
            message = f"The {failure.leg} instance {pair[failure.leg].name} {failure.reason}."
            status = STATUS_OF[failure.kind]
            await send_error(call.send, status, message, attempt.headers, code=failure.kind)
            return outcome

    async def _pick(self, tried: set[Instance]) -> Pair:
        mode = self._call.mode
        pair: dict[LegName, Instance] = {}
        for leg, side in self._services.sides.items():
            instance = side.pick(mode, tried)
            if instance is None:
                raise _NoInstance(f"No {leg} instance takes part in {mode}.")
            pair[leg] = instance
        prefill = pair[LegName.PREFILL]
        if self._call.binding is Binding.EARLY and prefill.coordinates is None:
            await prefill.learn()
            if not prefill.takes_part_in(mode):
                raise _NoInstance(f"The prefill instance {prefill.name} takes no part in {mode}.")
            if prefill.coordinates is None:
                raise _NoInstance(
                    "Early binding, as push has it, needs to know where the prefill instance "
                    f"{prefill.name} keeps its KV cache, but it {prefill.problem}. For vLLM, give "
                    "engine_id, kv_host and kv_port with its address."
                )
        return pair


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
