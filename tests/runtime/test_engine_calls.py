"""Calls of an engine come out once they have happened, and those of one request in order."""

from kvcourier.core.events import PrefillAdvanced
from kvcourier.ids import RequestId
from kvcourier.runtime.engine_calls import EngineCalls


def advanced(request_id: str, num_tokens: int) -> PrefillAdvanced:
    return PrefillAdvanced(RequestId(request_id), (), num_tokens)


def test_what_was_submitted_comes_out_once_and_wakes() -> None:
    woken: list[bool] = []
    calls = EngineCalls(lambda: woken.append(True))
    calls.submit(advanced("a", 1), None)
    calls.submit(advanced("b", 1), None)
    assert len(woken) == 2 and calls.has_new
    assert list(calls.take()) == [advanced("a", 1), advanced("b", 1)]
    assert list(calls.take()) == []
    assert not calls.has_new


def test_a_call_that_has_yet_to_happen_holds_back_its_own_request_only() -> None:
    done: set[int] = set()
    calls = EngineCalls(lambda: None)
    calls.submit(advanced("a", 1), lambda: 1 in done)
    calls.submit(advanced("a", 2), None)
    calls.submit(advanced("b", 1), None)
    assert list(calls.take()) == [advanced("b", 1)]
    assert calls.has_unready
    assert not calls.accept(advanced("a", 3)), "a call by another way waits as well"
    assert calls.accept(advanced("b", 2))
    done.add(1)
    assert list(calls.take()) == [advanced("a", num) for num in (1, 2, 3)]
    assert not calls.has_unready


def test_flushed_means_that_the_call_before_is_handled() -> None:
    calls = EngineCalls(lambda: None)
    calls.submit(advanced("a", 1), None)
    handled = calls.flush()
    for _ in calls.take():
        assert not handled.is_set()
    assert handled.is_set()


def test_nobody_waits_for_a_courier_that_has_ended() -> None:
    calls = EngineCalls(lambda: None)
    calls.submit(advanced("a", 1), None)
    handled = calls.flush()
    calls.end()
    assert handled.is_set()
