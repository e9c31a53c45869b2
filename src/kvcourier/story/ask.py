"""Asking processes for their story of a transfer, over HTTP; and vLLM, which has none there, over
its side channel.

Decides how often a clock is looked at, how much of an answer is read, and what each kind of answer
means. Refuses to know what the stories say.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from kvcourier.api_keys import bearer
from kvcourier.errors import ConfigError, clip
from kvcourier.ids import EngineId, InstanceAddress
from kvcourier.runtime.diary import CLOCK_HEADER
from kvcourier.story.accounts import (
    Account,
    Asked,
    Part,
    Reading,
    Unanswered,
    compare_clocks,
    plain,
    read_clock,
    read_entries,
    transfer_id,
)
from kvcourier.story.side_channel import SCHEME, Keys, ask_ranks, read_address
from kvcourier.story.timeline import Timeline, make_timeline

LOOKS = 10
"""Questions to each: the shortest round trip tells most of the clock."""

_MAX_ANSWER_BYTES = 4 << 20
_MAX_INSTANCES = 1024
_NO_KEYS = Keys()


@dataclass(frozen=True, slots=True)
class Place:
    """Somebody to ask.

    Attributes:
        url: of its API, or kv://... of its side channel alone.
        api_key: opens its API, if it has one.
        channel: its side channel, which is asked if its API keeps no stories.
    """

    part: Part
    url: str
    api_key: str | None = field(default=None, repr=False)
    channel: InstanceAddress | None = None


class KeepsNone(Unanswered):
    """Nothing keeps stories at this address."""


def read_place(part: Part, url: str, flag: str, api_key: str | None) -> Place:
    """Somebody named by a flag.

    Raises:
        ConfigError: it is no address.
    """
    if url.startswith(f"{SCHEME}://") and part is not Part.ROUTER:
        return Place(part, url, channel=read_address(url, flag))
    return Place(part, check_url(url, flag), api_key)


def check_url(url: str, flag: str) -> str:
    """An address without its closing slash.

    Raises:
        ConfigError: it is none.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{flag}: expected an address like http://127.0.0.1:8100, found {url!r}")
    return url.rstrip("/")


async def tell(
    key: str,
    places: Sequence[Place],
    instance_key: str | None,
    timeout_s: float,
    keys: Keys = _NO_KEYS,
) -> Timeline:
    """Ask everybody for a story; where only routers are named, the instances behind them too.

    A router knows a call by its request id as well, and tells under which transfer id the
    instances know it.
    """
    routers = [place for place in places if place.part is Part.ROUTER]
    instances = [place for place in places if place.part is not Part.ROUTER]
    asked = await ask_all(key, routers, timeout_s)
    if not instances:
        for router in routers:
            try:
                instances += await find_instances(router, instance_key, timeout_s)
            except Unanswered as error:
                asked.append(Asked(Part.ROUTER, router.url, problem=f"its instances: {error}"))
    # Two routers may stand before one instance.
    unique = list(dict.fromkeys(instances))
    told = transfer_id(asked)
    return make_timeline(key, [*asked, *await ask_all(told or key, unique, timeout_s, keys)])


async def ask_all(
    key: str, places: Sequence[Place], timeout_s: float, keys: Keys = _NO_KEYS
) -> list[Asked]:
    """Ask everybody at once; each answers, or is said not to, within so many seconds, and twice as
    many if its API and its side channel are asked."""
    async with _client(timeout_s) as client:
        found = await asyncio.gather(*(_ask(client, key, p, timeout_s, keys) for p in places))
    return [each for asked in found for each in asked]


async def find_instances(router: Place, instance_key: str | None, timeout_s: float) -> list[Place]:
    """The instances behind a router.

    Raises:
        Unanswered: it does not tell them.
    """
    async with _in_time(timeout_s), _client(timeout_s) as client:
        found = _json(await _get(client, router, "/kvcourier/instances"))
    if not isinstance(found, dict):
        raise Unanswered("answered with something that is no list of instances")
    places = []
    for name, part in (("prefill", Part.PREFILL), ("decode", Part.DECODE)):
        listed = found.get(name)
        for each in (listed if isinstance(listed, list) else [])[:_MAX_INSTANCES]:
            url = each.get("url") if isinstance(each, dict) else None
            if isinstance(url, str):
                channel = _told_channel(each.get("coordinates"))
                places.append(Place(part, _told_url(url), instance_key, channel))
    return places


