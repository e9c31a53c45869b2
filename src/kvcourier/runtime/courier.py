"""The courier: one thread a rank that owns the rank's core, transport and side channel.

Decides when to look where: it sleeps until an event, a deadline or, while something is in flight,
the next poll. It does the core's commands and brings their answers back. Refuses to decide
anything about transfers, and never makes the engine's step wait.

Life of an event: `submit` (engine thread) -> inbox -> `Endpoint.handle` -> commands -> their
answers are events again, handled before the thread sleeps.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvcourier.config import CourierConfig, Limits, TransferMode
from kvcourier.core.commands import (
    Abandon,
    Command,
    Connect,
    Disconnect,
    PostRead,
    PostWrite,
    SendMessage,
    SendNotification,
    Tell,
)
from kvcourier.core.endpoint import Endpoint
from kvcourier.core.events import (
    ConnectFailed,
    Event,
    MessageReceived,
    OperationId,
    PeerConnected,
    PeerLost,
    PostRefused,
    TimePassed,
    TransferCompleted,
    TransferFailed,
    TransferPosted,
)
from kvcourier.core.handshake import Facts, read_answer, request
from kvcourier.core.messages import ON_DATA_PATH, AnyMessage, Landed, decode, encode
from kvcourier.core.outcomes import Report
from kvcourier.errors import (
    HandshakeRejected,
    KVCourierError,
    MappingError,
    PostFailed,
    RemoteProtocolError,
    TransportError,
)
from kvcourier.errors import PeerLost as PeerLostError
from kvcourier.ids import InstanceAddress, PeerRank
from kvcourier.layout.geometry import RankCache
from kvcourier.runtime.contacts import Contacts
from kvcourier.runtime.engine_link import EngineToken, decode_call
from kvcourier.runtime.metrics import CourierObserver
from kvcourier.runtime.side_channel import SideChannel, sender_matches
from kvcourier.transport.interface import (
    Notification,
    Operation,
    TransferHandle,
    TransferState,
    Transport,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Flight:
    """One posted operation as the transport knows it."""

    handle: TransferHandle
    operation: Operation
    peer: PeerRank
    address: InstanceAddress
    posted_at: float


class Courier:
    """Runs one rank's `Endpoint`.

    Args:
        endpoint: the rank's core; nobody else may call `handle`.
        cache: the rank's own cache, whose regions the transport has registered.
        transport: used from the courier's thread only, once it runs.
        channel: likewise.
        facts: ours, for the handshakes we ask for.
        observer: told of operations and dropped messages.
        on_report: called on the courier's thread with each report.
        on_death: called on the courier's thread when it ends by an error, kept in `error`.
        engine_token: proves calls of a scheduler in another process; see `engine_link`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        cache: RankCache,
        transport: Transport,
        channel: SideChannel,
        facts: Facts,
        *,
        config: CourierConfig,
        limits: Limits,
        observer: CourierObserver,
        on_report: Callable[[Report], None],
        on_death: Callable[[], None],
        engine_token: EngineToken | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self.error: BaseException | None = None
        self._transport = transport
        self._channel = channel
        self._contacts = Contacts(cache, transport, channel)
        self._facts = facts
        self._config = config
        self._limits = limits
        self._observer = observer
        self._on_report = on_report
        self._on_death = on_death
        self._engine_token = engine_token
        self._clock = clock
        self._inbox: deque[Event] = deque()
        self._events: deque[Event] = deque()
        self._flights: dict[OperationId, _Flight] = {}
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, name=f"kv-courier-{cache.rank}", daemon=True
        )

    @property
    def thread_name(self) -> str:
        """Name of the courier's thread, as stories give it."""
        return self._thread.name

    def start(self) -> None:
        """Run from now on."""
        self._thread.start()

    def submit(self, event: Event) -> None:
        """Hand an event over, from any thread; handled in order, soon."""
        self._inbox.append(event)
        self._channel.wake()

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
        self._channel.close()

    # The loop.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._channel.wait(self._patience())
                self.step()
        except BaseException as error:
            # Not survivable: the core's state is unknown. The engine sees it at its next poll
            # and stops serving, rather than serving with KV of unknown state.
            self.error = error
            _log.exception("courier %s died", self._thread.name)
            self._on_death()

    def step(self) -> None:
        """Take everything that has come and do what follows from it; never waits."""
        while self._inbox:
            self._handle(self._inbox.popleft())
        for address, payload in self._channel.answers():
            self._on_handshake_answer(address, payload)
        for identity, payload in self._channel.messages():
            self._on_side_message(identity, payload)
        for notification in self._transport.notifications():
            self._on_notification(notification)
        for operation_id, flight in list(self._flights.items()):
            self._poll(operation_id, flight)
        deadline = self.endpoint.next_deadline()
        if deadline is not None and deadline <= self._clock():
            self._handle(TimePassed())

    def _patience(self) -> float:
        """How long to sleep: until the next poll or deadline, whichever comes first."""
        if self._inbox:
            return 0.0
        busy = bool(self._flights) or self.endpoint.awaits_notification
        patience = self._config.poll_busy_s if busy else self._config.poll_idle_s
        deadline = self.endpoint.next_deadline()
        if deadline is not None:
            patience = min(patience, max(0.0, deadline - self._clock()))
        return patience

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
                self._post(command)
            case SendMessage(peer, message):
                if not self._channel.send(peer, encode(message)):
                    self._observer.dropped("no_way_to_peer")
            case SendNotification(peer, address, message):
                self._notify(peer, address, encode(message))
            case Tell(report):
                self._on_report(report)
            case Connect(address, mode):
                self._connect(address, mode)
            case Disconnect(address):
                self._channel.drop(address)
                self._contacts.remove(address)
            case Abandon(operation_id):
                flight = self._flights.pop(operation_id, None)
                if flight is not None:
                    self._transport.release(flight.handle)

    def _post(self, command: PostWrite | PostRead) -> None:
        operation = Operation.WRITE if isinstance(command, PostWrite) else Operation.READ
        try:
            contact = self._contacts.get(command.address, command.peer)
            agent = contact.agent(command.peer.rank)
            mapping = contact.mapping(command.peer.rank)
            notice = b""
            if isinstance(command, PostWrite):
                sides = mapping.for_write(command)
                notice = encode(command.notice)
            else:
                sides = mapping.for_read(command)
            started = self._clock()
            handle = self._transport.post(
                operation, agent, local=sides.local, remote=sides.remote, notice=notice
            )
        except (MappingError, PostFailed, RemoteProtocolError, PeerLostError) as error:
            self._observer.failed(operation)
            self._events.append(PostRefused(command.operation_id, str(error)))
            if isinstance(error, PeerLostError):
                self._lose(command.address, command.peer, str(error))
            return
        now = self._clock()
        self._flights[command.operation_id] = _Flight(
            handle, operation, command.peer, command.address, started
        )
        self._observer.posted(operation, now - started, sides.num_bytes, len(sides.local))
        self._events.append(
            TransferPosted(
                command.operation_id,
                len(sides.local),
                sides.num_bytes,
                now - started,
                threading.current_thread().name,
            )
        )

    def _poll(self, operation_id: OperationId, flight: _Flight) -> None:
        status = self._transport.poll(flight.handle)
        if status.state is TransferState.IN_FLIGHT:
            return
        # An event handled before in this round may have abandoned it.
        if self._flights.pop(operation_id, None) is None:
            return
        self._transport.release(flight.handle)
        if status.state is TransferState.DONE:
            self._observer.completed(flight.operation, self._clock() - flight.posted_at)
            self._handle(TransferCompleted(operation_id))
            return
        self._observer.failed(flight.operation)
        if status.peer_lost:
            self._lose(flight.address, flight.peer, status.reason)
        self._handle(TransferFailed(operation_id, status.reason))

    def _notify(self, peer: PeerRank, address: InstanceAddress, payload: bytes) -> None:
        try:
            contact = self._contacts.get(address, peer)
            self._transport.notify(contact.agent(peer.rank), payload)
        except (TransportError, RemoteProtocolError) as error:
            self._lose(address, peer, str(error))

    def _lose(self, address: InstanceAddress, peer: PeerRank, reason: str) -> None:
        self._events.append(PeerLost(address, peer.incarnation, f"{peer} is gone: {reason}"))

    # What comes in.

    def _on_side_message(self, identity: bytes, payload: bytes) -> None:
        """A message from a socket; `identity` is the socket's, empty for an answer on ours."""
        if self._on_engine_call(payload):
            return
        message = self._decoded(payload)
        if message is None:
            return
        if isinstance(message, ON_DATA_PATH) or not sender_matches(identity, message.sender.peer()):
            self._drop_foreign(message)
            return
        self._handle(MessageReceived(message))

    def _on_engine_call(self, payload: bytes) -> bool:
        """Whether it was a call of our scheduler in another process."""
        try:
            event = decode_call(payload, self._engine_token, self._limits)
        except RemoteProtocolError as error:
            _log.error("%s", error)
            return True
        if event is not None:
            self._handle(event)
        return event is not None

    def _on_notification(self, notification: Notification) -> None:
        """A message over the data path. A registration may be a peer's first sign of life; it is
        checked when its sender shakes hands."""
        message = self._decoded(notification.payload)
        if message is None:
            return
        agent = self._contacts.agent_name(message.sender.peer())
        known_as_another = agent not in (None, notification.sender)
        unknown_writer = agent is None and isinstance(message, Landed)
        if not isinstance(message, ON_DATA_PATH) or known_as_another or unknown_writer:
            self._drop_foreign(message)
            return
        self._handle(MessageReceived(message))

    def _decoded(self, payload: bytes) -> AnyMessage | None:
        try:
            return decode(payload, self._limits)
        except RemoteProtocolError as error:
            self._observer.dropped("malformed")
            _log.warning("message dropped: %s", error)
            return None

    def _drop_foreign(self, message: AnyMessage) -> None:
        """It did not come by its way, or from whom it says."""
        self._observer.dropped("wrong_sender")
        _log.warning("message dropped: %s did not send this: %s", message.sender, message)

    def _connect(self, address: InstanceAddress, mode: TransferMode) -> None:
        try:
            self._channel.ask(address, request(address.engine_id, mode, self._facts))
        except RemoteProtocolError as error:
            self._events.append(ConnectFailed(address, str(error)))

    def _on_handshake_answer(self, address: InstanceAddress, payload: bytes) -> None:
        try:
            instance = read_answer(payload, address.engine_id, self._facts, self._limits)
            contact = self._contacts.add(address, instance)
        except (HandshakeRejected, RemoteProtocolError) as error:
            _log.warning("handshake with %s failed: %s", address, error)
            self._handle(ConnectFailed(address, f"handshake with {address} failed: {error}"))
            return
        self._handle(
            PeerConnected(address, instance.incarnation, instance.modes, instance.geometries)
        )
        _log.info("connected to %s, incarnation %s", address, instance.incarnation)
        for rank in self.endpoint.partners(address):
            # Loaded ahead of need: a first contact takes milliseconds. Trouble shows at the post.
            try:
                contact.agent(rank)
            except (TransportError, RemoteProtocolError) as error:
                _log.warning("agent of %s rank %s cannot be loaded: %s", address, rank, error)
