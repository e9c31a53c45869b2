"""A router of the doctor's own, in front of one pair, for the length of some prompts.

Decides how what a doctor knows of two instances becomes a router's settings. Refuses to know what
goes through it. It stands here since doctor and router do not know each other.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from kvcourier.doctor.facts import InstanceFacts
from kvcourier.errors import KVCourierError
from kvcourier.http_server import HttpServer, bind
from kvcourier.ids import EngineId
from kvcourier.router.app import create_app
from kvcourier.router.config import Coordinates, InstanceSpec, RouterConfig

_START_S = 10.0


class OwnRouterFailed(KVCourierError):
    """It does not start."""


def router_opener(
    api_key: str | None,
) -> Callable[[InstanceFacts, InstanceFacts], AbstractContextManager[str]]:
    """What opens a router for a pair; `api_key` is what it shows to the instances."""

    @contextmanager
    def opened(prefill: InstanceFacts, decode: InstanceFacts) -> Iterator[str]:
        config = RouterConfig(
            prefill=(_spec(prefill),), decode=(_spec(decode),), instance_api_key=api_key
        )
        ready = threading.Event()
        urls: list[str] = []

        def on_ready(url: str) -> None:
            urls.append(url)
            ready.set()

        server = HttpServer(create_app(config), bind("127.0.0.1", 0), on_ready)
        thread = threading.Thread(target=server.run, name="doctor-router", daemon=True)
        thread.start()
        if not ready.wait(_START_S):
            raise OwnRouterFailed(f"the doctor's own router does not start in {_START_S:g} s")
        try:
            yield urls[0]
        finally:
            server.stop()
            thread.join(_START_S)

    return opened


def _spec(one: InstanceFacts) -> InstanceSpec:
    if one.place is None or one.offer is None:
        return InstanceSpec(one.url)
    where = Coordinates(
        EngineId(one.place.engine_id),
        one.place.host,
        one.place.port,
        one.offer.tp_size,
        one.offer.pp_size,
    )
    return InstanceSpec(one.url, where)
