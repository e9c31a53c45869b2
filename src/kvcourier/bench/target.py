"""What is behind an address: a router with its instances, or one server.

Decides what is asked of them before and after a load: which model, which modes, what their stories
and their prefix caches tell. Refuses to know how loads are made.
"""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvcourier.bench.plan import ASKED, Way
from kvcourier.bench.samples import Answered, CacheCounts, Sample
from kvcourier.bench.timeline import Entry, make_timeline
from kvcourier.errors import ConfigError, KVCourierError

_ASK_TIMEOUT_S = 10.0
_KNOWN_TIMEOUT_S = 15.0
_STORY_PATIENCE_S = 2.0
_POLL_S = 0.05
_STORIES_AT_ONCE = 8
# ours and vLLM's
_HITS = re.compile(
    r"^(?:kvcourier|vllm):prefix_cache_(queries|hits)_total(?:\{[^}]*\})? (\S+)", re.M
)


class TargetFailed(KVCourierError):
    """A target cannot be measured; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address as the user names it, `URL` or `URL#MODE`; `way` is None if no mode is named."""

    url: str
    way: Way | None


def parse_endpoint(text: str, where: str) -> Endpoint:
    """Read `http://host:port[#MODE]`.

    Raises:
        ConfigError: it has another form.
    """
    url, _, mode = text.partition("#")
    way = parse_way(mode, where) if mode else None
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        good = good and parts.path in ("", "/") and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"{where}: expected http://host:port, found {url!r}")
    return Endpoint(url.rstrip("/"), way)


