"""The transport over NIXL.

Decides how NIXL's calls, bare strings and exceptions become the verbs, states and errors of
`transport.interface`; it is the only module that imports nixl, and does so when the first agent
is made. Refuses to know requests and messages.

Measured with NIXL 1.5.1 on UCX, and relied on here: a registration that fails leaves its memory
kind, without a region, in the full metadata, which no peer can load then; a released handle
proves nothing about its operation; after `remove_remote_agent` a new process with the same agent
name can be added.
"""

import importlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvcourier.config import CourierConfig
from kvcourier.errors import (
    ConfigError,
    KVCourierError,
    LocalProtocolError,
    PeerLost,
    PostFailed,
    RegistrationFailed,
    RemoteProtocolError,
)
from kvcourier.ids import AgentName
from kvcourier.layout.geometry import Int64Array, MemoryKind, Region
from kvcourier.transport.interface import (
    DescriptorListId,
    Descriptors,
    Notification,
    Operation,
    Selection,
    Side,
    TransferHandle,
    TransferState,
    TransferStatus,
)
from kvcourier.transport.logging_kept import logging_kept
from kvcourier.transport.sides import (
    LENGTH,
    PreparedList,
    check_forms,
    check_lengths,
    check_regions,
    checked_indices,
    checked_table,
    find_list,
)

_log = logging.getLogger(__name__)

_STATES: Final = {
    "DONE": TransferState.DONE,
    "PROC": TransferState.IN_FLIGHT,
    "ERR": TransferState.FAILED,
}

_MEANINGS: Final[dict[str, tuple[type[KVCourierError] | None, str]]] = {
    "nixlRemoteDisconnectError": (PeerLost, "the connection to the peer is gone"),
    "nixlNotFoundError": (None, "NIXL does not know this memory, agent or plugin"),
    "nixlInvalidParamError": (None, "NIXL refused the arguments"),
    "nixlMismatchError": (None, "the bytes are not what NIXL expects"),
    "nixlNotAllowedError": (None, "NIXL does not allow this in the present state"),
    "nixlNotSupportedError": (None, "no backend supports this"),
    "nixlBackendError": (None, "the backend failed"),
    "nixlCancelledError": (None, "the operation was cancelled"),
    "nixlNotPostedError": (None, "the operation was never posted"),
    "nixlRepostActiveError": (None, "the operation is already in flight"),
    "nixlUnknownError": (None, "NIXL gives no reason"),
}
"""NIXL's exceptions: the error each always becomes (None: that of the failed verb), and why."""

_THREAD_OPTIONS: Final = ("num_threads", "thread_count", "num_cpus")
"""Names under which NIXL's plugins take a number of threads."""

_UNLISTED_THREAD_OPTIONS: Final = {
    "UCX": "num_threads",
    "LIBFABRIC": "num_threads",
    "OBJ": "num_threads",
    "GDS_MT": "thread_count",
    "UCCL": "num_cpus",
}
"""Plugins that take the option without listing it in their parameters (NIXL 1.5.1)."""


@dataclass(slots=True)
class _Posted:
    agent: AgentName
    native: Any
    status: TransferStatus


