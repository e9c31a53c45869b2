"""Taking an instance out of service, and waiting until nothing is left there.

Decides whom to tell, what each answer means, and when the wait is over. Refuses to know flags, and
to end anything: whoever asks does that afterwards.
"""

import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvcourier.api_keys import bearer
from kvcourier.errors import KVCourierError, clip, shorten
from kvcourier.router.events import LegName

_log = logging.getLogger(__name__)
_PAUSE_S = 0.5
_ANSWER_S = 10.0
_IN_FLIGHT = "kvcourier_router_in_flight"


class DrainFailed(KVCourierError):
    """It is not empty, or cannot be drained; the message says which, and what is left."""


class _Gone(Exception):
    """Whoever was asked cannot be reached, so it sends nothing either."""


class _NotThere(Exception):
    """A router does not have that instance, so it sends it nothing."""


@dataclass(frozen=True, slots=True)
class Left:
    """What still runs there; `text` says it in words."""

    count: int
    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody to ask again and again, until nothing is left. `ask` raises _Gone or _NotThere."""

    name: str
    ask: Callable[[], Left] = field(repr=False)


class Drains:
    """Makes the questions. Close the client afterwards."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def instance(self, url: str, key: str | None) -> Asked:
        """An embedded instance, which then refuses what is new."""

        def ask() -> Left:
            answer = self._call("POST", f"{url}/drain", key)
            if answer.status_code in (404, 405):
                raise DrainFailed(
                    f"{url} cannot be drained itself (vLLM?): name the routers in front of it by "
                    "--router, and its --role"
                )
            told = _object(url, answer)
            running, kept = _number(told, "running"), _number(told, "kept")
            return Left(running + kept, f"{running} requests running, {kept} prompts kept")

        return Asked(url, ask)

    def at_router(self, router: str, leg: LegName, instance: str, key: str | None) -> Asked:
        """An instance of any kind, at a router, which then sends it nothing new."""
        body = {"role": leg.value, "instance": instance}

        def ask() -> Left:
            told = self._admin(router, "drain", body, key)
            count = _number(told, "in_flight")
            return Left(count, f"{count} requests of {router}")

        return Asked(router, ask)

    def whole_router(self, url: str) -> Asked:
        """A router that gets nothing new any more: when has it answered everybody?"""

        def ask() -> Left:
            answer = self._call("GET", f"{url}/metrics", None)
            if answer.status_code != 200:
                raise DrainFailed(f"{url}/metrics answered {answer.status_code}")
            count = _in_flight(url, answer.text)
            return Left(count, f"{count} calls being served")

        return Asked(url, ask)

    def resume_instance(self, url: str, key: str | None) -> None:
        """The reverse of `instance`."""
        _object(url, self._call("DELETE", f"{url}/drain", key))

    def resume_at_router(self, router: str, leg: LegName, instance: str, key: str | None) -> None:
        """The reverse of `at_router`; a router that is gone, or has no such instance, is fine."""
        try:
            self._admin(router, "resume", {"role": leg.value, "instance": instance}, key)
        except (_Gone, _NotThere) as error:
            _log.warning("%s: %s", router, error)

    def _admin(
        self, router: str, act: str, body: dict[str, str], key: str | None
    ) -> dict[str, Any]:
        answer = self._call("POST", f"{router}/kvcourier/admin/{act}", key, body)
        if answer.status_code == 404:
            raise _NotThere(f"has no {body['role']} instance {body['instance']}")
        return _object(router, answer)

    def _call(self, method: str, url: str, key: str | None, body: object = None) -> httpx.Response:
        headers = [] if key is None else [bearer(key)]
        try:
            return self._client.request(method, url, headers=headers, json=body)
        except httpx.HTTPError as error:
            raise _Gone(f"cannot be reached ({clip(str(error)) or repr(error)})") from None


def make_client() -> httpx.Client:
    """For `Drains`: each answer in bounded time, and no proxy of the environment."""
    return httpx.Client(timeout=_ANSWER_S, trust_env=False)


def wait_until_empty(everybody: Sequence[Asked], timeout_s: float) -> None:
    """Ask until nobody has anything left; blocks.

    Raises:
        DrainFailed: time is up, nobody could be asked, or somebody does not let us.
    """
    deadline = time.monotonic() + timeout_s
    silent: dict[str, str] = {}
    while True:
        left: list[str] = []
        for each in everybody:
            try:
                found = each.ask()
            except (_Gone, _NotThere) as error:
                if each.name not in silent:
                    _log.warning("%s %s: it is taken to send nothing", each.name, error)
                silent[each.name] = str(error)
            else:
                silent.pop(each.name, None)
                if found.count:
                    left.append(found.text)
        if len(silent) == len(everybody):
            raise DrainFailed("; ".join(f"{name} {why}" for name, why in silent.items()))
        if not left:
            return
        if time.monotonic() >= deadline:
            raise DrainFailed(f"not empty after {timeout_s:g} s: {'; '.join(left)}")
        _log.info("waiting for %s", "; ".join(left))
        time.sleep(_PAUSE_S)


def every_address(urls: Iterable[str]) -> Iterator[str]:
    """An address for each machine behind a name: each replica of a router is told by itself.

    Names under https stay as they are, since the certificate is for the name.
    """
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            yield url
            continue
        port = parts.port or 80
        try:
            found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise DrainFailed(f"{url}: its name cannot be resolved ({error.strerror})") from None
        for address in dict.fromkeys(str(item[4][0]) for item in found):
            host = f"[{address}]" if ":" in address else address
            yield urlunsplit(("http", f"{host}:{port}", parts.path, "", ""))


def _object(name: str, answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code in (401, 403):
        raise DrainFailed(f"{name} does not let us (answered {answer.status_code}): {_say(answer)}")
    if answer.status_code >= 400:
        raise DrainFailed(f"{name} answered {answer.status_code}: {_say(answer)}")
    try:
        told = answer.json()
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise DrainFailed(f"{name} answered with something that is no JSON object")
    return told


def _say(answer: httpx.Response) -> str:
    return clip("".join(char if char.isprintable() else " " for char in answer.text[:300]))


def _number(told: dict[str, Any], key: str) -> int:
    value = told.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DrainFailed(f"expected a number as {key} in the answer, found {shorten(value)}")
    return value


def _in_flight(url: str, metrics: str) -> int:
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if sample.name == _IN_FLIGHT:
                    return int(sample.value)
    except ValueError:
        pass
    raise DrainFailed(f"{url}/metrics has no {_IN_FLIGHT}: is that a router?")
