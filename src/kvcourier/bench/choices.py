"""The choices that make up one transfer, as a table, and the combinations worth comparing.

Decides which values each choice has, how a value is asked of `kvcourier serve` or of the router,
and which combinations an ablation measures. Refuses to know processes: whether a flag exists is
told by whoever knows the installed `serve`. Pure.

One table, `FLAGS`, maps values to flags. A new name of a flag is one line there.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvcourier.bench.plan import Way

KnownFlags = Mapping[str, Collection[str] | None]
"""Flags of the installed `serve` with the values each takes; None: whatever its type allows."""


@dataclass(frozen=True, slots=True)
class Choices:
    """One point in the space of transfers.

    Attributes:
        binding: late (D allocates after prefill) or early (D registers while P computes).
        initiator: READ by D or WRITE by P.
        posting: inline in the engine's step, or on the courier's thread.
        granularity: what moves at once: the whole request, a chunk, a layer of a chunk.
        path: direct (a descriptor per run of blocks), packed, or auto (by cost, per transfer).
        first_token: seeded (P's token is D's first) or recomputed by D.
    """

    binding: str
    initiator: str
    posting: str
    granularity: str
    path: str
    first_token: str


@dataclass(frozen=True, slots=True)
class _Flag:
    """How a choice is asked of `serve`.

    Attributes:
        flag: its name; of a switch, the form that turns it on.
        arguments: what is put on the command line for each value.
        without: what an instance does whose `serve` has no such flag.
    """

    flag: str
    arguments: Mapping[str, str]
    without: str


def _valued(flag: str, without: str, *values: str) -> _Flag:
    return _Flag(flag, {value: f"{flag}={value}" for value in values}, without)


FLAGS: Mapping[str, _Flag] = {
    "posting": _valued("--posting", "thread", "thread", "inline"),
    "granularity": _valued("--granularity", "request", "request", "chunk", "layer"),
    "path": _valued("--path", "direct", "auto", "direct", "packed"),
    "first_token": _Flag(
        "--first-token-seeding",
        {"seeded": "--first-token-seeding", "recomputed": "--no-first-token-seeding"},
        "recomputed",
    ),
}
FRAGMENT_FLAG = "--fragment"

WAYS: Mapping[tuple[str, str], Way] = {
    ("late", "READ"): Way.PULL,
    ("early", "READ"): Way.EARLY_PULL,
    ("late", "WRITE"): Way.LATE_PUSH,
    ("early", "WRITE"): Way.PUSH,
}
"""Which mode of the router has this binding and this initiator."""


@dataclass(frozen=True, slots=True)
class Row:
    """A named combination.

    Attributes:
        base: the name of the row that it is compared with; None: with none.
        differs: the one choice in which it differs from that row; None: in several.
    """

    name: str
    choices: Choices
    base: str | None = None
    differs: str | None = None


OURS = Choices("early", "WRITE", "thread", "layer", "auto", "seeded")
NIXL = Choices("late", "READ", "inline", "request", "direct", "recomputed")

_FROM_OURS = (
    ("binding", "late"),
    ("initiator", "READ"),
    ("posting", "inline"),
    ("granularity", "chunk"),
    ("granularity", "request"),
    ("path", "direct"),
    ("path", "packed"),
    ("first_token", "recomputed"),
)
# Not its granularity: what is READ after prefill is READ whole. Its posting has a name of its own.
_FROM_NIXL = (
    ("binding", "early"),
    ("initiator", "WRITE"),
    ("path", "packed"),
    ("first_token", "seeded"),
)


def _changed(name: str, choices: Choices, changes: Sequence[tuple[str, str]]) -> Sequence[Row]:
    return [
        Row(f"{name}, {choice} {value}", replace(choices, **{choice: value}), name, choice)
        for choice, value in changes
    ]


ROWS: Sequence[Row] = (
    Row("kvcourier", OURS),
    Row("NixlConnector", NIXL, "kvcourier"),
    Row("reader-thread pull", replace(NIXL, posting="thread"), "kvcourier"),
    Row(
        "NixlPushConnector",
        replace(NIXL, binding="early", initiator="WRITE", posting="thread"),
        "kvcourier",
    ),
    *_changed("kvcourier", OURS, _FROM_OURS),
    *_changed("NixlConnector", NIXL, _FROM_NIXL),
)
"""Every combination of the ablation: ours, what others have as points in the same space, and both
ours and NixlConnector's with one choice changed."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a combination is run: flags of both instances, and the router's mode."""

    flags: tuple[str, ...]
    way: Way


@dataclass(frozen=True, slots=True)
class NotAvailable:
    """Why a combination cannot be run here."""

    reason: str


def set_up(choices: Choices, known: KnownFlags) -> Setup | NotAvailable:
    """The flags and the mode of a combination, or what is missing for it."""
    flags = []
    for choice, spec in FLAGS.items():
        value = getattr(choices, choice)
        if spec.flag not in known:
            if value != spec.without:
                return NotAvailable(f"this `kvcourier serve` has no {spec.flag}")
            continue
        allowed = known[spec.flag]
        if allowed is not None and value not in allowed:
            return NotAvailable(f"this `kvcourier serve` has no {spec.arguments[value]}")
        flags.append(spec.arguments[value])
    return Setup(tuple(flags), WAYS[choices.binding, choices.initiator])
