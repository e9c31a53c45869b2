"""From addresses to facts.

Decides what is asked of whom, and in which order. Refuses to judge.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvcourier.config import ChannelKeys, Limits, TransferMode
from kvcourier.core.handshake import check_offer
from kvcourier.doctor import side_channel
from kvcourier.doctor.exposition import engine_of, read_metrics
from kvcourier.doctor.facts import (
    Facts,
    InstanceFacts,
    KnownInstance,
    Load,
    Metrics,
    Place,
    Role,
    RouterFacts,
)
from kvcourier.doctor.pages import NotAnswered, Pages, Reply
from kvcourier.errors import HandshakeRejected, clip
from kvcourier.ids import EngineId

_MOST_AT_ONCE = 8
_ROUTER_PATIENCE_S = 6.0
"""A router asks an instance that was gone again after 5 s at the latest."""

_ROUTER_PAUSE_S = 0.5
OWN_ID = EngineId("kvcourier-doctor")


@dataclass(frozen=True, slots=True)
class Address:
    """An instance as the user names it; `place` is where its side channel is, if that was said."""

    url: str
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What a doctor is asked.

    Attributes:
        prefill, decode: the instances.
        router: URL of one in front of them.
        load: what users are going to send.
        modes: which shall work; empty: at least one.
        timeout_s: for one page or one question to a side channel.
        answer_s: for one answer of a model, or one fetch of KV.
        keys: of the side channel; None: none. `secret_key_file` and `peer_keys` are where they
            come from, for a process of the doctor's own.
        own_id: as whom the doctor asks there.
        own_host: address at which instances find the doctor; empty: that of the way to each.
        api_key: shown to everybody over HTTP.
    """

    prefill: Sequence[Address] = ()
    decode: Sequence[Address] = ()
    router: str | None = None
    load: Load = field(default_factory=Load)
    modes: tuple[TransferMode, ...] = ()
    timeout_s: float = 5.0
    answer_s: float = 30.0
    keys: ChannelKeys | None = None
    secret_key_file: str | None = None
    peer_keys: str | None = None
    own_host: str = ""
    api_key: str | None = field(default=None, repr=False)
    own_id: EngineId = OWN_ID


def gather(question: Question, pages: Pages) -> Facts:
    """Ask everybody; blocks, at most for some time-outs."""
    router = None if question.router is None else settled_router(question.router, pages)
    asked = [
        *((Role.PREFILL, address) for address in question.prefill),
        *((Role.DECODE, address) for address in question.decode),
    ] or [
        (known.role, Address(known.url, known.place))
        for known in (router.instances if router else ())
    ]
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        found = list(pool.map(lambda each: look_at(each[0], each[1], question, pages), asked))
    return Facts(
        prefill=tuple(each for each in found if each.role is Role.PREFILL),
        decode=tuple(each for each in found if each.role is Role.DECODE),
        router=router,
        load=question.load,
        modes=question.modes,
    )


def settled_router(url: str, pages: Pages) -> RouterFacts:
    """A router, once it has had the time to ask an instance again that it had not reached."""
    deadline = time.monotonic() + _ROUTER_PATIENCE_S
    while True:
        seen = look_at_router(url, pages)
        settled = bool(seen.problem) or all(each.reachable for each in seen.instances)
        if settled or time.monotonic() > deadline:
            return seen
        time.sleep(_ROUTER_PAUSE_S)


def look_at_router(url: str, pages: Pages) -> RouterFacts:
    """A router, by what it tells of itself."""
    try:
        health = pages.get(f"{url}/health")
        page = pages.get(f"{url}/kvcourier/instances")
    except NotAnswered as error:
        return RouterFacts(url, problem=str(error))
    body = page.json()
    if page.status != 200 or not isinstance(body, Mapping):
        why = f"GET /kvcourier/instances answered {page.status}: {page.message()}"
        return RouterFacts(url, problem=why, health=health.status)
    timeouts = body.get("timeouts")
    return RouterFacts(
        url,
        health=health.status,
        mode=str(body.get("mode", "")),
        timeouts={
            str(name): float(value)
            for name, value in (timeouts if isinstance(timeouts, Mapping) else {}).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        },
        instances=tuple(
            known
            for role, side in ((Role.PREFILL, "prefill"), (Role.DECODE, "decode"))
            for known in _known(role, body.get(side))
        ),
    )


