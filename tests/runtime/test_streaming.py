"""A prompt that is sent while it is computed: real couriers and bytes, memory transport."""

import pytest

from kv_content import write_prompt
from kvcourier.config import Limits
from kvcourier.core.events import (
    HoldBegun,
    PrefillAdvanced,
    PrefillFinished,
    PrefillRolledBack,
    RequestAborted,
)
from kvcourier.core.messages import REGISTRATION_PREFIX
from kvcourier.ids import RequestId
from kvcourier.layout import TokenSpan
from kvcourier.runtime.engine_link import (
    Abort,
    AdvancePrefill,
    BeginHold,
    FinishPrefill,
    RollBack,
    event_of,
)
from kvcourier.runtime.reports import Outcome
from kvcourier.transport.interface import Operation
from kvcourier.transport.memory import Fate
from runtime.courier_world import EMPTY, SOURCE, STOP, TARGET, outcomes, tables, want

VOID = [1, 2, 4]
"""P's blocks before it was preempted."""


def early(world):
    """Two instances, of which D has registered before P computes anything."""
    prefill, decode = world.pair()
    prefill.hold("p-x", "t-x")
    want(prefill, decode, "x")
    prefill.wait_until(lambda: prefill.endpoint.is_awaited(RequestId("p-x")))
    return prefill, decode


def compute(rig, content, blocks, num_tokens, layers=None, **ready):
    write_prompt(rig.caches, content, blocks, TokenSpan(0, num_tokens), 0, layers)
    named = blocks[: -(-num_tokens // 16)]
    rig.endpoint.advance_prefill(RequestId("p-x"), [named], num_tokens, layers, **ready)


def posted(rig):
    return rig.whats("p-x").count("posted")


def received(prefill, decode):
    decode.wait_for("d-x", Outcome.RECEIVED, Outcome.RELEASED)
    prefill.wait_for("p-x", Outcome.SENT, Outcome.RELEASED)
    assert not decode.wrong("x", TARGET, 0, STOP)
    for rig in (prefill, decode):
        rig.wait_until(lambda rig=rig: tables(rig) == EMPTY)


def test_chunks_and_layers_are_sent_before_the_prompt_is_finished(world):
    prefill, decode = early(world)
    compute(prefill, "x", SOURCE, 16)
    prefill.wait_until(lambda: posted(prefill) == 1)
    compute(prefill, "x", SOURCE, STOP, (0,))
    prefill.wait_until(lambda: posted(prefill) == 2)
    assert not outcomes(decode, "d-x")
    prefill.prefill("p-x", "x", SOURCE, STOP)
    received(prefill, decode)
    assert posted(prefill) == 3


def test_what_was_sent_before_a_preemption_is_overwritten(world):
    prefill, decode = early(world)
    world.plan(Operation.WRITE, Fate.HOLD)
    compute(prefill, "void", VOID, 32)
    late = world.held(prefill, Operation.WRITE)
    prefill.endpoint.roll_back(RequestId("p-x"))
    world.heal()
    compute(prefill, "x", SOURCE, 32)
    prefill.wait_until(lambda: "rolled_back" in prefill.whats("p-x"))
    world.network.deliver(late)
    prefill.prefill("p-x", "x", SOURCE, STOP)
    received(prefill, decode)


def test_a_notice_of_before_a_preemption_that_comes_late_changes_nothing(world):
    """Packed, it would let a parcel of void KV be copied over what is there by then."""
    prefill, decode = early(world)

    def hold_notices(item):
        is_notice = item.operation is None and not item.payload.startswith(REGISTRATION_PREFIX)
        return Fate.HOLD if is_notice else Fate.DELIVER

    world.network.fault_plan = hold_notices
    compute(prefill, "void", VOID, 32)
    prefill.wait_until(lambda: any(item.is_notification for item in world.network.pending))
    (late,) = [item for item in world.network.pending if item.is_notification]
    world.heal()
    prefill.endpoint.roll_back(RequestId("p-x"))
    compute(prefill, "x", SOURCE, 32)
    decode.wait_until(lambda: "landed" in decode.whats("d-x"))
    world.network.deliver(late)
    prefill.prefill("p-x", "x", SOURCE, STOP)
    received(prefill, decode)


def test_an_abort_in_mid_stream_releases_the_blocks_when_the_write_has_ended(world):
    prefill, decode = early(world)
    world.plan(Operation.WRITE, Fate.HOLD)
    compute(prefill, "x", SOURCE, 32)
    late = world.held(prefill, Operation.WRITE)
    prefill.endpoint.abort(RequestId("p-x"), [SOURCE[:2]])
    decode.wait_for("d-x", Outcome.RECEIVE_FAILED)
    assert not outcomes(prefill, "p-x")
    world.heal()
    world.network.deliver(late)
    prefill.wait_for("p-x", Outcome.RELEASED)
    decode.wait_for("d-x", Outcome.RELEASED)
    assert outcomes(prefill, "p-x") == [Outcome.RELEASED]
    world.still_works(prefill, decode)


def test_an_abort_of_a_prompt_of_which_nothing_flies_releases_its_blocks_too(world):
    prefill, _ = world.pair()
    prefill.hold("p-x", "t-x")
    prefill.endpoint.abort(RequestId("p-x"), [SOURCE[:2]])
    prefill.wait_for("p-x", Outcome.RELEASED)


def test_what_is_not_ready_waits_and_what_comes_after_it_too(world):
    prefill, decode = early(world)
    asked, is_written = [], []

    def ready():
        asked.append(None)
        return bool(is_written)

    blocks = [SOURCE[:1]]
    prefill.endpoint.advance_prefill(RequestId("p-x"), blocks, 16, ready=ready)
    prefill.prefill("p-x", "x", SOURCE, STOP)
    prefill.hold("p-other", None)
    prefill.wait_until(lambda: bool(prefill.whats("p-other")) and len(asked) > 2)
    assert "prefill_finished" not in prefill.whats("p-x")
    is_written.append(True)
    prefill.endpoint.abort(RequestId("p-other"))
    received(prefill, decode)
    assert posted(prefill) == 2


@pytest.mark.parametrize(
    ("call", "event"),
    [
        (BeginHold("r", "h", None, 0), HoldBegun("r", "h", None)),
        (AdvancePrefill("r", [[1, 2]], 20, [0, 1]), PrefillAdvanced("r", ((1, 2),), 20, (0, 1))),
        (AdvancePrefill("r", [[1]], 16), PrefillAdvanced("r", ((1,),), 16)),
        (RollBack("r"), PrefillRolledBack("r")),
        (FinishPrefill("r", [[1, 2]], 20), PrefillFinished("r", ((1, 2),), 20)),
        (Abort("r"), RequestAborted("r")),
        (Abort("r", [[1, 2]]), RequestAborted("r", ((1, 2),))),
    ],
    ids=str,
)
def test_calls_of_a_scheduler_elsewhere(call, event):
    assert event_of(call, Limits()) == event
