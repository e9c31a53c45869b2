"""Looks in threads of their own: what comes of them, and when."""

import threading

from kvcourier.runtime.looks import Looks

LONG_S = 20.0


def test_looks_are_taken_when_they_have_ended():
    woken, may_end = threading.Event(), threading.Event()

    def look(host: str, port: int, timeout_s: float) -> str:
        assert may_end.wait(LONG_S)
        return f"{host}:{port} within {timeout_s:g} s"

    looks: Looks[str, str] = Looks(look, woken.set)
    looks.begin("p", "a.host", 5600, 0.5)
    assert looks.take() == []
    may_end.set()
    assert woken.wait(LONG_S)
    assert looks.take() == [("p", "a.host:5600 within 0.5 s")]
    assert looks.take() == []


def test_what_is_known_already_is_said_at_once():
    woken = threading.Event()
    looks: Looks[str, str] = Looks(lambda *_: "never asked", woken.set)
    looks.say("p", "known")
    assert woken.is_set()
    assert looks.take() == [("p", "known")]
