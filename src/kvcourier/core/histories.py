"""How much of an offered history a prompt may use, and why not, if not.

Decides it from the tokens and from what the offer proves. Refuses to know engines, and whether what
may be used is worth moving beyond a number of tokens that the engine names.
"""

import enum
from collections.abc import Sequence

from kvcourier.core.params import History


class Miss(enum.StrEnum):
    """Why a history that was offered was not fetched."""

    OFF = "off"
    """This instance fetches none."""
    UNPROVEN = "unproven"
    """Its reference says too little to be believed."""
    REWRITTEN = "rewritten"
    """The prompt does not begin with it."""
    NOT_NEEDED = "not_needed"
    """It is cached here, or too short to be worth it."""
    NOT_HELD = "not_held"
    """Who kept it has let it go, or given it to another request."""
    RESTARTED = "restarted"
    """Who kept it was started anew."""
    FAILED = "failed"
    """It could not be moved."""


def usable_tokens(
    history: History, prompt: Sequence[int], threshold: int, salt: str = ""
) -> int | Miss:
    """Tokens at the prompt's beginning whose KV may be had from there: at least `threshold`.

    The prompt's last token is never among them: it is computed for its logits.
    """
    proof, num_held = history.proof, history.source.num_tokens
    if proof is None or num_held is None or not history.is_proven:
        return Miss.UNPROVEN
    num_proven = min(proof.num_proven(prompt, salt), num_held, len(prompt) - 1)
    if num_proven >= threshold:
        return num_proven
    was_long = min(proof.num_tokens, len(prompt)) >= threshold
    return Miss.REWRITTEN if was_long else Miss.NOT_NEEDED
