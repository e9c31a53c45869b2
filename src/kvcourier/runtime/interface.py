"""The endpoint as an engine sees it.

Decides the calls between an engine and the transfer machinery. Refuses to know either. The real
one is `runtime.endpoint.KvEndpoint`.

A request that P computes for somebody:  begin_hold -> finish_prefill -> SENT, RELEASED. In
between it may tell with advance_prefill how far it is, and with roll_back that it starts anew.
A request whose KV D gets from somebody: expect -> receive -> RECEIVED, RELEASED. HELD may come at
any time before. In between D may ask for the blocks by recall: then RECALLED, and receive again.
What D keeps for a conversation's next turn: keep_history -> SENT if somebody has come, RELEASED.
Each may be ended early with `abort`, at any time, any number of times.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvcourier.core.params import HoldIntent, WantIntent
from kvcourier.core.token_proof import TokenProof
from kvcourier.errors import ParamsError
from kvcourier.ids import RequestId, TransferId
from kvcourier.layout.geometry import TokenSpan
from kvcourier.runtime.reports import Report


class Endpoint(Protocol):
    """Moves KV for one engine. All calls are quick, never wait for the network, and are
    thread-safe; results come through `poll`. Only where inline posting was asked for do
    `finish_prefill` and `receive` wait until the transfer is posted."""

    def start(self, on_report: Callable[[], None]) -> None:
        """Open sockets and start the couriers.

        `on_report` is called, from a courier thread, whenever `poll` has something new; it must
        only wake the engine. Raises ConfigError if the side channel's port is taken.
        """

    def close(self) -> None:
        """Stop the couriers, close the sockets. Blocks for a moment; idempotent."""

    def instance_info(self) -> dict[str, Any]:
        """What a router must know of this instance.

        Keys: engine_id, incarnation, side_channel_host, side_channel_port, tp_size, pp_size,
        block_size, modes (list), model.
        """

    def begin_hold(self, request_id: RequestId, intent: HoldIntent) -> None:
        """P: a prompt that somebody wants was accepted; registrations for it may come now."""

    def is_awaited(self, request_id: RequestId) -> bool:
        """P: whether somebody has registered for this prompt, so that telling how far it is pays.

        A glimpse: it may change at any time.
        """

    def advance_prefill(
        self,
        request_id: RequestId,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        layers: Sequence[int] | None = None,
        *,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        """P: the KV of `num_tokens` tokens is written, from position 0, in these blocks.

        For these layers (global indices), or all. `block_ids` as in `finish_prefill`, of which
        this is the beginning; the blocks stay the engine's. They may be read from now on, until
        `roll_back`, or RELEASED after `finish_prefill` or `abort`. With `ready`, it is written only
        once that returns True; a courier asks it, from its own thread, until then.
        """

    def roll_back(self, request_id: RequestId) -> None:
        """P: the prompt was preempted, or is computed anew; its blocks are not read any more for
        anything that counts. To be called before they get other content."""

    def finish_prefill(
        self,
        request_id: RequestId,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        continuation: str | None = None,
    ) -> dict[str, Any]:
        """P: the KV of `num_tokens` tokens is written, from position 0, in these blocks.

        `block_ids` has one list per cache group, covering positions from 0 on, or from the block
        on that its sliding window begins in. The blocks belong to the endpoint until RELEASED.
        `continuation`, printable and of at most `Limits.max_id_bytes`, comes with RECEIVED to the
        engine that gets the KV; only engines know what it means. Returns the `kv_transfer_params`
        to answer with.
        """

    def keep_history(
        self,
        name: RequestId,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        keep_s: float,
        proof: TokenProof,
    ) -> dict[str, Any]:
        """D: keep the KV of `num_tokens` tokens, prompt and answer, for the next turn.

        As `begin_hold` and `finish_prefill` in one, for somebody who may come within `keep_s`
        seconds, or never. `name` is none that the endpoint knows; an `abort` gives the blocks up.
        `proof` is of these tokens. Returns the `kv_transfer_params` to answer with. Of what nobody
        came for only RELEASED is told.
        """

    def let_go(self, transfer_id: TransferId) -> bool:
        """P: nobody will collect this transfer's KV, so that nobody else would say so either.

        A finished prompt is released at once, one that is finished after this as soon as it is.
        False if the transfer is not known here, or over.
        """

    def expect(self, request_id: RequestId, intent: WantIntent) -> None:
        """D: such a request was accepted and may wait; keeps the holder's lease alive."""

    def receive(
        self, request_id: RequestId, block_ids: Sequence[Sequence[int]], span: TokenSpan
    ) -> None:
        """D: get the KV of positions `span` into these blocks.

        `span.start` is a multiple of the block size, `span.stop` where the engine goes on.
        `block_ids` (one list per cache group) covers positions from `span.start` on, or from the
        block on that the group's sliding window begins in, and may be longer than needed. The
        blocks belong to the endpoint until RELEASED.
        """

    def recall(self, request_id: RequestId) -> None:
        """D: the blocks of a request that has not told HELD are needed for one that has.

        RECALLED follows, and the request is as after `expect`, so that `receive` may be called
        again; or, where its KV is on the way for good, RECEIVED, as if nothing had been asked.
        """

    def decline(self, request_id: RequestId) -> None:
        """D: nothing is needed after `expect` (full prefix hit, request refused): free P now."""

    def abort(
        self, request_id: RequestId, block_ids: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Either side: the request has ended early. Only RELEASED may follow; unknown is fine.

        P, after `advance_prefill`: `block_ids` are the prompt's, which the engine keeps out of use
        until RELEASED, which then always comes if the request was known.
        """

    def poll(self) -> list[Report]:
        """Take all reports so far, in order; never blocks."""

    def story(self, key: str) -> list[dict[str, Any]] | None:
        """What happened to a transfer, by request id or transfer id; None if unknown.

        Entries have at least `at_unix_s` (wall clock), `what` and `thread`.
        """


def let_holder_go(endpoint: Endpoint, request_id: RequestId, intent: WantIntent) -> None:
    """A request was refused before it was accepted: its holder need not wait for the lease to end.

    vllm#41269: a request that D's HTTP layer refused left its blocks on P.
    """
    with contextlib.suppress(ParamsError):
        endpoint.expect(request_id, intent)
        # Not declined: where its router may send another, that one needs the KV all the same.
        endpoint.abort(request_id)
