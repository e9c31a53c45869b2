"""Which registration belongs to which hold; either may come first.

Decides the match: by exact transfer id, else by exact request id, else by request ids without
their per-engine suffix, and that only while it is unambiguous. Two different transfer ids never
match, whatever the request ids say. Refuses to know what a match leads to.

vLLM adds `-<8 hex digits>` to every request id on each engine; routers without transfer ids give
both legs the same id in front of it (vllm#27987, #35264).
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcourier.core.messages import HoldName
from kvcourier.errors import LocalProtocolError
from kvcourier.ids import RequestId, TransferKey

_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")

R = TypeVar("R", bound=Hashable)


def strip_suffix(request_id: str) -> str:
    """A request id without the suffix one engine gave it; the only place that does this."""
    return _SUFFIX.sub("", request_id)


@dataclass(frozen=True, slots=True)
class Claim:
    """How one registration names the hold it looks for.

    `wanter` names the wanter's request, the same for all its ranks: two ranks of one request do
    not make a match ambiguous, two requests do. `wanter_request_id` is that request's own id.
    """

    name: HoldName
    wanter: tuple[str, str, str]
    wanter_request_id: RequestId

    def stems(self) -> frozenset[str]:
        """The stripped ids by which it may be found."""
        ids = [self.wanter_request_id, *filter(None, [self.name.request_id])]
        return frozenset(strip_suffix(request_id) for request_id in ids)


class Rendezvous(Generic[R]):
    """Holds and waiting registrations, each findable by the other.

    A waiting registration is in here until it is taken by `meet` or `withdraw`.
    """

    def __init__(self) -> None:
        self._hold_keys: dict[RequestId, TransferKey | None] = {}
        self._by_key: dict[TransferKey, RequestId] = {}
        self._by_stem: dict[str, set[RequestId]] = {}
        self._waiting: dict[R, Claim] = {}

    @property
    def num_waiting(self) -> int:
        """Registrations whose hold has not come."""
        return len(self._waiting)

    def __contains__(self, registration: R) -> bool:
        return registration in self._waiting

    def open(self, request_id: RequestId, key: TransferKey | None) -> None:
        """A hold may be found from now on.

        Raises:
            LocalProtocolError: the request or the key is open already.
        """
        if request_id in self._hold_keys or key in self._by_key:
            raise LocalProtocolError(f"{request_id} or its transfer id {key} is held already")
        self._hold_keys[request_id] = key
        if key is not None:
            self._by_key[key] = request_id
        self._by_stem.setdefault(strip_suffix(request_id), set()).add(request_id)

    def close(self, request_id: RequestId) -> None:
        """A hold cannot be found any more; unknown ones are fine."""
        if request_id not in self._hold_keys:
            return
        key = self._hold_keys.pop(request_id)
        if key is not None:
            del self._by_key[key]
        stem = strip_suffix(request_id)
        self._by_stem[stem].discard(request_id)
        if not self._by_stem[stem]:
            del self._by_stem[stem]

    def find(self, claim: Claim) -> RequestId | None:
        """The hold a registration means; None if there is none, or more than one could be meant."""
        key = claim.name.key()
        if key is not None and key in self._by_key:
            return self._by_key[key]
        exact = claim.name.request_id
        if exact is not None and exact in self._hold_keys:
            request_id = RequestId(exact)
            return request_id if self._keys_allow(request_id, key) else None
        found = {
            request_id
            for stem in claim.stems()
            for request_id in self._by_stem.get(stem, ())
            if self._keys_allow(request_id, key)
        }
        if len(found) != 1:
            return None
        rivals = {
            other.wanter
            for other in self._waiting.values()
            if other.wanter != claim.wanter and other.stems() & claim.stems()
        }
        return None if rivals else found.pop()

    def wait(self, registration: R, claim: Claim) -> None:
        """Keep a registration until its hold opens; a second time replaces the first."""
        self._waiting[registration] = claim

    def withdraw(self, registration: R) -> None:
        """A registration waits no longer; unknown ones are fine."""
        self._waiting.pop(registration, None)

    def meet(self, request_id: RequestId) -> list[R]:
        """Take every waiting registration that means this hold, in the order they came."""
        met = [
            registration
            for registration, claim in self._waiting.items()
            if self.find(claim) == request_id
        ]
        for registration in met:
            del self._waiting[registration]
        return met

    def _keys_allow(self, request_id: RequestId, key: TransferKey | None) -> bool:
        held = self._hold_keys[request_id]
        return key is None or held is None
