"""How often a courier looks."""

from kvcourier.config import CourierConfig
from kvcourier.ids import EngineId, Incarnation, PeerRank, Rank
from kvcourier.runtime.attention import LOOK_OFTEN_S, Attention

PEER, OTHER = (PeerRank(EngineId(x), Incarnation("1"), Rank(0, 0)) for x in "po")
CONFIG = CourierConfig(poll_busy_s=0.001, poll_idle_s=0.02, poll_stream_s=0.0002)


def next_pause(attention: Attention, now: float, **what: bool) -> float:
    given = {"streaming": False, "posted": False} | what
    return round(attention.next_look(now, **given) - now, 9)


def test_the_first_look_is_due_at_once() -> None:
    assert Attention(CONFIG).next_look(5.0, streaming=False, posted=False) < 5.0


def test_the_pause_follows_from_what_is_under_way() -> None:
    attention = Attention(CONFIG)
    attention.on_look(5.0)
    assert next_pause(attention, 5.0) == 0.02
    assert next_pause(attention, 5.0, posted=True) == 0.001
    assert next_pause(attention, 5.0, streaming=True, posted=True) == 0.0002
    assert next_pause(attention, 5.015) == 0.005


def test_a_nudge_makes_it_look_often_for_a_while() -> None:
    attention = Attention(CONFIG)
    attention.on_look(5.0)
    attention.on_nudge(PEER, 5.01)
    assert next_pause(attention, 5.01) <= 0  # overdue, now that it is to look often
    attention.on_look(5.01)
    assert next_pause(attention, 5.01) == 0.001
    end = 5.01 + LOOK_OFTEN_S
    attention.on_look(end)
    assert next_pause(attention, end) == 0.02


def test_what_has_arrived_ends_it_for_that_peer_alone() -> None:
    """Else D would look a hundred times after each transfer, while it decodes."""
    attention = Attention(CONFIG)
    attention.on_look(5.0)
    for peer in (PEER, OTHER):
        attention.on_nudge(peer, 5.0)
    attention.on_arrival(PEER)
    assert next_pause(attention, 5.0) == 0.001
    attention.on_arrival(OTHER)
    assert next_pause(attention, 5.0) == 0.02
    attention.on_arrival(OTHER)