def parse_way(text: str, where: str) -> Way:
    """Read the name of a mode. Raises ConfigError."""
    try:
        return Way(text)
    except ValueError:
        raise ConfigError(f"{where}: expected a mode of {', '.join(Way)}; found {text!r}") from None


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to send requests to.

    Attributes:
        url: where requests go.
        prefill_urls, decode_urls: the instances whose stories and metrics are asked for.
        processes: names of those that compute; targets that share one share a prefix cache.
    """

    url: str
    way: Way
    model: str
    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    processes: frozenset[str]

    @property
    def instances(self) -> Mapping[str, tuple[str, ...]]:
        """Addresses by side."""
        return {"P": self.prefill_urls, "D": self.decode_urls}


async def look(client: httpx.AsyncClient, url: str, way: Way, model: str | None = None) -> Target:
    """Ask what is there; waits until a router knows its instances.

    Raises:
        TargetFailed: nothing answers, or there is no model.
        ConfigError: the target does not have the mode or the model.
    """
    table = await _router_table(client, url)
    if table is None:
        if way in ASKED:
            raise ConfigError(
                f"{url}: expected a kvcourier router for mode {way}, found a "
                "server without /kvcourier/instances; name the router, or use mode single or "
                "default"
            )
        name = await _model(client, url, model)
        told = (url,)
        return Target(url, way, name, (), told, frozenset(told))
    prefill, decode = (
        tuple(str(each["url"]).rstrip("/") for each in table[side])
        for side in ("prefill", "decode")
    )
    processes = _processes(table)
    if way is Way.SINGLE:
        name = await _model(client, decode[0], model)
        return Target(decode[0], Way.SINGLE, name, (), decode[:1], processes)
    _check_offered(url, way, table)
    name = await _model(client, url, model)
    return Target(url, way, name, prefill, decode, processes)


async def _router_table(
    client: httpx.AsyncClient, url: str
) -> Mapping[str, Sequence[Mapping[str, Any]]] | None:
    """What a router tells of its instances; None if this is none."""
    deadline = time.monotonic() + _KNOWN_TIMEOUT_S
    while True:
        response = await _get(client, f"{url}/kvcourier/instances")
        if response is None:
            raise TargetFailed(
                f"Nothing answers at {url}; start a router or a server there, or name "
                "another address."
            )
        if response.status_code != 200:
            return None
        try:
            table = response.json()
            sides = {side: list(table[side]) for side in ("prefill", "decode")}
            all(each["url"] for side in sides.values() for each in side)
        except (ValueError, KeyError, TypeError):
            return None
        # A router that has just started has not asked its instances yet.
        lost = [each for side in sides.values() for each in side if not each.get("reachable")]
        if not lost and all(sides.values()):
            return sides
        if time.monotonic() > deadline:
            names = ", ".join(f"{each['url']} ({each.get('problem')})" for each in lost)
            raise TargetFailed(f"The router at {url} does not reach {names or 'any instance'}.")
        await asyncio.sleep(_POLL_S)


def _check_offered(url: str, way: Way, table: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    if way is Way.DEFAULT:
        return
    for side, instances in table.items():
        modes = [each.get("modes") for each in instances]
        # An engine that is not ours does not tell its modes; the router decides.
        mode = ASKED[way][0]
        if all(offered is not None and mode not in offered for offered in modes):
            offered = sorted({str(mode) for each in modes for mode in each or ()})
            raise ConfigError(
                f"{url}: mode {way} is not offered by any {side} instance; they "
                f"offer {', '.join(offered) or 'none'}"
            )


def _processes(table: Mapping[str, Sequence[Mapping[str, Any]]]) -> frozenset[str]:
    return frozenset(
        str(each.get("incarnation") or each["url"]) for side in table.values() for each in side
    )


async def _model(client: httpx.AsyncClient, url: str, wanted: str | None) -> str:
    response = await _get(client, f"{url}/v1/models")
    if response is None:
        raise TargetFailed(f"Nothing answers at {url}; start a server there first.")
    try:
        names = [str(card["id"]) for card in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise TargetFailed(
            f"{url}/v1/models is no list of models; is it an OpenAI endpoint?"
        ) from None
    if not names:
        raise TargetFailed(f"{url} serves no model yet.")
    if wanted not in (None, *names):
        raise ConfigError(f"{url} does not serve {wanted!r}; it serves {', '.join(names)}")
    return wanted or names[0]


async def _get(client: httpx.AsyncClient, url: str) -> httpx.Response | None:
    try:
        return await client.get(url, timeout=_ASK_TIMEOUT_S)
    except httpx.HTTPError:
        return None


# After a load.


async def read_samples(
    client: httpx.AsyncClient, target: Target, answers: Sequence[Answered]
) -> list[Sample]:
    """Each answer with its timeline, where the instances tell one."""
    gate = asyncio.Semaphore(_STORIES_AT_ONCE)

    async def one(answer: Answered) -> Sample:
        if not answer.transfer_id or not target.prefill_urls:
            return Sample(answer)
        async with gate:
            prefill, decode = await _stories(client, target, answer.transfer_id)
        timeline = make_timeline(answer.sent_unix_s, answer.token_s, prefill, decode)
        return Sample(answer, timeline)

    return list(await asyncio.gather(*map(one, answers)))


async def _stories(
    client: httpx.AsyncClient, target: Target, transfer_id: str
) -> tuple[list[Entry], list[Entry]]:
    """P's and D's story; they may be a moment behind the stream, so ask until both are whole."""
    deadline = time.monotonic() + _STORY_PATIENCE_S
    while True:
        prefill = await _story(client, target.prefill_urls, transfer_id)
        decode = await _story(client, target.decode_urls, transfer_id)
        told = {entry.get("what") for entry in (*prefill, *decode)}
        untold = not prefill and not decode
        if untold or {"prefill_finished", "received"} <= told or time.monotonic() > deadline:
            return prefill, decode
        await asyncio.sleep(_POLL_S)


async def _story(client: httpx.AsyncClient, urls: Sequence[str], transfer_id: str) -> list[Entry]:
    for url in urls:
        response = await _get(client, f"{url}/kvcourier/story/{transfer_id}")
        if response is None or response.status_code != 200:
            continue
        try:
            content = response.json()
        except ValueError:
            continue
        if isinstance(content, list):
            return [entry for entry in content if isinstance(entry, dict)]
    return []


async def read_cache_counts(client: httpx.AsyncClient, target: Target) -> Mapping[str, CacheCounts]:
    """Of each side whose instances tell."""
    counts = {}
    for side, urls in target.instances.items():
        found = [read_counts(await _text(client, f"{url}/metrics")) for url in urls]
        if found and all(found):
            counts[side] = CacheCounts(
                sum(each.queries for each in found if each),
                sum(each.hits for each in found if each),
            )
    return counts


def read_counts(metrics: str) -> CacheCounts | None:
    """The prefix cache's counters in a Prometheus text, or None if it has none."""
    sums = {"queries": 0.0, "hits": 0.0}
    seen = set()
    for name, value in _HITS.findall(metrics):
        try:
            sums[name] += float(value)
        except ValueError:
            continue
        seen.add(name)
    return CacheCounts(**sums) if seen == sums.keys() else None


async def _text(client: httpx.AsyncClient, url: str) -> str:
    response = await _get(client, url)
    return response.text if response is not None and response.status_code == 200 else ""
