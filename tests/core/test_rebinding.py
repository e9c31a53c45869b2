"""A prompt that P holds outlives the one that was to have it, where the router said so."""

import pytest

from kvcourier.config import Timing
from kvcourier.core.bindings import binding_of, first_epoch
from kvcourier.core.messages import Cancel, Fail, Register
from kvcourier.core.outcomes import Outcome
from kvcourier.core.params import MAX_BINDING
from kvcourier.core.workspace import Counted
from kvcourier.ids import Rank
from pair import Pair

RANK = Rank(0, 0)
RECEIVED = {Outcome.RECEIVED, Outcome.RELEASED}
SENT = {Outcome.SENT, Outcome.RELEASED}


def begun(rebindable: bool = True, **shapes: object) -> Pair:
    """D's first request has registered for a prompt that P still computes."""
    pair = Pair(**shapes)  # type: ignore[arg-type]
    pair.hold("p1", "t1", rebindable=rebindable)
    pair.want_push("d1", "t1", binding=0 if rebindable else None)
    assert pair.reserve("d1", "hello", 0, 40)
    pair.deliver_all()
    return pair


def give_up_before_it_lands(pair: Pair) -> None:
    """The first's good-bye is quicker than what P writes to it."""
    pair.abort(pair.decode, "d1")
    pair.deliver_kind("message", "notification")


def follow(pair: Pair, name: str = "d2", binding: int = 1) -> None:
    """The router sends another request for the same prompt."""
    pair.want_push(name, "t1", binding=binding)
    assert pair.reserve(name, "hello", 0, 40)


def served(pair: Pair, name: str = "d2") -> None:
    """The second has it, P is rid of it, and nothing is left of the first."""
    pair.deliver_all()
    assert pair.decode.outcomes(name) == RECEIVED, pair.decode.reasons
    assert pair.prefill.outcomes("p1") == SENT
    pair.settle()
    for side in pair.sides.values():
        assert sorted(side.free) == list(side.pool)


SHAPES = [
    {},
    {"decode": {"tp_size": 2}},
    {"prefill": {"tp_size": 2}},
    {"prefill": {"pp_size": 2}, "decode": {"tp_size": 2}},
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("computed", [0, 20, 40])
@pytest.mark.parametrize("in_flight", [False, True])
def test_the_second_is_served_when_the_first_has_given_up(
    shapes: dict[str, object], computed: int, in_flight: bool
) -> None:
    pair = begun(**shapes)
    if computed:
        pair.advance_prefill("p1", "hello", 40, computed)
    if not in_flight:
        pair.deliver_all()
    pair.abort(pair.decode, "d1")
    pair.deliver_all()
    follow(pair)
    pair.deliver_all()
    pair.finish("p1", "hello", 40)
    served(pair)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_the_second_is_served_after_prefill_as_well(shapes: dict[str, object]) -> None:
    pair = begun(**shapes)
    pair.finish("p1", "hello", 40)
    give_up_before_it_lands(pair)
    assert Outcome.RELEASED not in pair.prefill.outcomes("p1"), "P keeps it"
    follow(pair)
    served(pair)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_a_registration_that_overtakes_the_cancel_takes_the_prompt_over(
    shapes: dict[str, object],
) -> None:
    pair = begun(**shapes)
    pair.advance_prefill("p1", "hello", 40, 20)
    pair.deliver_all()
    pair.abort(pair.decode, "d1")
    late = [item for item in pair.items if isinstance(item.message, Cancel)]
    assert late
    pair.items[:] = [item for item in pair.items if item not in late]
    follow(pair)
    pair.deliver_all()
    pair.items += late
    pair.deliver_all()
    pair.finish("p1", "hello", 40)
    served(pair)


def test_the_one_before_is_told_that_it_is_not_served() -> None:
    """It lives on, as when the router could not reach it any more."""
    pair = begun()
    follow(pair)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    assert any("another request" in each for each in pair.decode.reasons["d1"])
    pair.finish("p1", "hello", 40)
    served(pair)


def test_an_earlier_one_cannot_take_it_back() -> None:
    pair = begun()
    follow(pair, binding=2)
    pair.deliver_all()
    follow(pair, "d3", binding=1)
    pair.deliver_all()
    assert pair.decode.outcomes("d3") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    pair.finish("p1", "hello", 40)
    served(pair)


def test_a_registration_of_one_that_gave_up_is_refused_whenever_it_comes() -> None:
    pair = Pair(decode={"tp_size": 2})
    pair.hold("p1", "t1", rebindable=True)
    pair.want_push("d1", "t1", binding=0)
    pair.deliver_all()
    assert pair.reserve("d1", "hello", 0, 40)
    registers = [item for item in pair.items if isinstance(item.message, Register)]
    one, other = registers
    pair.deliver(one)
    pair.items.remove(other)
    pair.abort(pair.decode, "d1")
    # One rank's good-bye is enough: the other's registration means the same request.
    pair.deliver_all()
    pair.items.append(other)
    pair.deliver_all()
    follow(pair)
    pair.deliver_all()
    pair.finish("p1", "hello", 40)
    served(pair)


def test_a_decode_instance_that_dies_leaves_the_prompt_to_another() -> None:
    pair = begun()
    pair.advance_prefill("p1", "hello", 40, 20)
    pair.deliver_all()
    pair.restart(pair.decode)
    pair.tell_of_lost_lives()
    pair.deliver_all()
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert not pair.prefill.outcomes("p1"), "P keeps it"
    follow(pair)
    served(pair)


def test_nobody_follows_and_the_lease_ends_it() -> None:
    pair = begun()
    pair.finish("p1", "hello", 40)
    give_up_before_it_lands(pair)
    pair.deliver_all()
    pair.advance(Timing().kv_lease_duration + 1)
    assert pair.prefill.outcomes("p1") == {Outcome.SEND_FAILED, Outcome.RELEASED}
    assert pair.prefill.endpoints[RANK].counts[Counted.LEASES_EXPIRED] == 1


def test_a_router_that_gives_up_releases_it_at_once() -> None:
    pair = begun()
    pair.finish("p1", "hello", 40)
    give_up_before_it_lands(pair)
    pair.deliver_all()
    assert Outcome.RELEASED not in pair.prefill.outcomes("p1")
    pair.abort(pair.prefill, "p1")  # what DELETE /kvcourier/transfers/ID leads to
    assert Outcome.RELEASED in pair.prefill.outcomes("p1")


def test_without_the_routers_word_the_first_is_the_only_one() -> None:
    pair = begun(rebindable=False)
    pair.finish("p1", "hello", 40)
    pair.abort(pair.decode, "d1")
    pair.deliver_all()
    assert Outcome.RELEASED in pair.prefill.outcomes("p1")
    other = begun(rebindable=False)
    follow(other)
    other.deliver_all()
    assert other.decode.outcomes("d2") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}


