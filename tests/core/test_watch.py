"""Peers that transfers wait for: who is asked, who counts as silent, and what that ends."""

from types import SimpleNamespace

import pytest

from kvcourier.config import Timing
from kvcourier.core.commands import SendNotification
from kvcourier.core.events import PeerLost, PeerProbed, PeerReset, Sign, TimePassed
from kvcourier.core.messages import Beat
from kvcourier.core.outcomes import Outcome
from kvcourier.core.workspace import Counted
from kvcourier.errors import ConfigError
from kvcourier.ids import EngineId, Incarnation, PeerRank, Rank
from pair import Pair, Side

RANK = Rank(0, 0)
D_BEFORE = PeerRank(EngineId("d"), Incarnation("d-life1"), RANK)
BEAT_S, SILENCE_S = Timing().beat_s, Timing().peer_silence_s


@pytest.fixture
def pair() -> Pair:
    """D has registered for a prompt that P still computes."""
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    assert pair.reserve("d1", "hello", 0, 40)
    pair.deliver_all()
    return pair


def beats(pair: Pair) -> list[str]:
    """Names of those that have sent a beat that is under way."""
    return [item.sender.engine_id for item in pair.items if isinstance(item.message, Beat)]


def lose(pair: Pair, *kinds: str) -> None:
    """Everything of these kinds that is under way; of all kinds without any."""
    for item in [each for each in pair.items if not kinds or each.kind in kinds]:
        if item in pair.items:
            pair.drop(item)


def live_for(pair: Pair, seconds: float, *lost: str) -> None:
    """Let time pass in small steps, in which all arrives but these kinds."""
    for _ in range(round(seconds / 0.02)):
        pair.advance(0.02)
        lose(pair, *lost) if lost else None
        pair.deliver_all()


def counted(side: Side, what: Counted) -> int:
    return side.endpoints[RANK].counts[what]


def reset(pair: Pair, side: Side, other: Side) -> None:
    pair.engine(side, PeerReset(other.rank(RANK)))


def quarantined(side: Side) -> int:
    endpoint = side.endpoints[RANK]
    gauges = endpoint.gauges()
    (geometry,) = side.geometries[RANK]
    # Two layers of K and V.
    assert geometry.block_bytes_of_all_layers == 4 * geometry.block_bytes
    in_bytes = gauges["quarantined_blocks"] * geometry.block_bytes_of_all_layers
    assert gauges["quarantined_bytes"] == in_bytes
    return gauges["quarantined_blocks"]


def test_idle_peers_do_not_beat(pair):
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVED, Outcome.RELEASED}
    pair.advance(2 * BEAT_S)
    pair.deliver_all()
    pair.advance(100 * BEAT_S)
    assert not beats(pair)
    for side in (pair.prefill, pair.decode):
        assert side.endpoints[RANK].gauges()["watched_peers"] == 0


def test_while_a_transfer_waits_each_side_gives_a_sign_of_life_per_beat(pair):
    live_for(pair, 10 * BEAT_S)
    given = []
    for _ in range(10):
        pair.advance(BEAT_S)
        given += beats(pair)
        pair.deliver_all()
    assert all(9 <= given.count(name) <= 11 for name in "pd"), given
    for side in (pair.prefill, pair.decode):
        assert not counted(side, Counted.PEERS_PROBED)


def test_a_silent_peer_fails_the_request_and_keeps_its_blocks(pair):
    """Stopped, or cut off: what it has posted may still land."""
    for _ in range(round(5 * SILENCE_S / BEAT_S)):
        pair.advance(BEAT_S / 4)
        lose(pair)
        if pair.decode.outcomes("d1"):
            break
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED}
    assert pair.decode.reasons["d1"] == {f"p/pp0tp0 has been silent for {SILENCE_S:g} s"}
    assert quarantined(pair.decode) == 3
    assert pair.now <= SILENCE_S + 2 * BEAT_S
    # P has given D up as well. When it is heard again, it says that nothing is in flight.
    pair.advance(1.0)
    pair.deliver_all()
    assert pair.decode.is_over("d1")
    pair.finish("p1", "hello", 40)
    assert pair.prefill.outcomes("p1") == {Outcome.SEND_FAILED, Outcome.RELEASED}


