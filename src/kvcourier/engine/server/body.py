"""From the bytes of a body to one of the two request types.

Decides what is a well-formed body: size, JSON, types of fields, and fields that we know but do
not support. Refuses to know what values mean.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from kvcourier.engine.server.errors import ApiError, bad_field
from kvcourier.errors import clip
from kvcourier.openai import GenerationFields

RequestT = TypeVar("RequestT", bound=GenerationFields)

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # Fields of OpenAI and vLLM that would change the answer, with the values that do not.
    # An unknown field is ignored; silently ignoring one of these would give a wrong answer.
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "add_generation_prompt": (None, True),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "logits_processors": (None, []),
    "logprobs": (None, False),
    "min_p": (None, 0),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "structured_outputs": (None, {}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}

_PATH = re.compile(r" - at `\$?\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(.*?)`")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request, read completely.

    Raises:
        ApiError: 413, it is longer than `max_bytes`; reading stops there.
        starlette.requests.ClientDisconnect: the client has gone.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def parse_body(body: bytes, kind: type[RequestT]) -> RequestT:
    """Read a body as a request of `kind`.

    Raises:
        ApiError: 400, naming the field where it is one field's fault.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {clip(str(error))}") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is not a JSON object")
    refuse_unsupported(fields)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raise ApiError (400) for a known field with a value that we cannot honour."""
    for name, neutral in UNSUPPORTED.items():
        # `False == 0` in Python, but `logprobs: 0` asks for something and `false` does not.
        if name in fields and not any(
            fields[name] == value and isinstance(fields[name], bool) == isinstance(value, bool)
            for value in neutral
        ):
            raise bad_field(name, "not supported here; leave it out")


def _wrong_type(message: str) -> ApiError:
    path = _PATH.search(message)
    missing = _MISSING.search(message)
    names = [found[1] for found in (path, missing) if found and found[1]]
    text = clip(_PATH.sub("", message))
    text = text[:1].lower() + text[1:]
    if not names:
        return ApiError(400, text)
    return bad_field(".".join(names), text)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes")
