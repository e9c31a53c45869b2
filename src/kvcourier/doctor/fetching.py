"""A D for the length of two prompts: an endpoint of its own, with scratch memory for a cache.

Decides what is asked of an instance so that its KV can be fetched by pull and by push, and what is
measured on the way. Refuses to touch any other block than those of its own prompts: it gets them as
any D would, under a lease, and lets go of them.
"""

import itertools
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvcourier.config import (
    CourierConfig,
    EndpointConfig,
    Limits,
    PathPolicy,
    StagingConfig,
    TransferMode,
)
from kvcourier.core.handshake import PeerInstance, check_offer
from kvcourier.core.inquiry import Told
from kvcourier.core.outcomes import Outcome
from kvcourier.core.params import HolderAddress, PullIntent, PushIntent, parse_params
from kvcourier.doctor import side_channel
from kvcourier.doctor.errands import Fetched, FetchedTwice, FetchTwice, Measured
from kvcourier.doctor.facts import Place
from kvcourier.doctor.pages import NotAnswered, Pages, Reply
from kvcourier.doctor.prompting import handoff_of, hold_body
from kvcourier.doctor.scratch import COPIES, Scratch
from kvcourier.errors import KVCourierError
from kvcourier.ids import AgentName, EngineId, RequestId, TransferId
from kvcourier.layout.geometry import MemoryKind, Region, TokenSpan
from kvcourier.runtime.channel_keys import read_keys
from kvcourier.runtime.endpoint import KvEndpoint
from kvcourier.runtime.interface import let_holder_go
from kvcourier.transport.interface import Descriptors, Operation, TransferState
from kvcourier.transport.nixl import NixlTransport, nixl_factory

_PIECES = 512
_ROUNDS = 5
_MEASURE_BYTES = 64 << 20


class FetchFailed(KVCourierError):
    """A fetch did not work; the message says why."""


def fetch_twice(errand: FetchTwice) -> FetchedTwice:
    """Do it; blocks. Whatever goes wrong is in the result."""
    try:
        with _visitor(errand) as visitor:
            return visitor.fetch_all()
    except (KVCourierError, OSError) as error:
        return FetchedTwice(problem=str(error))


@contextmanager
def _visitor(errand: FetchTwice) -> Iterator["_Visitor"]:
    secret, peers = (
        None if path is None else Path(path) for path in (errand.secret_key_file, errand.peer_keys)
    )
    keys = read_keys(secret, peers, EngineId(errand.own_id))
    place = Place(errand.engine_id, errand.host, errand.port)
    told, problem = side_channel.ask(place, errand.timeout_s, keys, EngineId(errand.own_id))
    if told is None:
        raise FetchFailed(problem)
    instance = check_offer(told.offer, Limits())
    scratch = Scratch(instance, errand.tokens)
    # Direct only: the packed path is a matter of speed, and takes memory.
    staging = StagingConfig(path=PathPolicy.DIRECT, send_bytes=0, receive_bytes=0)
    courier = CourierConfig(backends=tuple(told.about.backends), staging=staging)
    endpoint = KvEndpoint(
        EndpointConfig(
            engine_id=EngineId(errand.own_id),
            model=told.offer.facts.model,
            cache_format=told.offer.facts.cache_format,
            side_channel_host=errand.own_host or way_to(errand.host, errand.port),
            side_channel_port=0,
            courier=courier,
            keys=keys,
        ),
        scratch.caches,
        nixl_factory(courier),
    )
    woken = threading.Event()
    endpoint.start(woken.set)
    try:
        with Pages(errand.api_key, errand.timeout_s) as pages:
            yield _Visitor(errand, told, instance, scratch, endpoint, woken, pages)
    finally:
        endpoint.close()


