"""What an operator is told of a transfer on the side channel of vLLM's engine."""

import pytest

from kvcourier.ids import EngineId, InstanceAddress
from kvcourier.story.accounts import Asked, Part
from kvcourier.story.side_channel import Keys, ask_ranks

from .engine_rig import LIMIT_S, MODES, handed_over, prompt_of, run


def asked(instance, key: str) -> Asked:
    address = InstanceAddress(EngineId(instance.engine_id), "127.0.0.1", instance.port)
    (found,) = ask_ranks(Part.PREFILL, address, key, Keys(), 3, LIMIT_S)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_both_instances_tell_a_transfer_by_its_id(make, mode) -> None:
    telling = {"tell_stories": True}
    p, d = make("p", "kv_producer", extra=telling), make("d", "kv_consumer", extra=telling)
    held, wanted = handed_over(p, d, prompt_of(100), mode)
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    names = p.transfer_ids[held] if mode == "push" else held, wanted
    told = [asked(instance, name) for instance, name in zip((p, d), names, strict=True)]
    for each, end in zip(told, ("sent", "received"), strict=True):
        assert each.account is not None, each.problem
        assert {end, "released"} <= {entry.what for entry in each.account.entries}
        assert each.account.clock is not None


def test_an_engine_that_was_not_told_to_keeps_them_to_itself(make) -> None:
    assert "keeps its stories to itself" in asked(make("p", "kv_producer"), "t").problem
