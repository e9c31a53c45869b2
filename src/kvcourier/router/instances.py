"""What is known of each instance.

Decides where a prefill instance's KV is found, which modes an instance takes part in, whether it
was reachable when last asked, and which pair serves a call. Refuses to know dispatches.

Coordinates belong to one life of a process, so they are asked for again whenever a connection to
it failed, whenever an answer shows another incarnation, and every few seconds.
"""

import asyncio
import itertools
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from kvcourier.config import TransferMode
from kvcourier.errors import shorten
from kvcourier.ids import EngineId, Incarnation
from kvcourier.router.config import MAX_PARALLEL_SIZE, Coordinates, InstanceSpec, Timeouts
from kvcourier.router.legs import Params, read_object
from kvcourier.router.policy import Candidate, choose

_log = logging.getLogger(__name__)

INSTANCE_PATH = "/kvcourier/instance"


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """What one life of an instance said of itself."""

    coordinates: Coordinates
    incarnation: Incarnation
    modes: frozenset[TransferMode]
    model: str
    block_size: int


def parse_instance_info(data: object) -> InstanceInfo:
    """Read the answer to `GET /kvcourier/instance`.

    Raises:
        ValueError: a key is missing or of the wrong kind; the message names it.
    """
    if not isinstance(data, dict):
        raise ValueError("expected a JSON object")
    modes = data.get("modes")
    if not isinstance(modes, list):
        raise ValueError(f"modes: expected a list, found {shorten(modes)}")
    return InstanceInfo(
        coordinates=Coordinates(
            engine_id=EngineId(_text(data, "engine_id")),
            host=_text(data, "side_channel_host"),
            port=_number(data, "side_channel_port", 65535),
            tp_size=_number(data, "tp_size", MAX_PARALLEL_SIZE),
            pp_size=_number(data, "pp_size", MAX_PARALLEL_SIZE),
        ),
        incarnation=Incarnation(_text(data, "incarnation")),
        # Modes of a later release are no concern of ours.
        modes=frozenset(mode for mode in TransferMode if mode in modes),
        model=_text(data, "model"),
        block_size=_number(data, "block_size", 1 << 20),
    )


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key}: expected a string, found {shorten(value)}")
    return value


def _number(data: Mapping[str, Any], key: str, high: int) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ValueError(f"{key}: expected a whole number from 1 to {high}, found {shorten(value)}")
    return value


class Instance:
    """One instance and the latest knowledge of it."""

    def __init__(self, spec: InstanceSpec, client: httpx.AsyncClient, timeouts: Timeouts) -> None:
        self.spec = spec
        self.info: InstanceInfo | None = None
        self.reachable = True
        self.problem = "not asked yet"
        self.in_flight = 0
        self._client = client
        self._timeouts = timeouts
        self._ask_again = asyncio.Event()

    @property
    def name(self) -> str:
        """How answers, logs and metrics call it."""
        return self.spec.name

    @property
    def coordinates(self) -> Coordinates | None:
        """Where its KV is found: as configured, else as it said, else None."""
        return self.spec.coordinates or (self.info.coordinates if self.info else None)

    def takes_part_in(self, mode: TransferMode) -> bool:
        """Whether it may serve `mode`: unless it said otherwise."""
        return self.info is None or mode in self.info.modes

    def lost(self) -> None:
        """A connection to it failed: what was known may be of a life that is over."""
        if self.reachable:
            _log.info("%s is lost", self.name)
        self.reachable = False
        self.forget()

    def forget(self) -> None:
        """Ask it again before its coordinates are used."""
        self.info = None
        self._ask_again.set()

    def check_handoff(self, handoff: Params) -> None:
        """Compare what its answer says of it with what is known; forget that if it differs."""
        if self.info is None:
            return
        known = {
            "remote_engine_id": self.info.coordinates.engine_id,
            "remote_incarnation": self.info.incarnation,
            "remote_port": self.info.coordinates.port,
        }
        if any(handoff.get(key) not in (None, value) for key, value in known.items()):
            _log.info("%s is another incarnation than the one known", self.name)
            self.forget()

    async def learn(self) -> None:
        """Ask it about itself, once, in bounded time. `problem` says what is not known."""
        try:
            response = await self.get(INSTANCE_PATH)
        except (httpx.HTTPError, TimeoutError) as error:
            self.reachable = False
            self.info = None
            self.problem = f"cannot be reached ({error or 'no answer in time'})"
            return
        if not self.reachable:
            _log.info("%s is reachable", self.name)
        self.reachable = True
        if response.status_code != 200:
            # An engine that is not ours. Pull needs nothing; push needs configured coordinates.
            self.info = None
            self.problem = f"does not tell (GET {INSTANCE_PATH} gave {response.status_code})"
            return
        try:
            self.info = parse_instance_info(read_object(response.content))
            self.problem = ""
        except ValueError as error:
            self.info = None
            self.problem = f"tells something unusable: {error}"

    async def watch(self) -> None:
        """Keep asking until cancelled: soon after it was lost, then ever more seldom."""
        pause_s = self._timeouts.backoff_s
        while True:
            self._ask_again.clear()
            await self.learn()
            if self.reachable:
                pause_s, wait_s = self._timeouts.backoff_s, self._timeouts.refresh_s
            else:
                wait_s, pause_s = pause_s, min(2 * pause_s, self._timeouts.backoff_max_s)
            try:
                async with asyncio.timeout(wait_s):
                    await self._ask_again.wait()
            except TimeoutError:
                pass

    async def get(self, path: str) -> httpx.Response:
        """GET one of its pages.

        Raises:
            httpx.HTTPError: it cannot be reached.
            TimeoutError: it did not answer in time.
        """
        async with asyncio.timeout(self._timeouts.learn_s):
            return await self._client.get(self.spec.url + path)

    def describe(self) -> dict[str, Any]:
        """What is known, for `GET /kvcourier/instances`."""
        where = self.coordinates
        info = self.info
        return {
            "name": self.name,
            "url": self.spec.url,
            "reachable": self.reachable,
            "in_flight": self.in_flight,
            "problem": self.problem,
            "coordinates": None
            if where is None
            else {
                "engine_id": where.engine_id,
                "host": where.host,
                "port": where.port,
                "tp_size": where.tp_size,
                "pp_size": where.pp_size,
                "configured": self.spec.coordinates is not None,
            },
            "incarnation": info.incarnation if info else None,
            "modes": sorted(info.modes) if info else None,
            "model": info.model if info else None,
            "block_size": info.block_size if info else None,
        }


class Side:
    """All prefill, or all decode instances, and whose turn it is."""

    def __init__(self, instances: Collection[Instance], policy: str) -> None:
        self.instances = tuple(instances)
        self._policy = policy
        self._turns: Iterator[int] = itertools.count()

    def pick(self, mode: TransferMode, tried: Collection[Instance]) -> Instance | None:
        """The next instance for `mode` that was not tried yet, or None if there is none."""
        candidates = [
            Candidate(
                usable=instance.takes_part_in(mode) and instance not in tried,
                reachable=instance.reachable,
                in_flight=instance.in_flight,
            )
            for instance in self.instances
        ]
        index = choose(self._policy, candidates, next(self._turns))
        return None if index is None else self.instances[index]
