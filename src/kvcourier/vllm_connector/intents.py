"""What of a client's parameters can be used, and what becomes of them before a courier hears them.

Decides whether two requests ask for the same KV, and whether a prompt's parameters fit it. Refuses
to know how far a request is; `scheduler_side` does that.
"""

from typing import Any

from kvcourier.config import TransferMode
from kvcourier.core.params import PullIntent, PushIntent, WantIntent
from kvcourier.ids import EngineId, RequestId, TransferId

Source = tuple[EngineId, RequestId | None, TransferId | None, int]


def source_of(intent: WantIntent) -> Source:
    """Whose KV is asked for."""
    return intent.holder.engine_id, intent.holder_request_id, intent.transfer_id, intent.part


def problem_of(intent: WantIntent, num_tokens: int | None, max_block_ids: int) -> str:
    """Why these params cannot be used for a prompt of so many tokens, or nothing.

    `num_tokens` is None where nothing but the holder's release is asked for.
    """
    if not isinstance(intent, PullIntent):
        return ""
    if sum(map(len, intent.block_ids)) > max_block_ids:
        return f"more than {max_block_ids} block ids"
    if num_tokens is not None and (intent.num_tokens or 0) > num_tokens:
        # With a longer prompt's params the KV of that prompt would be read as this one's.
        return (
            f"remote_num_tokens: at most {num_tokens}, as the prompt has, found {intent.num_tokens}"
        )
    return ""


def understood(intent: WantIntent) -> dict[str, Any]:
    """The params that give this intent again.

    A client's own dict may hold what cannot be encoded, or is too long for a courier's socket; the
    courier would then hear of the request only when it gets blocks, and die of it.
    """
    holder = intent.holder
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "remote_engine_id": holder.engine_id,
        "remote_host": holder.host,
        "remote_port": holder.port,
        "tp_size": holder.tp_size,
        "pp_size": holder.pp_size,
        "remote_request_id": intent.holder_request_id,
        "transfer_id": intent.transfer_id,
        "part": intent.part,
        "binding": intent.binding,
    }
    if isinstance(intent, PushIntent) and intent.reads:
        params["transfer_mode"] = TransferMode.PULL.value
    if isinstance(intent, PullIntent):
        params |= {
            "remote_block_ids": intent.block_ids,
            "remote_num_tokens": intent.num_tokens,
            "remote_hold_id": intent.hold_id,
            "remote_incarnation": intent.incarnation,
        }
    return params


def leave_last_token_out(request: Any) -> None:
    """Let P stop one token short of a prompt whose layers have sliding windows.

    D computes the last prompt token itself, and that token's window begins one position before
    that of the next. Had P computed it as well, vLLM would have dropped that position when it
    gives us the blocks, wherever it is the last of its block.
    """
    if request.prompt_token_ids is None or request.num_prompt_tokens < 2:
        return
    del request.prompt_token_ids[-1:]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
