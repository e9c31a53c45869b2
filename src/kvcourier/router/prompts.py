"""What a router can tell of a prompt without the model: its size, and which prompts begin alike.

Decides how a body's prompt is cut into parts, and what names the beginning up to each part.
Refuses to know tokenizers: token ids are counted, text is estimated.
"""

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PART_TOKENS = 64
_BYTES_PER_TOKEN = 4
"""Of text in English, by most tokenizers; of an id, by how it is packed here."""
_PART_BYTES = PART_TOKENS * _BYTES_PER_TOKEN
_MAX_PARTS = 2048
"""Of one prompt; what is behind counts as never seen."""
# What the KV of a prompt depends on besides the prompt.
_CONTEXT_KEYS = ("model", "cache_salt", "tools", "chat_template", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        num_tokens: counted, or estimated at four bytes a token.
        parts: names of its beginnings, each one part longer; prompts that begin alike share them.
    """

    num_tokens: int = 0
    parts: tuple[int, ...] = ()

    @property
    def num_parts(self) -> int:
        """Parts to be computed where nothing of it is known, the last one begun."""
        return max(1, math.ceil(self.num_tokens / PART_TOKENS))


def prompt_of(body: Mapping[str, Any]) -> Prompt:
    """The prompt of a completion's or a chat's body; of a body without one, an empty one."""
    text = _bytes_of(body)
    digest = hashlib.blake2b(_dump([body.get(key) for key in _CONTEXT_KEYS]), digest_size=8)
    parts = []
    for start in range(0, min(len(text), _MAX_PARTS * _PART_BYTES) - _PART_BYTES + 1, _PART_BYTES):
        digest.update(text[start : start + _PART_BYTES])
        parts.append(int.from_bytes(digest.digest(), "big"))
    return Prompt(math.ceil(len(text) / _BYTES_PER_TOKEN), tuple(parts))


class PrefixMemory:
    """Beginnings of prompts that an instance was sent; the least lately used are forgotten.

    A guess at its prefix cache, which keeps and drops blocks by rules of its own.
    """

    def __init__(self, max_parts: int) -> None:
        self._max_parts = max_parts
        self._parts: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parts)

    def num_known(self, prompt: Prompt) -> int:
        """How many of the prompt's parts, from the first on, it was sent before."""
        known = 0
        for part in prompt.parts:
            if part not in self._parts:
                break
            known += 1
        return known

    def add(self, prompt: Prompt) -> None:
        """It is sent this prompt."""
        # Backwards: of a prompt that is forgotten in part, the beginning should stay.
        for part in reversed(prompt.parts):
            self._parts[part] = None
            self._parts.move_to_end(part)
        while len(self._parts) > self._max_parts:
            self._parts.popitem(last=False)

    def clear(self) -> None:
        """It was started anew, with an empty cache."""
        self._parts.clear()


def _bytes_of(body: Mapping[str, Any]) -> bytes:
    messages = body.get("messages")
    if isinstance(messages, list):
        # One by one, so that a further turn only appends.
        return b"".join(map(_dump, messages))
    return _bytes_of_prompt(body.get("prompt"))


def _bytes_of_prompt(prompt: object) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        return _bytes_of_prompt(prompt[0]) if isinstance(prompt[0], str | list) else b""
    return _packed(prompt) if isinstance(prompt, list) else b""


def _packed(ids: Sequence[object]) -> bytes:
    whole: Iterable[int] = (each for each in ids if isinstance(each, int))
    return b"".join((each & 0xFFFFFFFF).to_bytes(_BYTES_PER_TOKEN, "big") for each in whole)


def _dump(value: object) -> bytes:
    # With surrogates as escapes: a client may send half of a pair.
    return json.dumps(value, separators=(",", ":")).encode()
