"""Tokens in, text out, one token at a time.

Decides when text is final enough to be shown: whole characters only, and nothing that may turn
out to be the start of a stop string. The result does not depend on how tokens were batched.
Refuses to know tokenizers (it is given a decode function), engines and HTTP.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text. Incomplete bytes at the end come out as U+FFFD."""

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS = 64
"""Tokens without a clean character boundary before they count as garbage that never gets one.

Without a bound, a model that emits broken bytes for ever would cost quadratic time.
"""


class Detokenizer:
    """Turns tokens into pieces of text whose concatenation is the text of all tokens.

    A window of tokens is decoded, not the last token alone, because the text of a token depends
    on its neighbours (a leading space that only the first token loses, bytes of one character
    spread over several tokens):

        tokens   ... [context][ not yet on a boundary ]
                     ^window                          ^end

    A tokenizer with byte fallback may revoke a valid character once an invalid byte follows it
    directly; a character already shown stays.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._context_tokens = 0
        self._num_shown = 0  # characters of the window's text that were returned

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that became final."""
        self._window.append(token_id)
        text = self._decode(self._window)
        held_tokens = len(self._window) - self._context_tokens
        ends_clean = not text.endswith(_BROKEN) or held_tokens > _MAX_HELD_TOKENS
        piece = self._show(text if ends_clean else text.rstrip(_BROKEN))
        # A window must begin with a token that has text: behind one that has none (a special
        # token), some tokenizers drop the next token's leading space.
        if ends_clean and (piece or held_tokens > _MAX_HELD_TOKENS):
            del self._window[: self._context_tokens]
            self._context_tokens = len(self._window)
            self._num_shown = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        """Return what was held back; no token follows. Broken bytes come out as U+FFFD."""
        return self._show(self._decode(self._window)) if self._window else ""

    def _show(self, text: str) -> str:
        piece = text[self._num_shown :]
        self._num_shown += len(piece)
        return piece


class StopFinder:
    """Passes text through up to the first stop string, which is not part of the result.

    "First" is the one complete earliest; of those complete at once, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Take more text and return the part that cannot belong to a stop string."""
        if self.found or not text:
            return ""
        text = self._held + text
        self._held = ""
        matches = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if matches:
            self.found = True
            return text[: min(matches)[1]]
        cut = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return what was held back; no text follows."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """The visible text of one answer, up to its stop string.

    Args:
        decode: see `Decode`.
        stops: stop strings; empty ones are ignored.
        min_tokens: text of the first so many tokens is not searched for stop strings.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(decode)
        self._finder = StopFinder(stops)
        self._unsearched_tokens = min_tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; pushing more tokens has no effect then."""
        return self._finder.found

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that became final."""
        if self.stopped:
            return ""
        piece = self._detokenizer.push(token_id)
        if self._unsearched_tokens > 0:
            self._unsearched_tokens -= 1
            return piece
        return self._finder.push(piece)

    def finish(self) -> str:
        """Return what was held back; the answer has ended. May find a stop string."""
        if self.stopped:
            return ""
        rest = self._finder.push(self._detokenizer.flush())
        return rest if self.stopped else rest + self._finder.flush()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper start of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