class NixlTransport:
    """Moves bytes with one NIXL agent.

    Args:
        agent_name: name of the agent, unique among all peers and incarnations.
        backends: plugins to create, in this order of preference.
        num_threads: threads for every backend that takes such an option; 0 leaves NIXL's default.
        enable_prog_thread: NIXL's own progress thread, which spins on a core.

    Raises:
        ConfigError: NIXL is not installed, a backend has no plugin or does not start, or a value
            is out of range.
    """

    def __init__(
        self,
        agent_name: str,
        *,
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 0,
        enable_prog_thread: bool = False,
    ) -> None:
        if not agent_name or not backends or num_threads < 0:
            raise ConfigError(
                "NIXL agent: expected a name, at least one backend and num_threads of 0 or more, "
                f"found {agent_name!r}, {list(backends)} and {num_threads}"
            )
        api, self._bindings = _load_nixl()
        self._name = AgentName(agent_name)
        self._errors = tuple(
            getattr(self._bindings, name) for name in _MEANINGS if hasattr(self._bindings, name)
        )
        self._agent: Any = api.nixl_agent(
            agent_name,
            api.nixl_agent_config(enable_prog_thread=enable_prog_thread, backends=[]),
        )
        self._registered: list[tuple[MemoryKind, Any, Int64Array]] = []
        self._peers: set[AgentName] = set()
        self._lists: dict[DescriptorListId, PreparedList] = {}
        self._posted: dict[TransferHandle, _Posted] = {}
        self._unreleased: list[Any] = []
        self._ids = itertools.count(1)
        self._closed = False
        for name in backends:
            self._create_backend(name, num_threads)

    @property
    def agent_name(self) -> AgentName:
        return self._name

    def plugins(self) -> list[str]:
        """Names of all backends that this NIXL has."""
        return sorted(self._agent.get_plugin_list())

    def register(self, regions: Sequence[Region]) -> None:
        self._require_open()
        check_regions(regions)
        added: list[tuple[MemoryKind, Any, Int64Array]] = []
        try:
            for kind in MemoryKind:
                rows = [(r.address, r.size_bytes, r.device_id) for r in regions if r.memory is kind]
                if not rows:
                    continue
                table = np.array(rows, dtype=np.int64)
                with self._translated(
                    RegistrationFailed, f"registering {len(rows)} {kind} regions"
                ):
                    added.append((kind, self._agent.register_memory(table, kind.value), table))
        except RegistrationFailed:
            for _, native, _ in added:
                self._agent.deregister_memory(native)
            raise
        self._registered += added

    def agent_metadata(self) -> bytes:
        self._require_open()
        kinds = {kind for kind, _, _ in self._registered}
        if len(kinds) > 1:
            return bytes(self._agent.get_agent_metadata())
        # Not the full metadata: see the module's docstring.
        kind = next(iter(kinds), MemoryKind.DRAM)
        tables = [np.empty((0, 3), np.int64), *(table for _, _, table in self._registered)]
        regions = self._bindings.nixlRegDList(
            self._agent.nixl_mems[kind.value], np.concatenate(tables)
        )
        return bytes(self._agent.get_partial_agent_metadata(regions, True, []))

    def connect(self, agent_metadata: bytes) -> AgentName:
        self._require_open()
        with self._translated(RemoteProtocolError, "loading a peer's agent metadata"):
            name = self._agent.add_remote_agent(agent_metadata)
        try:
            agent = AgentName(name.decode() if isinstance(name, bytes) else str(name))
        except UnicodeDecodeError as error:
            raise RemoteProtocolError("agent metadata: the agent's name is not UTF-8") from error
        self._peers.add(agent)
        return agent

    def disconnect(self, agent: AgentName) -> None:
        self._require_open()
        if agent not in self._peers:
            return
        self._peers.remove(agent)
        for list_id in [i for i, entry in self._lists.items() if entry.agent == agent]:
            self.release_list(list_id)
        with suppress(*self._errors):  # NIXL has forgotten it already
            self._agent.remove_remote_agent(agent)

    def prepare(self, descriptors: Descriptors, agent: AgentName | None) -> DescriptorListId:
        self._require_open()
        table = checked_table(descriptors)
        if agent is not None:
            self._require_peer(agent)
        owner = "NIXL_INIT_AGENT" if agent is None else agent
        with self._translated(PostFailed, f"preparing {len(table)} descriptors of {owner}"):
            native = self._agent.prep_xfer_dlist(owner, table, descriptors.memory.value)
        list_id = DescriptorListId(next(self._ids))
        self._lists[list_id] = PreparedList(agent, descriptors.memory, table, native)
        return list_id

    def release_list(self, list_id: DescriptorListId) -> None:
        entry = self._lists.pop(list_id, None)
        if entry is not None:
            self._release_native(entry.native)

    def post(
        self,
        operation: Operation,
        agent: AgentName,
        *,
        local: Side,
        remote: Side,
        notice: bytes = b"",
    ) -> TransferHandle:
        self._require_open()
        check_forms(local, remote)
        self._require_peer(agent)
        with self._translated(PostFailed, f"posting {operation} to {agent}"):
            if isinstance(local, Selection) and isinstance(remote, Selection):
                native = self._make_from_lists(operation, agent, local, remote, notice)
            else:
                assert isinstance(local, Descriptors) and isinstance(remote, Descriptors)
                native = self._make_from_tables(operation, agent, local, remote, notice)
            try:
                state = _STATES[self._agent.transfer(native)]
            except BaseException:
                self._release_native(native)
                raise
        if state is TransferState.FAILED:
            self._release_native(native)
            raise PostFailed(f"posting {operation} to {agent}: NIXL answered ERR")
        handle = TransferHandle(next(self._ids))
        self._posted[handle] = _Posted(agent, native, TransferStatus(state))
        return handle

    def post_again(self, handle: TransferHandle, notice: bytes = b"") -> None:
        self._require_open()
        posted = self._posted.get(handle)
        if posted is None or posted.status.state is not TransferState.DONE:
            raise LocalProtocolError(f"handle {handle}: expected one that is done, found {posted}")
        self._require_peer(posted.agent)
        with self._translated(PostFailed, f"posting again to {posted.agent}"):
            state = _STATES[self._agent.transfer(posted.native, notice)]
        posted.status = TransferStatus(state)
        if state is TransferState.FAILED:
            raise PostFailed(f"posting again to {posted.agent}: NIXL answered ERR")

    def poll(self, handle: TransferHandle) -> TransferStatus:
        self._require_open()
        posted = self._posted.get(handle)
        if posted is None:
            raise LocalProtocolError(f"handle {handle}: expected a posted one, found none")
        if posted.status.state is TransferState.IN_FLIGHT:
            posted.status = self._check(posted)
        return posted.status

    def release(self, handle: TransferHandle) -> None:
        posted = self._posted.pop(handle, None)
        if posted is not None:
            self._release_native(posted.native)

    def notify(self, agent: AgentName, payload: bytes) -> None:
        self._require_open()
        self._require_peer(agent)
        with self._translated(PeerLost, f"notifying {agent}"):
            self._agent.send_notif(agent, payload)

    def notifications(self) -> list[Notification]:
        self._require_open()
        arrived: dict[Any, list[Any]] = self._agent.get_new_notifs()
        return [
            Notification(AgentName(sender), payload)
            for sender, payloads in arrived.items()
            for payload in payloads
            if isinstance(sender, str) and isinstance(payload, bytes)
        ]

    def close(self) -> None:
        if self._closed:
            return
        for handle in list(self._posted):
            self.release(handle)
        for list_id in list(self._lists):
            self.release_list(list_id)
        for agent in list(self._peers):
            self.disconnect(agent)
        self._retry_releases()
        for _, native, _ in self._registered:
            with suppress(*self._errors):  # nothing can be done about it any more
                self._agent.deregister_memory(native)
        self._registered.clear()
        self._closed = True
        self._agent = None

    def _create_backend(self, name: str, num_threads: int) -> None:
        plugins = self.plugins()
        if name not in plugins:
            raise ConfigError(
                f"backends: NIXL has no plugin {name!r}; available: {', '.join(plugins)}"
            )
        with self._translated(ConfigError, f"starting NIXL backend {name}"):
            # Straight from the binding: the wrapper logs a traceback where we raise.
            listed, _ = self._agent.agent.getPluginParams(name)
            option = next((o for o in _THREAD_OPTIONS if o in listed), None)
            option = option or _UNLISTED_THREAD_OPTIONS.get(name)
            options = {option: str(num_threads)} if option and num_threads else {}
            self._agent.create_backend(name, options)

    def _make_from_tables(
        self,
        operation: Operation,
        agent: AgentName,
        local: Descriptors,
        remote: Descriptors,
        notice: bytes,
    ) -> Any:
        tables = checked_table(local), checked_table(remote)
        check_lengths(tables[0][:, LENGTH], tables[1][:, LENGTH])
        return self._agent.initialize_xfer(
            operation.value,
            self._agent.get_xfer_descs(tables[0], local.memory.value),
            self._agent.get_xfer_descs(tables[1], remote.memory.value),
            agent,
            notice,
        )

    def _make_from_lists(
        self,
        operation: Operation,
        agent: AgentName,
        local: Selection,
        remote: Selection,
        notice: bytes,
    ) -> Any:
        ours = find_list(self._lists, local, None)
        theirs = find_list(self._lists, remote, agent)
        local_indices = checked_indices(local, ours)
        remote_indices = checked_indices(remote, theirs)
        check_lengths(ours.table[local_indices, LENGTH], theirs.table[remote_indices, LENGTH])
        return self._agent.make_prepped_xfer(
            operation.value, ours.native, local_indices, theirs.native, remote_indices, notice
        )

    def _check(self, posted: _Posted) -> TransferStatus:
        try:
            with self._translated(PostFailed, f"operation on {posted.agent}"):
                state = _STATES[self._agent.check_xfer_state(posted.native)]
        except (PostFailed, PeerLost) as error:
            return TransferStatus(TransferState.FAILED, isinstance(error, PeerLost), str(error))
        reason = "NIXL answered ERR" if state is TransferState.FAILED else ""
        return TransferStatus(state, reason=reason)

    def _release_native(self, native: Any) -> None:
        """Release now, or keep for later: a backend may refuse while an operation is active, and
        an object that is dropped unreleased would be released by the garbage collector."""
        try:
            native.release()
        except self._errors as error:
            _log.debug("%r could not be released yet: %s", native, error)
            self._unreleased.append(native)

    def _retry_releases(self) -> None:
        waiting, self._unreleased = self._unreleased, []
        for native in waiting:
            self._release_native(native)

    def _require_open(self) -> None:
        if self._closed:
            raise LocalProtocolError(f"transport of {self._name}: used after close")
        if self._unreleased:
            self._retry_releases()

    def _require_peer(self, agent: AgentName) -> None:
        if agent not in self._peers:
            raise PeerLost(f"agent {agent!r}: not connected")

    @contextmanager
    def _translated(self, verb_error: type[KVCourierError], what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            always, meaning = _MEANINGS[type(error).__name__]
            raise (always or verb_error)(f"{what}: {meaning} ({error})") from error


def _load_nixl() -> tuple[Any, Any]:
    with logging_kept():
        try:
            modules = (
                importlib.import_module("nixl._api"),
                importlib.import_module("nixl._bindings"),
            )
        except ImportError as error:
            raise ConfigError(
                f"NIXL cannot be imported ({error}); install it with `pip install nixl`"
            ) from error
    logger = logging.getLogger("nixl")  # NIXL_LOG_LEVEL, if set, has set its level by now
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)
    return modules


def nixl_factory(config: CourierConfig) -> Callable[[AgentName], NixlTransport]:
    """Makes the transport of each rank as configured. What it returns raises ConfigError."""

    def make(agent_name: AgentName) -> NixlTransport:
        return NixlTransport(
            agent_name,
            backends=config.backends,
            num_threads=config.num_threads,
            enable_prog_thread=config.enable_prog_thread,
        )

    return make
