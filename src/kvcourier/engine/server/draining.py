"""Taking an instance out of service without breaking what runs there.

Decides what /drain does and when an instance is empty. Refuses to know how requests run.
"""

from starlette.requests import Request
from starlette.responses import Response

from kvcourier.engine.server.errors import json_response
from kvcourier.engine.server.generation import ActiveGenerations, ServedEngine


class Drain:
    """`POST /drain` begins, `DELETE /drain` ends it, `GET /drain` only tells how far it is.

    A drained instance refuses new requests with 503 and code `draining`, finishes the ones it has,
    and keeps KV that it has promised until that is collected or its lease is over.
    """

    def __init__(self, engine: ServedEngine, active: ActiveGenerations) -> None:
        self._engine = engine
        self._active = active

    async def serve(self, request: Request) -> Response:
        """All three answer alike: when `empty`, the process may be ended and nobody notices."""
        if request.method != "GET":
            self._active.is_draining = request.method == "POST"
        running = len(self._active)
        kept = int(self._engine.stats().get("kv_loans", 0))
        return json_response(
            {
                "draining": self._active.is_draining,
                "running": running,
                "kept": kept,
                "empty": self._active.is_draining and not running and not kept,
            }
        )