def test_a_peer_whose_courier_is_kept_waiting_is_not_given_up(pair):
    """A step of the model that keeps the interpreter for seconds is no death."""
    live_for(pair, 5 * SILENCE_S, "message", "notification")
    assert counted(pair.decode, Counted.PEERS_PROBED) > 3
    assert not counted(pair.decode, Counted.PEERS_SILENT)
    assert not counted(pair.prefill, Counted.PEERS_SILENT)
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVED, Outcome.RELEASED}


def test_our_own_delay_is_not_the_peers_silence(pair):
    """What it has said meanwhile lies unread."""
    live_for(pair, 5 * BEAT_S)
    pair.now += 30.0
    for side in (pair.prefill, pair.decode):
        pair.engine(side, PeerReset(side.rank(RANK)))  # anything, to let it look at the clock
    assert not counted(pair.decode, Counted.PEERS_PROBED)
    assert not counted(pair.prefill, Counted.PEERS_PROBED)


def test_a_peer_that_has_gone_fails_the_request_at_once(pair):
    """Its listener has gone. The blocks wait for the data path's word."""
    reset(pair, pair.decode, pair.prefill)
    assert [item.kind for item in pair.items if item.kind == "probe"]
    lose(pair)
    pair.engine(pair.decode, PeerReset(pair.prefill.rank(RANK)))
    pair.engine(pair.decode, PeerProbed(pair.prefill.rank(RANK), Sign.GONE))
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED}
    assert pair.decode.reasons["d1"] == {
        "p/pp0tp0 is gone: nobody listens at its side channel",
    }
    assert quarantined(pair.decode) == 3
    pair.engine(pair.decode, PeerLost(pair.prefill.address, pair.prefill.incarnation, "gone"))
    assert pair.decode.is_over("d1")


def test_a_reset_of_a_peer_that_nobody_waits_for_means_nothing(pair):
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    for side, other in ((pair.decode, pair.prefill), (pair.prefill, pair.decode)):
        reset(pair, side, other)
        assert not counted(side, Counted.PEERS_PROBED)


def test_a_reset_before_anybody_waited_is_looked_into_by_the_first_who_does():
    """P dies while D's request is queued there: D registers with the dead."""
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_push("d1", "t1")
    pair.deliver_all()
    reset(pair, pair.decode, pair.prefill)
    assert not counted(pair.decode, Counted.PEERS_PROBED)
    assert pair.reserve("d1", "hello", 0, 40)
    assert counted(pair.decode, Counted.PEERS_PROBED) == 1
    pair.engine(pair.decode, PeerProbed(pair.prefill.rank(RANK), Sign.GONE))
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED}


def test_a_reset_alone_is_no_death(pair):
    """A connection of a living peer may break."""
    reset(pair, pair.decode, pair.prefill)
    pair.deliver_all()
    assert counted(pair.decode, Counted.PEERS_PROBED) == 1
    assert not pair.decode.outcomes("d1")
    pair.finish("p1", "hello", 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVED, Outcome.RELEASED}


def test_another_life_at_the_address_ends_the_old_one(pair):
    """Even if a new process has got the port of the one before, and so seems to answer."""
    pair.restart(pair.prefill)
    live_for(pair, 2 * SILENCE_S)
    assert pair.decode.outcomes("d1") == {Outcome.RECEIVE_FAILED, Outcome.RELEASED}
    assert counted(pair.decode, Counted.PEERS_LOST) == 1


@pytest.mark.parametrize("finished", [True, False])
def test_what_was_promised_to_a_dead_wanter_is_free_at_once(pair, finished):
    """Not when a lease ends: nobody else may have it."""
    if finished:
        pair.finish("p1", "hello", 40)
    pair.restart(pair.decode)
    pair.tell_of_lost_lives()
    if not finished:
        assert not pair.prefill.outcomes("p1"), "P's engine still computes it"
        pair.finish("p1", "hello", 40)
    assert pair.prefill.outcomes("p1") == {Outcome.SEND_FAILED, Outcome.RELEASED}


