"""What is known of each instance.

Decides where a prefill instance's KV is found, which modes an instance takes part in, and whether
it was reachable, busy or failing when last asked or used. Refuses to know dispatches, and who is
chosen (`sides`).

Coordinates belong to one life of a process, so they are asked for again whenever a connection to
it failed, whenever an answer shows another incarnation, and every few seconds.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvcourier.config import TransferMode
from kvcourier.errors import shorten
from kvcourier.ids import EngineId, Incarnation, TransferId
from kvcourier.router.breaker import Breaker, BreakerSettings
from kvcourier.router.config import MAX_PARALLEL_SIZE, Coordinates, InstanceSpec, Timeouts
from kvcourier.router.legs import Params, read_object
from kvcourier.router.load import Load, read_load
from kvcourier.router.pace import Pace, Progress
from kvcourier.router.policy import Candidate
from kvcourier.router.prompts import PrefixMemory, Prompt

_log = logging.getLogger(__name__)

INSTANCE_PATH = "/kvcourier/instance"
_MAX_PAGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """What one life of an instance said of itself."""

    coordinates: Coordinates
    incarnation: Incarnation
    modes: frozenset[TransferMode]
    model: str
    block_size: int
    draining: bool = False


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
        draining=data.get("draining") is True,
    )


def parse_progress(data: Mapping[str, Any]) -> Progress:
    """Read the answer to `GET /kvcourier/transfers/ID`.

    Raises:
        ValueError: a key is missing or of the wrong kind; the message names it.
    """
    return Progress(_count(data, "num_tokens"), _count(data, "num_prompt_tokens"))


def _count(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(f"{key}: expected a whole number from 0, found {shorten(value)}")
    return value


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


@dataclass(slots=True)
class Work:
    """What we have sent to an instance, and what it said of itself.

    Attributes:
        in_flight: legs of ours that run there.
        num_kept: dispatches whose prompt it has computed, and D has not begun to answer.
        backlog: parts of prompts in them that it was not sent before.
        load: what it said when it was last asked; None: nothing of use.
        in_flight_then: our legs when it was last asked.
        prefixes: beginnings of the prompts that it was sent.
        pace: how long it takes for a prompt.
    """

    prefixes: PrefixMemory
    pace: Pace = field(default_factory=Pace)
    in_flight: int = 0
    num_kept: int = 0
    backlog: int = 0
    load: Load | None = None
    in_flight_then: int = 0

    @property
    def num_requests(self) -> int:
        """What it has to do: others' requests when it was asked, and ours now."""
        if self.load is None:
            return self.in_flight
        return max(0, self.load.num_requests - self.in_flight_then) + self.in_flight

    @property
    def num_owed(self) -> int:
        """What must have ended before it may go."""
        return self.in_flight + self.num_kept

    def missing(self, prompt: Prompt) -> int:
        """Parts of the prompt that it was not sent before."""
        return max(0, prompt.num_parts - self.prefixes.num_known(prompt))


@dataclass(frozen=True, slots=True)
class InstanceOptions:
    """What all instances have in common.

    Attributes:
        max_prefix_parts: beginnings of prompts remembered of each.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    max_prefix_parts: int = 1 << 16


class Instance:
    """One instance and the latest knowledge of it."""

    def __init__(
        self,
        spec: InstanceSpec,
        client: httpx.AsyncClient,
        options: InstanceOptions | None = None,
    ) -> None:
        options = options or InstanceOptions()
        self.spec = spec
        self.info: InstanceInfo | None = None
        self.reachable = True
        self.is_drained = False
        self.problem = "not asked yet"
        self.work = Work(PrefixMemory(options.max_prefix_parts))
        self.breaker = Breaker(options.breaker)
        self._client = client
        self._timeouts = options.timeouts
        self._ask_again = asyncio.Event()

    @property
    def name(self) -> str:
        """How answers, logs and metrics call it."""
        return self.spec.name

    @property
    def coordinates(self) -> Coordinates | None:
        """Where its KV is found: as configured, else as it said, else None."""
        return self.spec.coordinates or (self.info.coordinates if self.info else None)

    @property
    def is_draining(self) -> bool:
        """Whether it gets no new requests: we were told so, or it says so."""
        return self.is_drained or (self.info is not None and self.info.draining)

    def takes_part_in(self, mode: TransferMode) -> bool:
        """Whether it may serve `mode`: unless it said otherwise."""
        return self.info is None or mode in self.info.modes

    def candidate(self, mode: TransferMode | None, prompt: Prompt, usable: bool) -> Candidate:
        """How a policy sees it; no mode means that no KV is to be moved."""
        fits = mode is None or self.takes_part_in(mode)
        return Candidate(
            name=self.name,
            usable=usable and fits and not self.is_draining,
            reachable=self.reachable,
            trusted=self.breaker.allows(time.monotonic()),
            num_requests=self.work.num_requests,
            kv_used=self.work.load.kv_used if self.work.load else 0.0,
            backlog=self.work.backlog,
            num_known=self.work.prefixes.num_known(prompt),
        )

    # What our legs tell.

    def begin(self, prompt: Prompt) -> int:
        """It is sent a leg; give `end` what this returns."""
        missing = self.work.missing(prompt)
        self.work.prefixes.add(prompt)
        self.work.in_flight += 1
        self.work.backlog += missing
        self.breaker.begin(time.monotonic())
        return missing

    def end(self, missing: int) -> None:
        """A leg has ended, however."""
        self.work.in_flight -= 1
        self.work.backlog -= missing
        self.breaker.ended()

    def judge(self, is_well: bool) -> None:
        """A leg went well, or failed by its fault."""
        if is_well:
            self.breaker.succeeded()
            return
        before = self.breaker.num_opened
        self.breaker.failed(time.monotonic())
        if self.breaker.num_opened > before:
            _log.warning("%s keeps failing and is left alone for a while", self.name)

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

    # What it tells.

    async def learn(self) -> None:
        """Ask it about itself, once, in bounded time. `problem` says what is not known."""
        before = self.info
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
        if before and self.info and before.incarnation != self.info.incarnation:
            self.work.prefixes.clear()

    async def learn_load(self) -> None:
        """Ask it how busy it is, once, in bounded time. What cannot be used counts as nothing."""
        in_flight = self.work.in_flight
        try:
            response = await self.get("/metrics")
            usable = response.is_success and len(response.content) <= _MAX_PAGE_BYTES
            load = read_load(response.text, self.spec.dp_rank) if usable else None
        except (httpx.HTTPError, TimeoutError, ValueError):
            load = None
        self.work.load, self.work.in_flight_then = load, in_flight

    async def progress(self, transfer_id: TransferId) -> Progress | None:
        """How far it is with a prompt; None if it does not say, or does not know it."""
        if self.info is None:
            return None
        try:
            response = await self.get(f"/kvcourier/transfers/{transfer_id}")
            return parse_progress(read_object(response.content)) if response.is_success else None
        except (httpx.HTTPError, TimeoutError, ValueError):
            return None

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

    async def watch_load(self) -> None:
        """Keep asking how busy it is, until cancelled."""
        while True:
            await self.learn_load()
            await asyncio.sleep(self._timeouts.load_s)

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
        load = self.work.load
        return {
            "name": self.name,
            "url": self.spec.url,
            "reachable": self.reachable,
            "draining": self.is_draining,
            "breaker": self.breaker.state(time.monotonic()),
            "in_flight": self.work.in_flight,
            "load": load and {"num_requests": load.num_requests, "kv_used": load.kv_used},
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
