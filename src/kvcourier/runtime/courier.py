"""The courier: one thread a rank that owns the rank's core, transport and side channel.

Decides when to look where: it sleeps until an event, a deadline or, while something is in flight,
the next poll. It does the core's commands and brings their answers back. Refuses to decide
anything about transfers, and never makes the engine's step wait.

Life of an event: `submit` (engine thread) -> `engine_calls` -> `Endpoint.handle` -> commands ->
their answers are events again, handled before the thread sleeps.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvcourier.config import CourierConfig, Limits
from kvcourier.core.commands import (
    Abandon,
    Command,
    Connect,
    Disconnect,
    PostRead,
    PostWrite,
    Probe,
    SendMessage,
    SendNotification,
    TakeDigest,
    Tell,
)
from kvcourier.core.endpoint import Endpoint
from kvcourier.core.events import (
    ConnectFailed,
    EndpointClosing,
    EngineEvent,
    Event,
    MessageReceived,
    PeerConnected,
    PeerLost,
    PeerReset,
    TimePassed,
)
from kvcourier.core.handshake import Facts, StagingOffer
from kvcourier.core.messages import (
    AnyMessage,
    CloseStream,
    GrantSlots,
    Landed,
    Nudge,
    OpenStream,
    Parcel,
    RefuseStream,
    encode,
    sender_fields,
)
from kvcourier.core.outcomes import Outcome, Report, Side
from kvcourier.core.wants import WriteTarget
from kvcourier.errors import (
    KVCourierError,
    MappingError,
    RemoteProtocolError,
    TransportError,
)
from kvcourier.ids import InstanceAddress, PeerRank
from kvcourier.layout import PackedSide, RankCache
from kvcourier.runtime.attention import Attention
from kvcourier.runtime.block_runs import hand_over
from kvcourier.runtime.contacts import Contacts
from kvcourier.runtime.digests import DigestTaker
from kvcourier.runtime.engine_calls import EngineCalls, Ready
from kvcourier.runtime.engine_link import EngineToken, decode_call
from kvcourier.runtime.handshakes import Handshakes
from kvcourier.runtime.incoming import Incoming
from kvcourier.runtime.metrics import CourierObserver
from kvcourier.runtime.packed_receiver import PackedReceiver
from kvcourier.runtime.packed_sender import PackedSender
from kvcourier.runtime.postings import Postings
from kvcourier.runtime.questions import Questions
from kvcourier.runtime.side_channel import Channel
from kvcourier.runtime.staging import StagingPair
from kvcourier.transport.interface import Transport

_log = logging.getLogger(__name__)
_BLOCKS_BACK = frozenset({Outcome.RELEASED, Outcome.RECALLED})
_POLL_READY_S = 0.001
"""Pause between looks at what a GPU has yet to compute. All of a prefill may pass meanwhile, and an
eager one is launched by a thread that needs the interpreter as well."""


class Courier:
    """Runs one rank's `Endpoint`.

    Args:
        endpoint: the rank's core; nobody else may call `handle`.
        cache: the rank's own cache, whose regions the transport has registered.
        transport: used from the courier's thread only, once it runs.
        staging: memory of the packed path, which the transport has registered; ours to close.
        channel: likewise.
        facts: ours, for the handshakes we ask for.
        observer: told of operations and dropped messages.
        on_report: called on the courier's thread with each report.
        on_death: called on the courier's thread when it ends by an error, kept in `error`.
        engine_token: proves calls of a scheduler in another process; see `engine_link`.
        tells_stories: whoever asks on the side channel is told a transfer's story.
        takes_digests: what digests need is made at once, and not with the first of them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        cache: RankCache,
        transport: Transport,
        staging: StagingPair,
        channel: Channel,
        facts: Facts,
        *,
        config: CourierConfig,
        limits: Limits,
        observer: CourierObserver,
        on_report: Callable[[Report], None],
        on_death: Callable[[], None],
        engine_token: EngineToken | None = None,
        tells_stories: bool = False,
        takes_digests: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self.error: BaseException | None = None
        self._transport = transport
        self._channel = channel
        self._staging = staging
        self._contacts = Contacts(cache, transport, channel)
        self._handshakes = Handshakes(self._contacts, channel, facts, limits)
        self._incoming = Incoming(self._contacts, channel, observer, limits)
        self._calls = EngineCalls(channel.wake)
        self._config = config
        self._limits = limits
        self._observer = observer
        self._on_report = on_report
        self._on_death = on_death
        self._engine_token = engine_token
        self._clock = clock
        self._unix_offset_s = time.time() - clock()
        self._uncounted: deque[EngineEvent] = deque()
        self._events: deque[Event] = deque()
        me = sender_fields(endpoint.me)
        self._postings = Postings(
            self._contacts,
            transport,
            PackedSender(
                staging.send,
                transport,
                me,
                self._send,
                config.staging.patience_s,
                endpoint.quarantine_limit_s,
                clock,
            ),
            config.staging.path,
            observer,
            self._nudge,
            clock,
        )
        self._receiver = PackedReceiver(
            staging.receive,
            me,
            self._send,
            endpoint.write_target,
            self._locate,
            endpoint.quarantine_limit_s,
            limits,
            clock,
        )
        self._digests = DigestTaker(cache, clock, is_expected=takes_digests)
        self._attention = Attention(config)
        self._questions = Questions(tells_stories, self.story, self._now_unix_s, channel.reply)
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, name=f"kv-courier-{cache.rank}", daemon=True
        )

    @property
    def thread_name(self) -> str:
        """Name of the courier's thread, as stories give it."""
        return self._thread.name

    @property
    def staging_offer(self) -> StagingOffer | None:
        """Where peers may write parcels."""
        return self._receiver.offer

    def prefers_write(self, command: PostRead) -> bool:
        """Whether the holder should rather write, packed, what this would READ."""
        staging = self._receiver.offer
        return staging is not None and self._postings.prefers_write(command, staging)

    def start(self) -> None:
        """Run from now on."""
        self._thread.start()

    def submit(self, event: EngineEvent, ready: Ready | None = None) -> None:
        """Hand an event over, from any thread; handled in order, soon.

        With `ready`, it has happened only once that returns True, and is handled then; later events
        of the same request wait behind it.
        """
        self._calls.submit(event, ready)

    def flush(self) -> threading.Event:
        """From any thread: is set once all that was submitted before is handled.

        Handled includes what follows at once: a transfer that an event leads to is posted, or
        refused. What waits for a peer's message follows later. Set as well when the courier ends.
        """
        handled = self._calls.flush()
        if self.error is not None:
            handled.set()
        return handled

    def raise_if_dead(self) -> None:
        """Raise KVCourierError if the thread has ended by an error: nothing moves any more."""
        if self.error is not None:
            raise KVCourierError(f"{self._thread.name} died: {self.error!r}") from self.error

    def close(self) -> None:
        """Stop the thread, then close transport and sockets; blocks for a moment; idempotent."""
        if self._stopping:
            return
        self._stopping = True
        if self._thread.is_alive():
            self._channel.wake()
            self._thread.join()
        self._transport.close()
        self._digests.close()
        self._staging.close()
        self._channel.close()

    @property
    def busy(self) -> bool:
        """Whether anything is in flight, from here or packed to here, or has yet to happen."""
        parts = (self._postings, self._receiver, self._digests)
        return any(part.busy for part in parts) or self._calls.has_unready

    def gauges(self) -> dict[str, int]:
        """Sizes of the core's tables and staging slots in use, by name; from any thread."""
        slots = self._postings.num_slots_used + self._receiver.num_slots_used
        return {**self.endpoint.gauges(), "staging_slots_used": slots}

    def story(self, key: str) -> list[dict[str, Any]]:
        """What happened to a transfer here, by request id or transfer id, in order, with times in
        unix seconds; empty if unknown or forgotten. From any thread."""
        told = {"rank": str(self.endpoint.me.rank), "thread": self.thread_name}
        return [
            {
                "at_unix_s": entry.at + self._unix_offset_s,
                "what": entry.what,
                **told,
                **entry.details,
            }
            for entry in self.endpoint.story(key) or ()
        ]

    def _now_unix_s(self) -> float:
        return self._clock() + self._unix_offset_s

    def next_deadline(self) -> float | None:
        """When `step` is due at the latest, on the courier's clock; None if nothing waits for
        time. What comes in, or ends, is due at once."""
        parts = (self.endpoint, self._postings, self._receiver, self._digests)
        deadlines = (part.next_deadline() for part in parts)
        return min((at for at in deadlines if at is not None), default=None)

    # The loop.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._channel.wait(self._patience())
                self._take_in()
                if self._next_look() <= self._clock():
                    self._look()
                if not self._is_streaming:
                    self._count()
                self._questions.answer_one()
            self._take_in()
            self._handle(EndpointClosing())
        except BaseException as error:
            # Not survivable: the core's state is unknown. The engine sees it at its next poll
            # and stops serving, rather than serving with KV of unknown state.
            self.error = error
            _log.exception("courier %s died", self._thread.name)
            # Peers see it at once; what this life has posted may be in flight all the same.
            self._channel.close()
            self._on_death()
        finally:
            self._calls.end()

    def step(self) -> None:
        """Take everything that has come and do what follows from it; never waits."""
        self._take_in()
        self._look()
        self._count()
        self._questions.answer_one()

    def _take_in(self) -> None:
        """Take what wakes us: calls of our engine, messages, deadlines, and what a GPU has done."""
        for call in self._calls.take():
            self._handle_call(call)
        for address, payload in self._channel.answers():
            self._on_handshake_answer(address, payload)
        for address, reason in self._channel.refusals():
            self._handle(ConnectFailed(address, reason))
        for identity, payload in self._channel.messages():
            self._on_payload(identity, payload)
        for peer in self._channel.resets():
            self._handle(PeerReset(peer))
        for probed in self._channel.signs():
            self._handle(probed)
        self._keep_time()

    def _look(self) -> None:
        """Look at the transport: what has arrived, and what has ended."""
        self._attention.on_look(self._clock())
        for notification in self._transport.notifications():
            if (arrived := self._incoming.from_data_path(notification)) is not None:
                self._attention.on_arrival(arrived.sender.peer())
                self._on_message(arrived)
        for event in self._postings.poll():
            self._handle(event)
        for landed in self._receiver.poll():
            self._handle(MessageReceived(landed))
        for taken in self._digests.poll():
            self._handle(taken)
        self._keep_time()

    def _keep_time(self) -> None:
        deadline = self.endpoint.next_deadline()
        if deadline is not None and deadline <= self._clock():
            self._handle(TimePassed())

    @property
    def _is_streaming(self) -> bool:
        """Whether a packed transfer is under way, from here or to here."""
        return self._postings.streaming or self._receiver.busy

    def _next_look(self) -> float:
        due = self._digests.next_deadline()
        if due is not None:
            return due
        return self._attention.next_look(
            self._clock(),
            streaming=self._is_streaming or self._digests.busy,
            posted=self._postings.busy,
        )

    def _patience(self) -> float:
        """How long to sleep: until the next look or deadline, whichever comes first."""
        if self._calls.has_new or self._questions:
            return 0.0
        now = self._clock()
        until = self._next_look()
        deadline = self.next_deadline()
        if deadline is not None:
            until = min(until, deadline)
        if self._calls.has_unready:
            until = min(until, now + _POLL_READY_S)
        return max(0.0, until - now)

    def _handle_call(self, event: EngineEvent) -> None:
        """Let the core take a call of our engine."""
        self._handle(event)
        self._uncounted.append(event)

    def _count(self) -> None:
        """Count the runs of the blocks handed over: now that nothing waits for us."""
        while self._uncounted:
            if (handed_over := hand_over(self._uncounted.popleft())) is not None:
                self._observer.handed_over(*handed_over)

    def _handle(self, event: Event) -> None:
        """Let the core take an event, and all events its commands lead to."""
        self._events.append(event)
        while self._events:
            for command in self.endpoint.handle(self._events.popleft(), self._clock()):
                self._do(command)

    # Commands.

    def _do(self, command: Command) -> None:
        match command:
            case PostWrite() | PostRead():
                self._events.extend(self._postings.start(command))
            case TakeDigest():
                self._events.extend(self._digests.start(command))
            case SendMessage(peer, message):
                self._send(peer, encode(message))
            case SendNotification(peer, address, message):
                self._notify(peer, address, encode(message))
            case Tell(report):
                self._tell(report)
            case Connect(address, mode):
                if (failed := self._handshakes.ask(address, mode)) is not None:
                    self._events.append(failed)
            case Disconnect(address):
                self._disconnect(address)
            case Probe(peer, timeout_s):
                self._channel.look_at(peer, timeout_s)
            case Abandon(operation_id):
                self._postings.abandon(operation_id)
                self._digests.abandon(operation_id)

    def _tell(self, report: Report) -> None:
        if report.outcome in _BLOCKS_BACK and report.side is Side.WANT:
            self._receiver.forget(report.request_id)
        self._on_report(report)

    def _send(self, peer: PeerRank, payload: bytes) -> bool:
        sent = self._channel.send(peer, payload)
        if not sent:
            self._observer.dropped("no_way_to_peer")
        return sent

    def _nudge(self, peer: PeerRank) -> None:
        """Tell a peer to look. Where there is no way, it does so in a while by itself."""
        self._channel.send(peer, encode(Nudge(sender_fields(self.endpoint.me))))

    def _disconnect(self, address: InstanceAddress) -> None:
        self._channel.drop(address)
        for peer in self._contacts.peers_at(address):
            self._postings.lose(peer, f"{address} was disconnected")
            self._receiver.lose(peer)
        self._contacts.remove(address)

    def _notify(self, peer: PeerRank, address: InstanceAddress, payload: bytes) -> None:
        try:
            contact = self._contacts.get(address, peer)
            self._transport.notify(contact.agent(peer.rank), payload)
            self._nudge(peer)
        except (TransportError, RemoteProtocolError) as error:
            self._lose(address, peer, str(error))

    def _lose(self, address: InstanceAddress, peer: PeerRank, reason: str) -> None:
        self._events.append(PeerLost(address, peer.incarnation, f"{peer} is gone: {reason}"))

    # What comes in.

    def _on_payload(self, identity: bytes, payload: bytes) -> None:
        """What a socket has got: a call of our engine, a question, or a peer's message."""
        if self._on_engine_call(payload) or self._questions.take(identity, payload):
            return
        message = self._incoming.from_socket(identity, payload)
        if message is not None:
            self._on_message(message)

    def _on_message(self, message: AnyMessage) -> None:
        """One that has come by its way, and from whom it says."""
        match message:
            case GrantSlots() | RefuseStream():
                self._postings.on_message(message)
            case Nudge():
                self._attention.on_nudge(message.sender.peer(), self._clock())
            case OpenStream() | CloseStream() | Parcel():
                self._receiver.on_message(message)
            case _:
                self._handle(MessageReceived(message))

    def _on_engine_call(self, payload: bytes) -> bool:
        """Whether it was a call of our scheduler in another process."""
        try:
            event = decode_call(payload, self._engine_token, self._limits)
        except RemoteProtocolError as error:
            _log.error("%s", error)
            return True
        if event is not None and self._calls.accept(event):
            self._handle_call(event)
        return event is not None

    def _on_handshake_answer(self, address: InstanceAddress, payload: bytes) -> None:
        event = self._handshakes.answered(address, payload)
        self._handle(event)
        if isinstance(event, PeerConnected):
            self._contacts.load_agents(address, self.endpoint.partners(address))

    # The packed path.

    def _locate(self, peer: PeerRank, target: WriteTarget, landed: Landed) -> list[PackedSide]:
        """Our side of a tile that a peer sends; raises MappingError."""
        contact = self._contacts.of(peer)
        if contact is None:
            raise MappingError(f"{peer} is not connected")
        return contact.mapping(peer.rank).pack_target(target, landed.layers)
