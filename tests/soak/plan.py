"""What clients ask during a soak, and when they leave; all drawn from a seed.

Decides prompts, calls and which process is killed when. Refuses to know processes: how long a call
takes is the machine's, so a seed repeats the calls, not their interleaving.
"""

import dataclasses
import random
from collections.abc import Iterator, Sequence

from engine.rig import random_prompt

LONGEST_ANSWER = 48
MODES = ("pull", "push")
BINDINGS = (None, "early", "late")
LENGTHS = ((24, 2, 60), (12, 90, 400), (6, 800, 1500))
"""How many prompts of the pool have from so many to so many tokens."""

LEAVES_EARLY = 0.25
"""Part of the clients that leave before the end of their answer."""
LEAVE_S = (0.001, 2.0)
"""After how long they do; the shorter, the likelier, as most phases are short."""
ANSWERS_ITSELF = 0.1
"""Part of the calls that go to an instance itself, with several prompts: the router takes one."""
REPEATS = 0.3
"""Part of the calls that ask for what the same client has asked for before."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One request.

    Attributes:
        prompts: their places in the pool. Several go to an instance itself.
        whom: `router`, or the instance.
        leaves_after_s: the client leaves then at the latest, if it leaves.
        leaves_after_tokens: it leaves as soon as it has so many, if it leaves.
    """

    prompts: tuple[int, ...]
    num_tokens: int
    mode: str = "pull"
    binding: str | None = None
    whom: str = "router"
    streams: bool = True
    leaves_after_s: float | None = None
    leaves_after_tokens: int | None = None

    @property
    def leaves(self) -> bool:
        """Whether the client means to leave early."""
        return self.leaves_after_s is not None or self.leaves_after_tokens is not None


def pool(seed: int) -> list[tuple[int, ...]]:
    """The prompts: of all lengths, and some that begin like another one."""
    source = random.Random(f"pool-{seed}")
    prompts = [
        random_prompt(source.randint(shortest, longest), seed=f"soak-{seed}-{shortest}-{index}")
        for number, shortest, longest in LENGTHS
        for index in range(number)
    ]
    for index in range(0, len(prompts), 5):
        other = source.choice(prompts)
        prompts[index] = other[: len(other) * 2 // 3] + prompts[index][:60]
    return prompts


def calls(seed: int, client: int, num_prompts: int) -> Iterator[Call]:
    """What one client asks for, one after the other, without end."""
    source = random.Random(f"client-{seed}-{client}")
    asked: list[int] = []
    while True:
        again = bool(asked) and source.random() < REPEATS
        prompt = source.choice(asked[-4:]) if again else source.randrange(num_prompts)
        asked.append(prompt)
        call = Call(
            (prompt,),
            source.randint(1, LONGEST_ANSWER),
            mode=source.choice(MODES),
            binding=source.choice(BINDINGS),
            streams=source.random() < 0.6,
        )
        if source.random() < ANSWERS_ITSELF:
            several = tuple(source.randrange(num_prompts) for _ in range(source.randint(2, 4)))
            whom = source.choice(("prefill", "decode"))
            call = dataclasses.replace(call, prompts=several, whom=whom)
        if source.random() < LEAVES_EARLY:
            call = _leaving(call, source)
        yield call


def _leaving(call: Call, source: random.Random) -> Call:
    if call.streams and source.random() < 0.4:
        return dataclasses.replace(call, leaves_after_tokens=source.randint(1, call.num_tokens))
    shortest, longest = LEAVE_S
    after_s = shortest * (longest / shortest) ** source.random()
    return dataclasses.replace(call, leaves_after_s=after_s)


def restarts(seed: int, minutes: float) -> list[tuple[float, str]]:
    """(seconds from the start, whom) of each kill: one a minute, P and D in turn.

    Each comes between a third and a half of its minute, so that there is traffic before and after.
    """
    source = random.Random(f"restarts-{seed}")
    turns: Sequence[str] = source.choice((("prefill", "decode"), ("decode", "prefill")))
    number = max(1, round(minutes))
    length_s = minutes * 60 / number
    return [
        ((index + source.uniform(1 / 3, 1 / 2)) * length_s, turns[index % 2])
        for index in range(number)
    ]
