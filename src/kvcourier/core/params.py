"""What a request's `kv_transfer_params` ask for, checked field by field.

Decides which of three things a request is: one whose KV we hold for somebody (`HoldIntent`), one
whose KV we READ (`PullIntent`), or one whose KV is WRITTEN to us (`PushIntent`). One that we hold
may come with the KV of its beginning (`History`). Refuses to know engines and peers. Keys and
meanings are vLLM's (docs/protocol.md), ours are optional additions.

Nothing in the dict is trusted: vLLM's scheduler died of missing keys (CVE-2026-94622), of a list
of prompts sharing one dict (CVE-2026-94623) and of a huge `tp_size` (CVE-2026-94626).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvcourier.config import Limits, TransferMode
from kvcourier.core.token_proof import TokenProof, is_proof_text
from kvcourier.errors import ParamsError
from kvcourier.ids import (
    BlockId,
    EngineId,
    HoldId,
    Incarnation,
    RequestId,
    TransferId,
    TransferKey,
)

MAX_BINDING = 255
"""How often a router may bind a prompt anew."""


@dataclass(frozen=True, slots=True)
class HolderAddress:
    """Where the holder of a KV cache listens, and how many ranks it has."""

    engine_id: EngineId
    host: str
    port: int
    tp_size: int
    pp_size: int


@dataclass(frozen=True, slots=True)
class PullIntent:
    """READ this prompt's KV from a holder that has finished (`do_remote_prefill`, block ids).

    Attributes:
        is_written: the holder WRITEs it instead, in push mode.
        keeps: the engine keeps the KV of prompt and answer for the conversation's next turn, if it
            does that at all.
        binding: how many others the router has sent for it before us; None: there will be no other.
    """

    holder: HolderAddress
    holder_request_id: RequestId
    block_ids: tuple[tuple[BlockId, ...], ...]
    num_tokens: int | None
    hold_id: HoldId | None
    incarnation: Incarnation | None
    transfer_id: TransferId | None
    part: int = 0
    continuation: str | None = None
    is_written: bool = False
    keeps: bool = True
    binding: int | None = None


@dataclass(frozen=True, slots=True)
class PushIntent:
    """Register with a holder that may be computing still (`do_remote_prefill`, no block ids).

    It WRITEs this prompt's KV to us or, where `reads`, says when and what we may READ. `keeps` and
    `binding` as in `PullIntent`.
    """

    holder: HolderAddress
    holder_request_id: RequestId | None
    transfer_id: TransferId | None
    part: int = 0
    reads: bool = False
    keeps: bool = True
    binding: int | None = None


@dataclass(frozen=True, slots=True)
class History:
    """KV of a conversation's earlier turns, which another instance keeps.

    `proof` is of the tokens that it is of; None where whoever told us of it left it out.
    """

    source: PullIntent
    proof: TokenProof | None

    @property
    def is_proven(self) -> bool:
        """Whether it can be told from what else is, or was, in those blocks."""
        source = self.source
        said = (self.proof, source.hold_id, source.incarnation, source.num_tokens)
        return None not in said and all(source.block_ids)


@dataclass(frozen=True, slots=True)
class HoldIntent:
    """Compute this prompt and keep its KV for somebody (`do_remote_decode`).

    `transfer_id` is None where the router mints none; then only the request id can match. Of the
    prompt's beginning the KV may be had elsewhere, as `history`. `rebindable`: if the one that was
    to have it gives up or is lost, another may still come.
    """

    transfer_id: TransferId | None
    part: int = 0
    history: History | None = None
    rebindable: bool = False

    @property
    def key(self) -> TransferKey | None:
        """The exact name of the transfer, if the router minted one."""
        return TransferKey(self.transfer_id, self.part) if self.transfer_id is not None else None


WantIntent = PullIntent | PushIntent
Intent = HoldIntent | WantIntent


def parse_params(params: object, limits: Limits) -> Intent | None:
    """Read the `kv_transfer_params` of one request.

    Args:
        params: the JSON value as it came; None and `{}` mean an ordinary local request.
        limits: bounds on every number, string and list.

    Returns:
        None for an ordinary request.

    Raises:
        ParamsError: a field is missing, of the wrong type or out of bounds; answer with HTTP 400.
    """
    if params is None:
        return None
    if not isinstance(params, dict):
        raise ParamsError("(whole)", "an object", params)
    fields = _Fields(params, limits)
    decode_elsewhere = fields.flag("do_remote_decode")
    prefill_elsewhere = fields.flag("do_remote_prefill")
    if decode_elsewhere and prefill_elsewhere:
        raise ParamsError(
            "do_remote_prefill", "false where do_remote_decode is true, as one leg does one", True
        )
    if not decode_elsewhere and not prefill_elsewhere:
        return None
    transfer_id = fields.optional_text("transfer_id")
    part = fields.number("part", 0, limits.max_parts - 1, default=0)
    if decode_elsewhere:
        history = _history(fields) if params.get("remote_block_ids") else None
        rebindable = fields.flag("rebindable")
        return HoldIntent(_as_transfer_id(transfer_id), part, history, rebindable)
    if params.get("remote_block_ids") is None:
        holder = fields.holder()
        request_id = fields.optional_text("remote_request_id")
        if transfer_id is None and request_id is None:
            raise ParamsError(
                "transfer_id", "a string here or in remote_request_id, to find the prompt", None
            )
        return PushIntent(
            holder,
            RequestId(request_id) if request_id is not None else None,
            _as_transfer_id(transfer_id),
            part,
            fields.mode("transfer_mode") is TransferMode.PULL,
            fields.flag("keep_history", default=True),
            fields.optional_number("binding", 0, MAX_BINDING),
        )
    return _pull(fields, _as_transfer_id(transfer_id), part)


def _pull(fields: "_Fields", transfer_id: TransferId | None, part: int) -> PullIntent:
    hold_id = fields.optional_text("remote_hold_id")
    incarnation = fields.optional_text("remote_incarnation")
    return PullIntent(
        holder=fields.holder(),
        holder_request_id=RequestId(fields.text("remote_request_id")),
        block_ids=fields.block_ids("remote_block_ids"),
        num_tokens=fields.optional_number("remote_num_tokens", 1, fields.limits.max_tokens),
        hold_id=HoldId(hold_id) if hold_id is not None else None,
        incarnation=Incarnation(incarnation) if incarnation is not None else None,
        transfer_id=transfer_id,
        part=part,
        continuation=fields.optional_text("remote_continuation"),
        keeps=fields.flag("keep_history", default=True),
        binding=fields.optional_number("binding", 0, MAX_BINDING),
    )


def _history(fields: "_Fields") -> History:
    """What another instance keeps of the turns before. The names of this dispatch are not its."""
    is_written = fields.mode("transfer_mode") is TransferMode.PUSH
    return History(replace(_pull(fields, None, 0), is_written=is_written), fields.proof())


def handoff_params(
    holder: HolderAddress,
    request_id: RequestId,
    block_ids: Sequence[Sequence[int]],
    num_tokens: int,
    hold_id: HoldId,
    incarnation: Incarnation,
    modes: Collection[TransferMode],
    key: TransferKey | None,
    continuation: str | None = None,
) -> dict[str, object]:
    """The `kv_transfer_params` of a holder's answer, for a router to relay to the wanter.

    vLLM's keys and meanings, and `remote_hold_id`, `remote_incarnation` and `remote_continuation`
    of ours.
    """
    params: dict[str, object] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(group) for group in block_ids],
        "remote_engine_id": holder.engine_id,
        "remote_request_id": request_id,
        "remote_host": holder.host,
        "remote_port": holder.port,
        "tp_size": holder.tp_size,
        "pp_size": holder.pp_size,
        "dcp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "remote_hold_id": hold_id,
        "remote_incarnation": incarnation,
    }
    if len(modes) == 1:
        # A router that tells vLLM's two connectors apart reads this; ours is both, unless told.
        params["transfer_mode"] = next(iter(modes)).value
    if key is not None:
        params |= {"transfer_id": key.transfer_id, "part": key.part}
    if continuation is not None:
        params["remote_continuation"] = continuation
    return params


def history_params(
    handoff: Mapping[str, object], ttl_s: float, proof: TokenProof
) -> dict[str, object]:
    """The `kv_transfer_params` of an answer that is kept, for the conversation's next turn.

    Args:
        handoff: `handoff_params` of what is kept.
        ttl_s: how long it is kept. vLLM tells a time of a clock of its own instead.
        proof: of the tokens that are kept.
    """
    return {
        **handoff,
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_ttl_s": ttl_s,
        "remote_digest_tokens": proof.step,
        "remote_digests": proof.text,
    }


def _as_transfer_id(text: str | None) -> TransferId | None:
    return TransferId(text) if text is not None else None


class _Fields:
    """Reads one field at a time and says what is wrong with it."""

    def __init__(self, params: Mapping[str, object], limits: Limits) -> None:
        self._params = params
        self.limits = limits

    def holder(self) -> HolderAddress:
        limit = self.limits.max_ranks
        holder = HolderAddress(
            engine_id=EngineId(self.text("remote_engine_id")),
            host=self.text("remote_host"),
            port=self.number("remote_port", 1, 65535),
            tp_size=self.number("tp_size", 1, limit, default=1),
            pp_size=self.number("pp_size", 1, limit, default=1),
        )
        if holder.tp_size * holder.pp_size > limit:
            size = holder.tp_size * holder.pp_size
            raise ParamsError("tp_size", f"tp_size x pp_size <= {limit}", size)
        return holder

    def proof(self) -> TokenProof | None:
        value = self._params.get("remote_digests")
        if value is None:
            return None
        step = self.number("remote_digest_tokens", 1, self.limits.max_tokens)
        if not isinstance(value, str) or not is_proof_text(value):
            raise ParamsError("remote_digests", "digests in Base64", value)
        return TokenProof(step, value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._params.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ParamsError(name, "true or false", value)
        return value

    def text(self, name: str) -> str:
        value = self._params.get(name)
        limit = self.limits.max_id_bytes
        if not isinstance(value, str) or not value or len(value.encode("utf-8", "replace")) > limit:
            raise ParamsError(name, f"a string of 1 to {limit} bytes", value)
        if not value.isprintable():
            raise ParamsError(name, "printable characters", value)
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self._params.get(name) is None else self.text(name)

    def mode(self, name: str) -> TransferMode | None:
        value = self.optional_text(name)
        if value is None:
            return None
        try:
            return TransferMode(value)
        except ValueError:
            raise ParamsError(name, " or ".join(TransferMode), value) from None

    def number(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self._params.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ParamsError(name, f"a whole number from {low} to {high}", value)
        return value

    def optional_number(self, name: str, low: int, high: int) -> int | None:
        return None if self._params.get(name) is None else self.number(name, low, high)

    def block_ids(self, name: str) -> tuple[tuple[BlockId, ...], ...]:
        value = self._params.get(name)
        if not isinstance(value, list) or not value:
            raise ParamsError(name, "one list of block ids per cache group", value)
        # Releases of vLLM with one cache group also send a flat list.
        groups = value if isinstance(value[0], list) else [value]
        if len(groups) > self.limits.max_groups:
            raise ParamsError(name, f"at most {self.limits.max_groups} cache groups", value)
        return tuple(self._group(name, group) for group in groups)

    def _group(self, name: str, group: object) -> tuple[BlockId, ...]:
        limit = self.limits.max_block_ids
        if not isinstance(group, list) or len(group) > limit:
            raise ParamsError(name, f"lists of at most {limit} block ids", group)
        for block in group:
            if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < 2**31:
                raise ParamsError(name, "block ids from 0 to 2147483647", block)
        return tuple(BlockId(block) for block in group)
