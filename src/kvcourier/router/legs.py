"""What each instance is sent, and what P must answer.

Decides bodies, headers and `kv_transfer_params` of the two legs of one dispatch, with vLLM's keys
and meanings. Refuses to know when they are sent, and HTTP beyond headers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcourier.config import USUAL_BINDING, Binding, TransferMode
from kvcourier.ids import RequestId, TransferId
from kvcourier.router.config import Coordinates
from kvcourier.tracing.interface import TRACE_HEADERS, UNTRACED, Carrier, parent_of

Params = dict[str, Any]

# Not for a prefill that ends after one token: it is not streamed, and may end at once.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens")

# Without any one of these D cannot collect, and vLLM's D says so only in its log.
HANDOFF_KEYS = (
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
)


@dataclass(frozen=True, slots=True)
class Call:
    """One dispatch of a client's request to one P and one D.

    Attributes:
        body: the client's JSON object; not changed.
        headers: the client's headers that travel on.
        coordinates: where the chosen P's KV is found; push cannot do without.
        prefill_dp_rank: which rank behind the address, for vLLM.
        binding: early dispatches both legs at once, near D's when P is nearly done, late when it
            has answered; None leaves it to the mode.
        history: what the last turn's D told of the KV it keeps, if there was one.
        keeps: D is to keep the answer's KV for the next turn.
        max_rebinds: how often D's leg may be sent to another instance for the same prompt of P's.
        is_alone: there is no leg to P: D computes the prompt itself.
        modes_known: P itself said which modes it takes part in, so `transfer_mode` in its answer
            (one value for an instance that does both) decides nothing.
    """

    mode: TransferMode
    transfer_id: TransferId
    request_id: RequestId
    body: Mapping[str, Any]
    headers: tuple[tuple[str, str], ...] = ()
    coordinates: Coordinates | None = None
    prefill_dp_rank: int | None = None
    modes_known: bool = False
    binding: Binding | None = None
    history: Params | None = None
    keeps: bool = False
    max_rebinds: int = 0
    is_alone: bool = False

    @property
    def when(self) -> Binding:
        """When D is bound."""
        return self.binding or USUAL_BINDING[self.mode]


@dataclass(frozen=True, slots=True)
class Leg:
    """One request to one instance."""

    content: bytes
    headers: tuple[tuple[str, str], ...]
    stream: bool = field(default=False)


def prefill_params(call: Call) -> Params:
    """P: compute this prompt and keep its KV for somebody; earlier turns' is found there."""
    rebindable = {"rebindable": True} if call.max_rebinds else {}
    if call.history is not None:
        own = {"transfer_id": call.transfer_id, "transfer_mode": call.mode.value, **rebindable}
        return {**call.history, "do_remote_decode": True, "do_remote_prefill": False, **own}
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "transfer_id": call.transfer_id,
    } | rebindable


def early_params(call: Call, coordinates: Coordinates) -> Params:
    """D before P has answered: register with this P, for its WRITE or to be told what to READ."""
    reads = {"transfer_mode": call.mode.value} if call.mode is TransferMode.PULL else {}
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": coordinates.engine_id,
        "remote_host": coordinates.host,
        "remote_port": coordinates.port,
        "tp_size": coordinates.tp_size,
        "pp_size": coordinates.pp_size,
        "remote_request_id": call.request_id,
        "transfer_id": call.transfer_id,
    } | reads


def late_params(call: Call, handoff: Params) -> Params:
    """D after P has answered: what P said, with the transfer id if P left it out.

    Without block ids D cannot READ, so it registers, and P writes at once.
    """
    params = dict(handoff)
    if params.get("transfer_id") is None:
        params["transfer_id"] = call.transfer_id
    if call.mode is TransferMode.PUSH:
        params |= {"remote_block_ids": None, "transfer_mode": call.mode.value}
    return params


def bound(call: Call, params: Params, binding: int) -> Params:
    """The params for the D that comes after so many others."""
    return params | {"binding": binding} if params and call.max_rebinds else params


def prefill_leg(call: Call, carrier: Carrier = UNTRACED) -> Leg:
    """The request to P: one token, not streamed. `carrier` names the leg's span, if it has one."""
    body = {key: value for key, value in call.body.items() if key not in _NOT_FOR_PREFILL}
    body |= {
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": _traced(prefill_params(call), carrier),
    }
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return Leg(_encode(body), _headers(call, call.prefill_dp_rank, carrier))


def decode_leg(
    call: Call, params: Params, dp_rank: int | None = None, carrier: Carrier = UNTRACED
) -> Leg:
    """The request to D, or to its rank: the client's own, plus where the KV comes from, if any."""
    body = dict(call.body)
    if params:
        body["kv_transfer_params"] = _traced({**params, "keep_history": call.keeps}, carrier)
    return Leg(_encode(body), _headers(call, dp_rank, carrier), bool(body.get("stream")))


def _traced(params: Params, carrier: Carrier) -> Params:
    """With the span as well: vLLM hands a connector no headers unless its own tracing is on."""
    return {**params, **parent_of(carrier.get("traceparent"))}


def read_object(content: bytes) -> dict[str, Any]:
    """The JSON object that an instance answered.

    Raises:
        ValueError: it is none, or nested too deeply to be read.
    """
    try:
        answer = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(answer, dict):
        raise ValueError("not a JSON object")
    return answer


def read_handoff(content: bytes) -> Params | None:
    """P's `kv_transfer_params`, or None if the answer has none.

    Raises:
        ValueError: the answer is not a JSON object.
    """
    handoff = read_object(content).get("kv_transfer_params")
    return handoff if isinstance(handoff, dict) and handoff else None


def _encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _headers(call: Call, dp_rank: int | None, carrier: Carrier) -> tuple[tuple[str, str], ...]:
    rank = () if dp_rank is None else (("x-data-parallel-rank", str(dp_rank)),)
    own = [each for each in call.headers if not carrier or each[0] not in TRACE_HEADERS]
    return (
        *own,
        *carrier.items(),
        ("content-type", "application/json"),
        ("accept-encoding", "identity"),
        ("x-request-id", call.request_id),
        *rank,
    )
