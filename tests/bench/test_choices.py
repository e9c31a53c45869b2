"""The table of choices: what each combination asks of `serve` and of the router."""

import pytest

from kvcourier.bench.choices import FLAGS, OURS, ROWS, WAYS, Choices, NotAvailable, Setup, set_up
from kvcourier.bench.plan import ASKED, Way
from kvcourier.cli.bench_values import serve_flags
from kvcourier.config import USUAL_BINDING, TransferMode

ALL_FLAGS = {
    "--posting": frozenset({"thread", "inline"}),
    "--granularity": frozenset({"request", "chunk", "layer"}),
    "--path": frozenset({"auto", "direct", "packed"}),
    "--first-token-seeding": None,
    "--no-first-token-seeding": None,
}


def row(name: str) -> Choices:
    return next(each.choices for each in ROWS if each.name == name)


def test_names_are_unique_and_each_change_changes_one_choice() -> None:
    assert len({each.name for each in ROWS}) == len({each.choices for each in ROWS}) == len(ROWS)
    for each in ROWS:
        if each.base is None:
            assert each.choices == OURS
            continue
        base = row(each.base)
        differing = [
            name for name in OURS.__slots__ if getattr(each.choices, name) != getattr(base, name)
        ]
        assert differing
        if each.differs is not None:
            assert differing == [each.differs]
    changed = {(each.base, each.differs) for each in ROWS if each.differs}
    assert {differs for base, differs in changed if base == "kvcourier"} == set(OURS.__slots__)
    # The other two: a thread that posts is the reader-thread pull, and a READ has no parts.
    assert {differs for base, differs in changed if base == "NixlConnector"} == (
        set(OURS.__slots__) - {"posting", "granularity"}
    )


def test_every_value_of_a_row_is_in_the_table() -> None:
    for each in ROWS:
        for choice, flag in FLAGS.items():
            assert getattr(each.choices, choice) in flag.arguments
    assert all(flag.without in flag.arguments for flag in FLAGS.values())


@pytest.mark.parametrize(
    ("name", "flags", "way"),
    [
        (
            "NixlConnector",
            "--posting=inline --granularity=request --path=direct --no-first-token-seeding",
            Way.PULL,
        ),
        (
            "NixlPushConnector",
            "--posting=thread --granularity=request --path=direct --no-first-token-seeding",
            Way.PUSH,
        ),
        (
            "kvcourier",
            "--posting=thread --granularity=layer --path=auto --first-token-seeding",
            Way.PUSH,
        ),
    ],
)
def test_a_combination_becomes_flags_and_a_mode(name: str, flags: str, way: Way) -> None:
    assert set_up(row(name), ALL_FLAGS) == Setup(tuple(flags.split()), way)


def test_without_any_flag_only_what_such_a_serve_does_is_available() -> None:
    available = {each.name for each in ROWS if isinstance(set_up(each.choices, {}), Setup)}
    assert available == {"reader-thread pull", "NixlPushConnector"}  # what it always does
    assert set_up(row("reader-thread pull"), {}) == Setup((), Way.PULL)


def test_what_is_missing_is_named() -> None:
    known = {flag: values for flag, values in ALL_FLAGS.items() if flag != "--path"}
    assert set_up(OURS, known) == NotAvailable("this `kvcourier serve` has no --path")
    assert isinstance(set_up(row("NixlConnector"), known), Setup)
    narrow = ALL_FLAGS | {"--granularity": frozenset({"request", "chunk"})}
    found = set_up(OURS, narrow)
    assert found == NotAvailable("this `kvcourier serve` has no --granularity=layer")


def test_each_binding_goes_with_each_initiator() -> None:
    found = {pair: ASKED[way] for pair, way in WAYS.items()}
    assert {pair: mode for pair, (mode, _) in found.items()} == {
        ("late", "READ"): TransferMode.PULL,
        ("early", "READ"): TransferMode.PULL,
        ("late", "WRITE"): TransferMode.PUSH,
        ("early", "WRITE"): TransferMode.PUSH,
    }
    for (binding, _), (mode, said) in found.items():
        assert (said or USUAL_BINDING[mode]) == binding


def test_flags_of_the_installed_serve_are_known_with_their_values() -> None:
    known = serve_flags()
    assert known["--role"] == {"prefill", "decode", "both"}
    assert known["--block-size"] is None
    assert {"--prefix-caching", "--no-prefix-caching"} <= known.keys()
    # Where a flag of the table exists, the values that rows want of it exist as well.
    for choice, flag in FLAGS.items():
        allowed = known.get(flag.flag)
        if allowed is not None:
            wanted = {getattr(each.choices, choice) for each in ROWS}
            assert wanted <= set(allowed), flag.flag
