"""What a client may ask of the router.

Decides whether a request's body and headers can be dispatched at all, and which of its headers
travel on. Refuses to know instances: what only they can judge (model, prompt, sampling) they do.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvcourier.config import USUAL_BINDING, Binding, TransferMode
from kvcourier.errors import ConfigError, KVCourierError, shorten
from kvcourier.router.config import parse_binding, parse_mode

REQUEST_ID_HEADER = "x-request-id"
MODE_HEADER = "x-kv-mode"
BINDING_HEADER = "x-kv-binding"
CONVERSATION_HEADER = "x-conversation-id"
TIMEOUT_HEADER = "x-request-timeout"
_MAX_CONVERSATION_CHARS = 256
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

# Belong to one connection (RFC 9110 section 7.6.1), or are set anew for each leg.
_NOT_FORWARDED = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "expect"),
        *("host", "content-length", "content-type", "content-encoding", "accept-encoding"),
        *("x-data-parallel-rank", REQUEST_ID_HEADER, MODE_HEADER, BINDING_HEADER),
        TIMEOUT_HEADER,
    }
)


class CallRefused(KVCourierError):
    """The call cannot be dispatched: HTTP 400, no instance has seen it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a call.

    Raises:
        CallRefused: not JSON, not an object, or more than one sub-request in it.
    """
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError:
        raise CallRefused("The body is nested too deeply.") from None
    except ValueError as error:
        raise CallRefused(f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise CallRefused("The body must be a JSON object.")
    if body.get("kv_transfer_params") is not None:
        raise CallRefused(
            "kv_transfer_params is set by the router; leave it out.", "kv_transfer_params"
        )
    for field, is_single in _SINGLE.items():
        if field in body and not is_single(body[field]):
            raise CallRefused(
                f"{field}: the router takes one prompt and one answer per call, because each "
                "prompt's KV cache is a transfer of its own; send one call each.",
                field,
            )
    return body


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _is_one(value: object) -> bool:
    return value is None or value == 1


def _is_one_prompt(value: object) -> bool:
    # A list of numbers is the token ids of one prompt; of anything else, one prompt per item.
    if not isinstance(value, list) or len(value) <= 1:
        return True
    return all(isinstance(item, int) for item in value)


def _is_off(value: object) -> bool:
    return not value


_SINGLE: Mapping[str, Callable[[object], bool]] = {
    "n": _is_one,
    "best_of": _is_one,
    "use_beam_search": _is_off,
    "prompt": _is_one_prompt,
    "prompt_embeds": _is_one_prompt,
}


def request_id_of(headers: Mapping[str, str], mint: Callable[[], str]) -> str:
    """The client's `X-Request-Id` if it is 1 to 128 plain characters, else a minted one."""
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _SANE_REQUEST_ID.fullmatch(given) else mint()


def mode_of(headers: Mapping[str, str], default: TransferMode) -> TransferMode:
    """The transfer mode of this call.

    Raises:
        CallRefused: `X-KV-Mode` names none.
    """
    given = headers.get(MODE_HEADER)
    if given is None:
        return default
    try:
        return parse_mode(given, "X-KV-Mode")
    except ConfigError as error:
        raise CallRefused(str(error), MODE_HEADER) from None


def binding_of(headers: Mapping[str, str], mode: TransferMode, default: Binding | None) -> Binding:
    """When D is bound for this call: as it says, else as configured, else as its mode means.

    Raises:
        CallRefused: `X-KV-Binding` names none.
    """
    given = headers.get(BINDING_HEADER)
    if given is None:
        return default or USUAL_BINDING[mode]
    try:
        return parse_binding(given, "X-KV-Binding")
    except ConfigError as error:
        raise CallRefused(str(error), BINDING_HEADER) from None


def conversation_of(headers: Mapping[str, str]) -> str:
    """Which conversation this call belongs to; empty if it does not say.

    Raises:
        CallRefused: `X-Conversation-Id` is too long.
    """
    given = headers.get(CONVERSATION_HEADER, "").strip()
    if len(given) > _MAX_CONVERSATION_CHARS:
        raise CallRefused(
            f"X-Conversation-Id: expected at most {_MAX_CONVERSATION_CHARS} characters, found "
            f"{len(given)}",
            CONVERSATION_HEADER,
        )
    return given


def total_s_of(headers: Mapping[str, str], longest_s: float) -> float:
    """How long this call may take: as it says, but no longer than is configured.

    Raises:
        CallRefused: `X-Request-Timeout` is no number of seconds.
    """
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return longest_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise CallRefused(
            f"X-Request-Timeout: expected seconds above 0, found {shorten(given)}", TIMEOUT_HEADER
        )
    return min(seconds, longest_s)


def forwarded_headers(
    headers: Iterable[tuple[str, str]], router_has_keys: bool = False
) -> tuple[tuple[str, str], ...]:
    """The client's headers that both legs carry, in lower case: authorization, tracing, ...

    A client's key is the instances' business only where the router knows no keys itself.
    """
    lowered = [(name.lower(), value) for name, value in headers]
    listed = {
        item.strip().lower()
        for name, value in lowered
        if name == "connection"
        for item in value.split(",")
    }
    dropped = _NOT_FORWARDED | listed | ({"authorization"} if router_has_keys else set())
    return tuple((name, value) for name, value in lowered if name not in dropped)