def _known(role: Role, entries: object) -> Iterator[KnownInstance]:
    """A router's entries of one side; what is none is left out."""
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, Mapping) and isinstance(entry.get("url"), str):
            coordinates = entry.get("coordinates")
            yield KnownInstance(
                role,
                entry["url"].rstrip("/"),
                entry.get("reachable") is True,
                clip(str(entry.get("problem", ""))),
                read_place(coordinates, ("engine_id", "host", "port"), "the router")
                if isinstance(coordinates, Mapping)
                else None,
                entry.get("draining") is True,
                clip(str(entry.get("breaker", ""))),
            )


def look_at(role: Role, address: Address, question: Question, pages: Pages) -> InstanceFacts:
    """One instance: its pages, then its side channel if a courier of ours is behind it."""
    seen = _ask_pages(InstanceFacts(role, address.url, place=address.place), pages)
    return ask_side_channel(seen, question)


def ask_side_channel(seen: InstanceFacts, question: Question) -> InstanceFacts:
    """The same instance, with what its side channel tells, if it is known where that is."""
    place = seen.place
    if place is None:
        return seen
    refused = side_channel.takes_connections(place, question.timeout_s)
    seen = dataclasses.replace(seen, is_open=not refused, told_problem=refused)
    if refused or not seen.engine.is_ours:
        return seen
    told, problem = side_channel.ask(place, question.timeout_s, question.keys, question.own_id)
    seen = dataclasses.replace(seen, told=told, told_problem=problem)
    if told is None:
        return seen
    try:
        return dataclasses.replace(seen, offer=check_offer(told.offer, Limits()))
    except HandshakeRejected as error:
        return dataclasses.replace(seen, offer_problem=str(error))


def _ask_pages(seen: InstanceFacts, pages: Pages) -> InstanceFacts:
    try:
        health = pages.get(f"{seen.url}/health")
        models = pages.get(f"{seen.url}/v1/models")
        page = pages.get(f"{seen.url}/kvcourier/instance")
        metrics = pages.get(f"{seen.url}/metrics")
    except NotAnswered as error:
        return dataclasses.replace(seen, problem=str(error))
    if models.status == 401:
        return dataclasses.replace(
            seen, health=health.status, problem="wants an API key, and refuses what it was shown"
        )
    numbers = _metrics(metrics)
    place = _place(page)
    return dataclasses.replace(
        seen,
        health=health.status,
        models=_models(models),
        clock=health.clock,
        metrics=numbers,
        engine=engine_of(place is not None, numbers.names if numbers else ()),
        place=seen.place or place,
    )


def _metrics(reply: Reply) -> Metrics | None:
    if reply.status != 200:
        return None
    return read_metrics(reply.content.decode(errors="replace"))


def _models(reply: Reply) -> tuple[str, ...]:
    body = reply.json()
    cards = body.get("data") if isinstance(body, dict) else None
    if reply.status != 200 or not isinstance(cards, list):
        return ()
    return tuple(str(card["id"]) for card in cards if isinstance(card, dict) and "id" in card)


def _place(reply: Reply) -> Place | None:
    """Where an instance says that its side channel is; None if it does not say it usably."""
    body = reply.json()
    if reply.status != 200 or not isinstance(body, Mapping):
        return None
    return read_place(body, ("engine_id", "side_channel_host", "side_channel_port"), "itself")


def read_place(body: Mapping[str, Any], keys: tuple[str, str, str], said_by: str) -> Place | None:
    """A place under these keys of an answer; None if it is none."""
    engine_id, host, port = (body.get(key) for key in keys)
    if not isinstance(engine_id, str) or not isinstance(host, str):
        return None
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        return None
    return Place(engine_id, host, port, said_by)
