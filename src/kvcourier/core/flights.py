"""Posted operations and whose memory they touch.

Decides when memory is quiet: when every operation on it is terminal, the first failure among
several does not count (vllm#56104: the first failed handle freed blocks while its siblings still
wrote). Refuses to know what the operations move.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

from kvcourier.core.events import OperationId
from kvcourier.errors import LocalProtocolError

O = TypeVar("O", bound=Hashable)  # noqa: E741 - the owner of a flight


class FlightTable(Generic[O]):
    """Operations from the decision to post until the transport calls them terminal.

    An operation counts as in flight before it is posted: between the command and its answer, the
    driver may already have handed it to the transport.
    """

    def __init__(self) -> None:
        self._owners: dict[OperationId, O] = {}
        self._by_owner: dict[O, set[OperationId]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._owners)

    def launch(self, owner: O) -> OperationId:
        """Name a new operation of this owner."""
        self._next += 1
        operation_id = OperationId(self._next)
        self._owners[operation_id] = owner
        self._by_owner.setdefault(owner, set()).add(operation_id)
        return operation_id

    def owner(self, operation_id: OperationId) -> O | None:
        """Whose operation it is; None once it has landed."""
        return self._owners.get(operation_id)

    def land(self, operation_id: OperationId) -> O:
        """The operation is terminal; returns its owner.

        Raises:
            LocalProtocolError: it was not in flight.
        """
        if operation_id not in self._owners:
            raise LocalProtocolError(f"operation {operation_id} is not in flight")
        owner = self._owners.pop(operation_id)
        siblings = self._by_owner[owner]
        siblings.discard(operation_id)
        if not siblings:
            del self._by_owner[owner]
        return owner

    def of(self, owner: O) -> frozenset[OperationId]:
        """This owner's operations in flight."""
        return frozenset(self._by_owner.get(owner, ()))

    def quiet(self, owner: O) -> bool:
        """Whether nothing of this owner is in flight."""
        return owner not in self._by_owner
