"""The router's routes for whoever operates it: add, remove, drain and resume an instance.

Decides what such a call must say and what it is answered. Refuses to know what follows
(`membership`) and who may call (`kvcourier.api_keys`).

    POST /kvcourier/admin/add     {"role": "decode", "instance": "http://d3:8200"}
    POST /kvcourier/admin/drain   {"role": "decode", "instance": "http://d3:8200"}
"""

import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvcourier.errors import ConfigError, shorten
from kvcourier.router.answers import JSON_TYPE, error_content
from kvcourier.router.config import parse_instance_spec
from kvcourier.router.events import LegName
from kvcourier.router.membership import Membership
from kvcourier.router.pages import json_page

ADMIN_PREFIX = "/kvcourier/admin/"
_MAX_BODY_BYTES = 1 << 16

_Act = Callable[[LegName, str], Response]


class _Refused(Exception):
    """HTTP 400, with this sentence."""


class Admin:
    """The routes of one router."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def routes(self) -> list[Route]:
        """All of them."""
        acts: dict[str, _Act] = {
            "add": self._add,
            "remove": self._remove,
            "drain": lambda leg, name: self._drain(leg, name, drained=True),
            "resume": lambda leg, name: self._drain(leg, name, drained=False),
        }
        return [
            Route(ADMIN_PREFIX + name, _endpoint(act), methods=["POST"])
            for name, act in acts.items()
        ]

    def _add(self, leg: LegName, text: str) -> Response:
        spec = parse_instance_spec(text)
        if not self._membership.add(leg, spec):
            return _error(409, f"{spec.name} is a {leg} instance already.")
        return json_page({"role": leg, "instance": spec.name}, 201)

    def _remove(self, leg: LegName, name: str) -> Response:
        if not self._membership.remove(leg, name):
            return _unknown(leg, name)
        return json_page({"role": leg, "instance": name})

    def _drain(self, leg: LegName, name: str, *, drained: bool) -> Response:
        instance = self._membership.drain(leg, name, drained=drained)
        if instance is None:
            return _unknown(leg, name)
        work = instance.work
        return json_page(
            {
                "role": leg,
                "instance": name,
                "draining": instance.is_draining,
                "in_flight": work.num_owed,
                "empty": work.num_owed == 0,
            }
        )


def closed_routes() -> list[Route]:
    """What is answered where nobody may do this."""

    async def closed(_request: Request) -> Response:
        return _error(403, "Start the router with --admin-key-file to change its instances.")

    return [Route(ADMIN_PREFIX + "{act}", closed, methods=["POST"])]


def _endpoint(act: _Act) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        try:
            return act(*await _read(request))
        except (_Refused, ConfigError) as error:
            return _error(400, f"{error}.")

    return endpoint


async def _read(request: Request) -> tuple[LegName, str]:
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MAX_BODY_BYTES:
            raise _Refused(f"body: expected at most {_MAX_BODY_BYTES} bytes")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise _Refused("body: expected a JSON object with role and instance") from None
    if not isinstance(body, dict):
        raise _Refused("body: expected a JSON object with role and instance")
    role, instance = body.get("role"), body.get("instance")
    if role not in set(LegName):
        raise _Refused(f"role: expected {' or '.join(LegName)}, found {shorten(role)}")
    if not isinstance(instance, str) or not instance:
        raise _Refused(f"instance: expected its address, found {shorten(instance)}")
    return LegName(role), instance


def _unknown(leg: LegName, name: str) -> Response:
    return _error(404, f"There is no {leg} instance {shorten(name)}.")


def _error(status: int, message: str) -> Response:
    return Response(error_content(status, message), status, media_type=JSON_TYPE)
