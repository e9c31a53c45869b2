"""What an engine takes in from other threads."""

import threading

import pytest

from kvcourier.engine.api import RequestRejected
from kvcourier.engine.inbox import Abort, EngineStopped, Inbox
from kvcourier.ids import RequestId

A, B = RequestId("a"), RequestId("b")


def open_inbox() -> Inbox:
    inbox = Inbox()
    inbox.open()
    return inbox


def test_an_id_is_taken_until_it_is_freed() -> None:
    inbox = open_inbox()
    inbox.claim(A)
    with pytest.raises(RequestRejected, match="in use"):
        inbox.claim(A)
    inbox.claim(B)
    inbox.free(A)
    inbox.claim(A)
    assert inbox.ids_in_use == {A, B}


def test_nothing_is_taken_in_before_it_opens_nor_after_it_closes() -> None:
    inbox = Inbox()
    with pytest.raises(EngineStopped, match="not started"):
        inbox.claim(A)
    inbox.open()
    inbox.claim(A)
    inbox.close("the courier is gone")
    with pytest.raises(EngineStopped, match="the courier is gone"):
        inbox.claim(B)
    assert inbox.ids_in_use == {A}


def test_who_is_to_stop_takes_no_new_ids() -> None:
    inbox = open_inbox()
    inbox.stop()
    with pytest.raises(EngineStopped, match="closing"):
        inbox.claim(A)
    assert inbox.wait(is_busy=False) is False


def test_what_was_put_in_comes_out_once_and_in_order() -> None:
    inbox = open_inbox()
    inbox.abort(A)
    inbox.abort(B)
    assert inbox.wait(is_busy=False)
    assert inbox.take() == [Abort(A), Abort(B)]
    assert inbox.take() == []


def test_reports_are_told_of_once() -> None:
    inbox = open_inbox()
    assert not inbox.take_has_reports()
    inbox.on_reports()
    assert inbox.wait(is_busy=False)
    assert inbox.take_has_reports()
    assert not inbox.take_has_reports()


def test_who_waits_wakes_for_what_comes() -> None:
    inbox = open_inbox()
    woken: list[bool] = []
    waiting = threading.Thread(target=lambda: woken.append(inbox.wait(is_busy=False)))
    waiting.start()
    inbox.on_reports()
    waiting.join(timeout=10)
    assert woken == [True]