def test_a_prompt_that_is_not_needed_is_not_kept() -> None:
    """A full prefix hit is no reason to send another."""
    pair = Pair()
    pair.hold("p1", "t1", rebindable=True)
    pair.want_push("d1", "t1", binding=0)
    pair.deliver_all()
    pair.decline("d1")
    pair.deliver_all()
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.prefill.outcomes("p1") == SENT


@pytest.mark.parametrize("reading", [False, True])
def test_a_pull_goes_to_another_as_well(reading: bool) -> None:
    pair = Pair()
    pair.hold("p1", rebindable=True)
    blocks = pair.finish("p1", "hello", 40)
    pair.want_pull("d1", "p1", blocks, binding=0)
    pair.deliver_all()
    if reading:
        assert pair.reserve("d1", "hello", 0, 40)
        pair.deliver_kind("handshake")
    pair.abort(pair.decode, "d1")
    pair.deliver_all()
    assert not pair.prefill.outcomes("p1"), "P keeps it"
    pair.want_pull("d2", "p1", blocks, binding=1)
    assert pair.reserve("d2", "hello", 0, 40)
    served(pair)


def test_how_often_a_prompt_is_bound_anew_has_an_end() -> None:
    pair = Pair(decode={"num_blocks": 4})
    pair.hold("p1", "t1", rebindable=True)
    pair.finish("p1", "hello", 40)
    for number in range(MAX_BINDING + 2):
        pair.want_push(f"d{number}", "t1", binding=min(number, MAX_BINDING))
        pair.deliver_all()
        pair.abort(pair.decode, f"d{number}")
        pair.deliver_all()
    assert Outcome.RELEASED in pair.prefill.outcomes("p1")


def test_epochs_tell_bindings_apart() -> None:
    assert first_epoch(None) == first_epoch(0) == 0
    for binding in range(MAX_BINDING):
        assert binding_of(first_epoch(binding)) == binding
        assert binding_of(first_epoch(binding + 1) - 1) == binding
    assert first_epoch(MAX_BINDING + 1) < 1 << 31, "it must fit into a message"


def test_a_failure_of_the_first_does_not_reach_the_second() -> None:
    pair = begun()
    pair.advance_prefill("p1", "hello", 40, 20)
    (write,) = [item for item in pair.items if item.kind == "write"]
    pair.abort(pair.decode, "d1")
    pair.deliver_kind("message")
    pair.deliver_kind("notification")
    pair.drop(write)
    pair.deliver_all()
    follow(pair)
    pair.deliver_all()
    assert not [item for item in pair.items if isinstance(item.message, Fail)]
    pair.finish("p1", "hello", 40)
    served(pair)