def test_who_seems_to_be_gone_is_asked_until_there_is_a_proof(pair):
    """The first question may come before the data path knows."""
    before, address = pair.decode.rank(RANK), pair.decode.address
    endpoint = pair.prefill.endpoints[RANK]
    endpoint.handle(PeerReset(before), pair.now)
    endpoint.handle(PeerProbed(before, Sign.GONE), pair.now)
    pair.finish("p1", "hello", 40)
    assert not pair.prefill.outcomes("p1"), "it is promised to that life, which may live"
    at = endpoint.next_deadline()
    assert at <= pair.now + BEAT_S / 2
    commands = endpoint.handle(TimePassed(), at)
    assert [each.message for each in commands if isinstance(each, SendNotification)]
    pair.engine(pair.prefill, PeerLost(address, before.incarnation, "gone"))
    assert pair.prefill.outcomes("p1") == {Outcome.SEND_FAILED, Outcome.RELEASED}


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_wanter_that_dies_in_its_queue_leaves_nothing_behind(mode):
    """It has only asked to keep the prompt: neither registered nor read."""
    pair = Pair()
    pair.hold("p1", "t1")
    blocks = pair.finish("p1", "hello", 40)
    if mode == "push":
        pair.want_push("d1", "t1")
    else:
        pair.want_pull("d1", "p1", blocks)
    pair.deliver_all()
    pair.restart(pair.decode)
    assert not pair.prefill.outcomes("p1")
    reset(pair, pair.prefill, SimpleNamespace(rank=lambda rank: D_BEFORE))
    assert pair.prefill.outcomes("p1") == {Outcome.SEND_FAILED, Outcome.RELEASED}
    assert not counted(pair.prefill, Counted.LEASES_EXPIRED)


def test_what_a_silent_wanter_has_asked_for_is_kept_for_its_lease():
    """It may be reading, and was promised that much."""
    pair = Pair()
    pair.hold("p1", "t1")
    pair.want_pull("d1", "p1", pair.finish("p1", "hello", 40))
    pair.deliver_all()
    for _ in range(100):
        pair.advance(BEAT_S / 2)
        lose(pair)
    assert counted(pair.prefill, Counted.PEERS_SILENT) == 1
    assert not pair.prefill.outcomes("p1")
    for _ in range(int(2 * Timing().kv_lease_duration)):
        pair.advance(1.0)
        lose(pair)
    assert pair.prefill.outcomes("p1") == {Outcome.SEND_FAILED, Outcome.RELEASED}


def test_a_prompt_that_two_lives_have_asked_for_outlives_one_of_them():
    pair = Pair()
    pair.hold("p1", "t1")
    blocks = pair.finish("p1", "hello", 40)
    pair.want_pull("d1", "p1", blocks)
    pair.deliver_all()
    pair.restart(pair.decode)
    pair.want_pull("d2", "p1", blocks)
    pair.deliver_all()
    pair.tell_of_lost_lives()
    assert pair.reserve("d2", "hello", 0, 40)
    pair.deliver_all()
    assert pair.decode.outcomes("d2") == {Outcome.RECEIVED, Outcome.RELEASED}


def test_a_silent_wanter_finds_its_prompt_when_it_is_back(pair):
    """P writes no more, but keeps what it has computed until the lease ends."""
    for _ in range(round(5 * SILENCE_S / BEAT_S)):
        pair.advance(BEAT_S / 4)
        lose(pair)
    pair.finish("p1", "hello", 40)
    assert counted(pair.prefill, Counted.PEERS_SILENT) == 1
    assert pair.prefill.endpoints[RANK].gauges()["holds"] == 1
    assert not pair.prefill.outcomes("p1")
    pair.advance(Timing().kv_lease_duration + 1)
    assert pair.prefill.outcomes("p1") == {Outcome.SEND_FAILED, Outcome.RELEASED}


def test_a_silence_shorter_than_two_beats_is_refused():
    with pytest.raises(ConfigError, match=r"peer_silence_s: expected at least twice beat_s \(0.2"):
        Timing(beat_s=0.2, peer_silence_s=0.3)
