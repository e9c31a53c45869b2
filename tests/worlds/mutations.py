"""Rules of the core, broken on purpose: whether the worlds would see it."""

import contextlib
import inspect
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterator
from unittest.mock import patch

from kvcourier.core.deliveries import Deliveries
from kvcourier.core.endpoint import Endpoint
from kvcourier.core.hold_endings import HoldEndings
from kvcourier.core.leases import LeaseTable
from kvcourier.core.packing.sender import Sender
from kvcourier.core.want_endings import WantEndings
from kvcourier.core.wants import Want
from kvcourier.runtime.contacts import Contacts

Mutation = Callable[[], contextlib.AbstractContextManager[object]]


class InsertionOrderLeases(LeaseTable):
    """Leases in the order of their holds; the sweep ends at the first that runs (vllm#58222)."""

    def __init__(self) -> None:
        super().__init__()
        self._until: OrderedDict[str, float] = OrderedDict()

    def __len__(self):
        return len(self._until)

    def __contains__(self, request_id):
        return request_id in self._until

    def grant(self, request_id, now, duration_s):
        self._until[request_id] = max(self._until.get(request_id, 0.0), now + duration_s)

    def renew(self, request_id, now, duration_s):
        if request_id not in self._until:
            return False
        self.grant(request_id, now, duration_s)
        return True

    def end(self, request_id):
        self._until.pop(request_id, None)

    def take_expired(self, now):
        expired = []
        for request_id, until in self._until.items():
            if until > now:
                break
            expired.append(request_id)
        for request_id in expired:
            del self._until[request_id]
        return expired

    def next_expiry(self):
        return next(iter(self._until.values()), None)


def rewritten(function: Callable, old: str, new: str) -> Callable:
    """The function with one expression of its source replaced, which must be there once."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} does not say {old!r} once any more"
    namespace: dict[str, object] = {}
    exec(source.replace(old, new), function.__globals__, namespace)
    return namespace[function.__name__]


@contextlib.contextmanager
def broken(*rules: tuple[type, str, str, str]) -> Iterator[None]:
    """Methods with other sources: (class, method, what it says, what it says instead)."""
    with contextlib.ExitStack() as stack:
        for owner, name, old, new in rules:
            changed = rewritten(getattr(owner, name), old, new)
            stack.enter_context(patch.object(owner, name, changed))
        yield


def match_across_incarnations():
    """What one life had asked for is done for the next: registrations and references stay valid."""
    return broken(
        (
            Endpoint,
            "_on_peer_lost",
            "self._holder.on_peer_lost(event.address, event.incarnation, event.reason)",
            "",
        ),
        (
            Deliveries,
            "advance",
            "delivery.registration.peer.incarnation != peer.incarnation",
            "False",
        ),
        (Contacts, "get", " or contact.instance.incarnation != peer.incarnation", ""),
    )


MUTATIONS: dict[str, Mutation] = {
    "the holder releases before its writes are quiet": lambda: patch.object(
        HoldEndings, "_is_quiet", lambda self, hold: True
    ),
    "the wanter releases before its reads are quiet": lambda: patch.object(
        WantEndings, "quiet_locally", lambda self, want: True
    ),
    "the wanter does not wait for the fence": lambda: patch.object(Want, "quiet_remotely", True),
    "incarnations are not told apart": match_across_incarnations,
    "leases are swept in insertion order": lambda: patch(
        "kvcourier.core.holder.LeaseTable", InsertionOrderLeases
    ),
    "a failure is not told": lambda: patch.object(
        Deliveries, "_send", lambda self, registration, reason, *, held, quiet: None
    ),
    # Two of these were no rules until random worlds had shown the harm.
    "the wanter does not say that it has all": lambda: patch.object(
        WantEndings, "_let_go", lambda self, want, *, read: None
    ),
    "a stuck write keeps its staging slot for ever": lambda: patch.object(
        Sender, "_give_up", lambda self, stream, record, now: []
    ),
}
