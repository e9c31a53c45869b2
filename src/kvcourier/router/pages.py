"""What the router tells of itself and of its instances.

Decides its pages of health, models, metrics, instances and stories. Refuses to know calls.
"""

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response

from kvcourier.errors import shorten
from kvcourier.router.answers import JSON_TYPE, error_content
from kvcourier.router.events import LegName
from kvcourier.router.instances import Instance
from kvcourier.router.legs import read_object
from kvcourier.router.services import Services


class Pages:
    """The pages of one router."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def health(self, _request: Request) -> Response:
        """200 if at least one instance of each side says that it is well."""
        details: dict[str, Any] = {}
        for leg, side in self._services.sides.items():
            instances = side.instances
            answers = await asyncio.gather(*(_ask(one, "/health") for one in instances))
            details[leg] = {
                one.name: _health_line(answer)
                for one, answer in zip(instances, answers, strict=True)
            }
        well = all("ok" in states.values() for states in details.values())
        content = {"status": "ok" if well else "unavailable", **details}
        return json_page(content, 200 if well else 503)

    async def models(self, _request: Request) -> Response:
        """The models that both a prefill and a decode instance serve."""
        cards: dict[LegName, dict[str, Any]] = {}
        for leg, side in self._services.sides.items():
            instances = side.instances
            answers = await asyncio.gather(*(_ask(one, "/v1/models") for one in instances))
            if not any(isinstance(answer, httpx.Response) for answer in answers):
                names = ", ".join(instance.name for instance in instances) or "there is none"
                message = f"No {leg} instance answers ({names})."
                return Response(error_content(503, message), 503, media_type=JSON_TYPE)
            cards[leg] = _cards(answers)
        shared = [
            card for name, card in cards[LegName.DECODE].items() if name in cards[LegName.PREFILL]
        ]
        return json_page({"object": "list", "data": shared})

    async def metrics(self, _request: Request) -> Response:
        """All metrics, as Prometheus text."""
        return Response(
            self._services.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def instances(self, _request: Request) -> Response:
        """What is known of each instance."""
        config = self._services.config
        return json_page(
            {
                "mode": config.mode,
                "binding": config.binding,
                "policy": {leg: side.policy for leg, side in self._services.sides.items()},
                "timeouts": dataclasses.asdict(config.timeouts),
                **{
                    leg: [instance.describe() for instance in side.instances]
                    for leg, side in self._services.sides.items()
                },
            }
        )

    async def story(self, request: Request) -> Response:
        """What was done about a call, by the id of its transfer or its own."""
        key = request.path_params["key"]
        diary = self._services.diary
        if entries := diary.story(key):
            answer = json_page(entries)
        else:
            message = f"No transfer {shorten(key)} was dispatched here, or it was forgotten."
            answer = Response(error_content(404, message), 404, media_type=JSON_TYPE)
        answer.headers.update(diary.clock_header())
        return answer


def json_page(content: Mapping[str, Any] | Sequence[Any], status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(json.dumps(content), status, media_type=JSON_TYPE)


async def _ask(instance: Instance, path: str) -> httpx.Response | str:
    """The answer, or why there is none."""
    try:
        return await instance.get(path)
    except TimeoutError:
        return "no answer in time"
    except httpx.HTTPError as error:
        return f"cannot be reached ({error})"


def _health_line(answer: httpx.Response | str) -> str:
    if isinstance(answer, str):
        return answer
    return "ok" if answer.is_success else f"answered {answer.status_code}"


def _cards(answers: list[httpx.Response | str]) -> dict[str, Any]:
    cards: dict[str, Any] = {}
    for answer in answers:
        if isinstance(answer, str) or not answer.is_success:
            continue
        with suppress(ValueError, TypeError, KeyError):
            cards |= {card["id"]: card for card in read_object(answer.content)["data"]}
    return cards