def _told_url(url: str) -> str:
    try:
        return check_url(plain(url), "url")
    except ConfigError as error:
        raise Unanswered(f"names an instance by no address: {clip(str(error))}") from None


def _told_channel(told: object) -> InstanceAddress | None:
    """Where a router says that an instance's side channel is, if it knows."""
    if not isinstance(told, dict):
        return None
    name, host, port = (told.get(key) for key in ("engine_id", "host", "port"))
    if not isinstance(name, str) or not isinstance(host, str) or not isinstance(port, int):
        return None
    return InstanceAddress(EngineId(plain(name)), plain(host), port)


async def _ask(
    client: httpx.AsyncClient, key: str, place: Place, timeout_s: float, keys: Keys
) -> list[Asked]:
    try:
        if not place.url.startswith(f"{SCHEME}://"):
            return [await _ask_api(client, key, place, timeout_s)]
    except KeepsNone as error:
        if place.channel is None:
            return [Asked(place.part, place.url, problem=str(error))]
    assert place.channel is not None, "a place has an API or a side channel"
    return await asyncio.to_thread(
        ask_ranks, place.part, place.channel, key, keys, LOOKS, timeout_s
    )


async def _ask_api(client: httpx.AsyncClient, key: str, place: Place, timeout_s: float) -> Asked:
    path = f"/kvcourier/story/{quote(key, safe='')}"
    readings = []
    try:
        async with _in_time(timeout_s):
            for _ in range(LOOKS):
                answer = await _get(client, place, path)
                if answer.reading is not None:
                    readings.append(answer.reading)
            entries = read_entries(_json(answer))
    except KeepsNone:
        raise
    except Unanswered as error:
        return Asked(place.part, place.url, problem=str(error))
    account = Account(place.part, place.url, entries, compare_clocks(readings))
    return Asked(place.part, place.url, account)


@dataclass(frozen=True, slots=True)
class _Answer:
    content: bytes
    reading: Reading | None


async def _get(client: httpx.AsyncClient, place: Place, path: str) -> _Answer:
    headers = [] if place.api_key is None else [bearer(place.api_key)]
    # Even, also where somebody sets this machine's time meanwhile.
    unix_offset_s = time.time() - time.monotonic()
    asked_at = time.monotonic()
    async with client.stream("GET", place.url + path, headers=headers) as response:
        answered_at = time.monotonic()
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > _MAX_ANSWER_BYTES:
                raise Unanswered(f"answered with more than {_MAX_ANSWER_BYTES} bytes")
    if response.status_code != 200:
        raise _refusal(response)
    clock_s = _clock_of(response)
    if clock_s is None:
        return _Answer(bytes(content), None)
    reading = Reading(asked_at + unix_offset_s, answered_at + unix_offset_s, clock_s)
    return _Answer(bytes(content), reading)


@asynccontextmanager
async def _in_time(timeout_s: float) -> AsyncIterator[None]:
    """Whatever keeps an answer from coming, as `Unanswered`."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except (TimeoutError, httpx.TimeoutException):
        raise Unanswered(f"did not answer within {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unanswered(f"cannot be reached: {plain(clip(str(error) or repr(error)))}") from None


def _client(timeout_s: float) -> httpx.AsyncClient:
    # Addressed as given, never through a proxy of the environment.
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(trust_env=False, timeout=timeout_s, limits=limits)


def _clock_of(response: httpx.Response) -> float | None:
    try:
        return read_clock(float(response.headers.get(CLOCK_HEADER, "")))
    except ValueError:
        return None


def _json(answer: _Answer) -> Any:
    try:
        return json.loads(answer.content)
    except (ValueError, RecursionError):
        raise Unanswered("answered with something that is not JSON") from None


def _refusal(response: httpx.Response) -> Unanswered:
    match response.status_code:
        case 404 if CLOCK_HEADER in response.headers:
            return Unanswered("does not know it, or has forgotten it")
        case 404:
            return KeepsNone(
                "keeps no stories at this address (an older version; or vLLM, whose side channel "
                "is asked: name it as kv://ENGINE_ID@HOST:PORT, or tell it to the router)"
            )
        case 401 | 403:
            return Unanswered(f"wants an API key (answered {response.status_code})")
        case status:
            return Unanswered(f"answered {status}")
