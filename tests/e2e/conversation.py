"""A client that talks in turns, and what a single instance would have answered.

Decides how the prompt of a turn is made: all that was said before, and something new. Refuses to
know what becomes of the KV.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from e2e.client import streaming
from e2e.cluster import Server, body_of, mode_header
from engine.rig import generate, random_prompt
from kvcourier.engine.engine import Engine

NUM_NEW = 90
"""Tokens that each turn adds, neither a multiple of blocks nor of digests."""

NUM_ANSWER = 20


@dataclass
class Conversation:
    """Asks a router, turn by turn.

    Attributes:
        said: prompt and answer of all turns so far.
        raw: bodies of all answers, as they came.
    """

    router: Server
    single: Engine
    name: str
    mode: str
    streams: bool = True
    said: list[int] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)
    num_turns: int = 0

    def next_prompt(self, num_new: int = NUM_NEW) -> list[int]:
        """What is said next."""
        self.num_turns += 1
        seed = f"{self.name}-{self.num_turns}"
        return [*self.said, *random_prompt(num_new, seed=seed)]

    def turn(self, prompt: Sequence[int] | None = None) -> None:
        """One turn, which must have a single instance's answer."""
        prompt = list(self.next_prompt() if prompt is None else prompt)
        found = self.ask(prompt)
        (expected,) = generate(self.single, [prompt], max_tokens=NUM_ANSWER)
        assert found == expected
        self.said = [*prompt, *found]

    def ask(self, prompt: Sequence[int]) -> list[int]:
        """The answer's tokens."""
        headers = {"X-Conversation-Id": self.name, **mode_header(self.mode)}
        body = body_of(prompt, NUM_ANSWER)
        if not self.streams:
            response = self.router.post(body, headers=headers)
            assert response.status_code == 200, response.text
            self.raw.append(response.text)
            tokens: list[int] = response.json()["choices"][0]["token_ids"]
            return tokens
        with streaming(self.router.client, self.router.url, body, headers) as stream:
            stream.read()
        assert stream.is_done and stream.error is None, stream.error
        self.raw.append(str(stream.keys))
        return stream.token_ids


def computed(server: Server) -> float:
    """Prompt tokens that an instance has computed so far."""
    return server.metric("kvcourier:prompt_tokens_total")


def fetched(server: Server) -> float:
    """Histories that it has fetched."""
    return server.metric("kvcourier:histories_fetched_total")


def misses(server: Server) -> dict[str, float]:
    """Histories that it was offered and has not fetched, by reason."""
    reasons = (
        "off",
        "unproven",
        "rewritten",
        "not_needed",
        "not_held",
        "restarted",
        "failed",
    )
    found = {
        reason: server.metric("kvcourier:history_misses_total", reason=reason) for reason in reasons
    }
    return {reason: count for reason, count in found.items() if count}


def by_hand(state: dict[str, Any], mode: str, transfer_id: str) -> dict[str, Any]:
    """What a router sends P that knows this state, whatever its age."""
    return {**state, "transfer_id": transfer_id, "transfer_mode": mode}