def way_to(host: str, port: int) -> str:
    """Our own address on the way to a host. Sends nothing."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


@dataclass(frozen=True, slots=True)
class _Visitor:
    errand: FetchTwice
    told: Told
    instance: PeerInstance
    scratch: Scratch
    endpoint: KvEndpoint
    woken: threading.Event
    pages: Pages

    def fetch_all(self) -> FetchedTwice:
        """By every mode, and compare."""
        self._let_go()
        tokens = self._count_tokens()
        fetched: list[Fetched] = []
        measured: list[Measured] = []
        for copy, mode in enumerate(self.errand.modes):
            name = RequestId(f"{self.errand.own_id}-{secrets.token_hex(8)}")
            began = time.monotonic()
            reason = ""
            try:
                if mode is TransferMode.PULL:
                    measured += self._pull(name, copy, tokens)
                else:
                    self._push(name, copy, tokens)
            except (KVCourierError, NotAnswered) as error:
                reason = str(error)
            fetched.append(Fetched(mode, reason, tokens, time.monotonic() - began))
        whole = len(fetched) == COPIES and not any(one.reason for one in fetched)
        return FetchedTwice(
            fetched=fetched,
            compared=self.scratch.compare(tokens) if whole else None,
            measured=measured[0] if measured else None,
        )

    def _let_go(self) -> None:
        """Of a prompt that was held for us only so that we learn where."""
        if self.errand.handoff is not None:
            intent = parse_params(self.errand.handoff, Limits())
            if isinstance(intent, PullIntent):
                name = RequestId(f"{self.errand.own_id}-{secrets.token_hex(8)}")
                let_holder_go(self.endpoint, name, intent)

    def _count_tokens(self) -> int:
        """Tokens to fetch: all of the prompt but the last, as vLLM's D asks for.

        The instance computes the prompt for it, so that its prefix cache then has one copy of the
        KV from which both fetches are served.
        """
        body = {"model": self.errand.model, "prompt": self.errand.prompt, "max_tokens": 1}
        usage = self._post(body).json().get("usage")
        counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(counted, int) or not 1 < counted <= self.errand.tokens:
            raise FetchFailed(f"the prompt is {counted} tokens; expected 2 to {self.errand.tokens}")
        return counted - 1

    def _pull(self, name: RequestId, copy: int, tokens: int) -> list[Measured]:
        intent = parse_params(self._compute(name), Limits())
        if not isinstance(intent, PullIntent):
            raise FetchFailed("its answer has no kv_transfer_params by which a D could READ")
        self.endpoint.expect(name, intent)
        # Heartbeats keep the blocks for us meanwhile.
        measured = measure(self.instance, intent, self.told.about.backends)
        self.endpoint.receive(name, self.scratch.blocks(copy, tokens), TokenSpan(0, tokens))
        self._wait(name)
        return measured

    def _push(self, name: RequestId, copy: int, tokens: int) -> None:
        errand, instance = self.errand, self.instance
        holder = HolderAddress(
            EngineId(errand.engine_id),
            errand.host,
            errand.port,
            instance.tp_size,
            instance.pp_size,
        )
        self.endpoint.expect(name, PushIntent(holder, None, TransferId(name)))
        self.endpoint.receive(name, self.scratch.blocks(copy, tokens), TokenSpan(0, tokens))
        try:
            self._compute(name)
        except KVCourierError:
            self.endpoint.abort(name)
            raise
        self._wait(name)

    def _compute(self, name: str) -> dict[str, Any]:
        """Have the instance compute the prompt and hold its KV: its kv_transfer_params."""
        errand = self.errand
        reply = self._post(hold_body(errand.model, errand.prompt, name))
        params = handoff_of(reply)
        if params is None:
            raise FetchFailed("its answer to do_remote_decode has no kv_transfer_params")
        return params

    def _post(self, body: dict[str, Any]) -> Reply:
        reply = self.pages.post(f"{self.errand.url}/v1/completions", body)
        if reply.status != 200 or not isinstance(reply.json(), dict):
            raise FetchFailed(f"the prompt was answered {reply.status}: {reply.message()}")
        return reply

    def _wait(self, request_id: RequestId) -> None:
        """Until the request's blocks are ours again."""
        deadline = time.monotonic() + self.errand.timeout_s
        failure = ""
        while time.monotonic() < deadline:
            for report in self.endpoint.poll():
                if report.request_id != request_id:
                    continue
                if report.outcome is Outcome.RECEIVE_FAILED:
                    failure = report.reason
                if report.outcome is Outcome.RELEASED:
                    if failure:
                        raise FetchFailed(failure)
                    return
            self.woken.wait(0.05)
            self.woken.clear()
        raise FetchFailed(failure or f"nothing came within {self.errand.timeout_s:g} s")


def measure(instance: PeerInstance, intent: PullIntent, backends: list[str]) -> list[Measured]:
    """READ the blocks of a prompt that is held for us again and again, into memory of our own."""
    contact = instance.ranks[min(instance.ranks)]
    group = contact.cache.groups[0]
    geometry, placement = group.geometry, group.placement
    places = [
        group.regions[int(placement.region[row, column])].address
        + int(placement.offset_bytes[row, column])
        + block * int(placement.block_stride_bytes[row, column])
        for row, column in np.ndindex(placement.region.shape)
        for block in intent.block_ids[0]
    ]
    size = geometry.block_bytes
    count = max(1, min(_PIECES, _MEASURE_BYTES // size))
    if not places:
        return []
    # Every other slot, so that neighbours are not joined into one piece.
    memory = np.zeros(2 * count * size, np.uint8)
    remote, local = np.zeros((2, count, 3), np.int64)
    remote[:, 0] = list(itertools.islice(itertools.cycle(places), count))
    remote[:, 2] = group.regions[0].device_id
    local[:, 0] = memory.ctypes.data + 2 * size * np.arange(count)
    remote[:, 1] = local[:, 1] = size
    name = AgentName(f"kvcourier-doctor-{secrets.token_hex(6)}")
    transport = NixlTransport(name, backends=backends)
    try:
        transport.register([Region(memory.ctypes.data, memory.nbytes, MemoryKind.DRAM, 0)])
        agent = transport.connect(contact.agent_metadata)
        ours = Descriptors(local, MemoryKind.DRAM)
        theirs = Descriptors(remote, group.regions[0].memory)
        rounds = [_timed(transport, agent, ours, theirs) for _ in range(_ROUNDS)]
    finally:
        transport.close()
    # The first makes connections.
    post_s, total_s = (sorted(times)[len(times) // 2] for times in zip(*rounds[1:], strict=True))
    return [Measured(count, size, post_s, total_s)]


def _timed(
    transport: NixlTransport, agent: AgentName, ours: Descriptors, theirs: Descriptors
) -> tuple[float, float]:
    """Seconds of posting, and of all of it."""
    began = time.perf_counter()
    handle = transport.post(Operation.READ, agent, local=ours, remote=theirs)
    posted = time.perf_counter()
    while (status := transport.poll(handle)).state is TransferState.IN_FLIGHT:
        if time.perf_counter() - began > 30:
            raise FetchFailed("a READ of the prompt's blocks does not end")
    transport.release(handle)
    if status.state is TransferState.FAILED:
        raise FetchFailed(f"a READ of the prompt's blocks failed: {status.reason}")
    return posted - began, time.perf_counter() - began
