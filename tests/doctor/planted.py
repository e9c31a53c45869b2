"""A healthy pair as a doctor sees it, to plant faults in."""

import dataclasses
from typing import Any

import msgspec

from core.test_handshake import make_offer
from core.test_inquiry import ABOUT
from kvcourier.config import Limits, Timing
from kvcourier.core.handshake import Offer, check_offer
from kvcourier.core.inquiry import Told
from kvcourier.core.messages import PROTOCOL_VERSION
from kvcourier.doctor.checks import judge
from kvcourier.doctor.exposition import read_metrics
from kvcourier.doctor.facts import Engine, Facts, InstanceFacts, Place, Role
from kvcourier.doctor.findings import Finding, Severity

HEALTHY_METRICS = read_metrics(
    """
kvcourier:kv_cache_usage_perc 0.1
kvcourier:num_requests_waiting 0
"""
)
ABOUT_HEALTHY = msgspec.structs.replace(
    ABOUT, environment={}, rdma_devices=[], timing=dataclasses.asdict(Timing())
)


def offer_of(engine_id: str, **model: Any) -> Offer:
    """What an instance offers; `model` as for `layout_builders.model_cache`."""
    return msgspec.structs.replace(make_offer(**model)[0], engine_id=engine_id)


def instance(role: Role, offer: Offer | None = None, about: Any = ABOUT_HEALTHY) -> InstanceFacts:
    """A healthy instance."""
    engine_id = role.value.lower()
    offer = offer or offer_of(engine_id)
    return InstanceFacts(
        role=role,
        url=f"http://127.0.0.1:{8100 if role is Role.PREFILL else 8200}",
        health=200,
        models=("tiny",),
        engine=Engine.EMBEDDED,
        metrics=HEALTHY_METRICS,
        place=Place(engine_id, "127.0.0.1", 5600, "itself"),
        told=Told(PROTOCOL_VERSION, offer, about),
        is_open=True,
        offer=check_offer(offer, Limits()),
    )


def healthy(**changes: Any) -> Facts:
    """A pair without a fault, but for these fields."""
    facts = Facts(prefill=(instance(Role.PREFILL),), decode=(instance(Role.DECODE),))
    return dataclasses.replace(facts, **changes)


def with_prefill(**changes: Any) -> Facts:
    """A pair of which P differs in these fields."""
    return healthy(prefill=(dataclasses.replace(instance(Role.PREFILL), **changes),))


def with_decode(**changes: Any) -> Facts:
    """A pair of which D differs in these fields."""
    return healthy(decode=(dataclasses.replace(instance(Role.DECODE), **changes),))


def found(facts: Facts, check: str, severity: Severity) -> list[Finding]:
    """What one check says of this severity."""
    return [each for each in judge(facts) if (each.check, each.severity) == (check, severity)]


def troubles(facts: Facts) -> list[Finding]:
    """All warnings and errors."""
    return [each for each in judge(facts) if each.severity.rank >= Severity.WARNING.rank]


def with_about(role: Role, **changes: Any) -> Facts:
    """A pair of which one side's settings or surroundings differ."""
    about = msgspec.structs.replace(ABOUT_HEALTHY, **changes)
    side = "prefill" if role is Role.PREFILL else "decode"
    return healthy(**{side: (instance(role, about=about),)})


def with_timing(role: Role, **changes: float) -> Facts:
    """A pair of which one side's durations differ."""
    return with_about(role, timing={**ABOUT_HEALTHY.timing, **changes})
