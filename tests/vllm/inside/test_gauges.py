"""Sizes at the moment, as vLLM's engine tells them with its steps, until it has nothing to do."""

import pytest

from kvcourier.transport.memory import Fate
from kvcourier.vllm_connector.stats import sizes_of

from .engine_rig import MODES, OPERATION, handed_over, prompt_of, run

PROMPT = prompt_of(100)


def sizes(instance) -> dict[str, float]:
    """What a scrape would find: nothing is zero."""
    return {key: size for key, size in latest(instance).items() if size}


def latest(instance) -> dict[str, float]:
    return sizes_of(instance.records[-1] if instance.records else {})


@pytest.mark.parametrize("mode", MODES)
def test_quarantine_is_told_and_that_it_is_over_though_nothing_else_happens(
    pair, network, mode
) -> None:
    p, d = pair
    network.plan(OPERATION[mode], Fate.HOLD)
    _, wanted = handed_over(p, d, PROMPT, mode)
    run(p, d, until=lambda: network.pending_of(OPERATION[mode]))
    d.abort(wanted)
    run(p, d, until=lambda: latest(d)["quarantined_bytes"])
    found = sizes(d)
    cache = sum(each.nbytes for each in d.worker.caches.values())
    assert found["quarantined_perc"] == pytest.approx(found["quarantined_bytes"] / cache)
    poster = d if mode == "pull" else p
    run(p, d, until=lambda: latest(poster)["operations_in_flight"])
    network.heal()
    run(p, d, until=lambda: p.is_idle and d.is_idle)
    for instance in pair:
        assert sizes(instance) == {}, "vLLM has nothing to do any more, and asks for nothing"


def test_what_is_held_is_told_until_its_lease_has_ended(make) -> None:
    p = make("p", "kv_producer", extra={"kv_lease_duration": 0.5})
    held, _ = handed_over(p, make("d", "kv_consumer"), PROMPT, "pull", want=False)
    assert p.asked[held].params is not None
    assert sizes(p) == {"holds": 1}
    run(p, until=lambda: p.is_idle)
    assert sizes(p) == {}
