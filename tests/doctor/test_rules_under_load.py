"""Planted faults that show under load or on other machines, and figures that follow from others."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor.planted import (
    found,
    healthy,
    instance,
    offer_of,
    troubles,
    with_about,
    with_decode,
    with_prefill,
    with_timing,
)
from kvcourier.config import Limits, TransferPath
from kvcourier.core.handshake import check_offer
from kvcourier.doctor.costs import burden, measured
from kvcourier.doctor.facts import (
    ClockOffset,
    KnownInstance,
    Load,
    Metrics,
    Place,
    Role,
    RouterFacts,
)
from kvcourier.doctor.findings import Severity
from kvcourier.doctor.rules.nodes import transports
from kvcourier.doctor.rules.timing import ORDERS, longest_wait_s
from kvcourier.layout.geometry import CacheLayout, MemoryKind
from kvcourier.router.config import Timeouts

ERROR, WARNING, NOTE, OK = (
    Severity.ERROR,
    Severity.WARNING,
    Severity.NOTE,
    Severity.OK,
)
ROUTER = RouterFacts(
    "http://127.0.0.1:8192",
    health=200,
    mode="pull",
    timeouts=dataclasses.asdict(Timeouts()),
    instances=(
        KnownInstance(Role.PREFILL, "http://127.0.0.1:8100", True),
        KnownInstance(Role.DECODE, "http://127.0.0.1:8200", True),
    ),
)
SCATTERED = Metrics(
    runs=1000, run_blocks=1200, outcomes=10, run_buckets=((1.0, 900.0), (2.0, 1000.0))
)


def test_the_defaults_of_everybody_go_together() -> None:
    facts = healthy(router=ROUTER, load=Load(client_timeout_s=600.0, rate=1.0))
    assert troubles(facts) == []


# Leases, time-outs, clocks.


def test_a_heartbeat_that_comes_after_the_lease() -> None:
    (finding,) = found(with_timing(Role.PREFILL, kv_lease_duration=2.0), "lease", ERROR)
    assert "every 5 s" in finding.evidence and "after 2 s" in finding.evidence


def test_too_few_heartbeats_a_lease() -> None:
    assert found(with_timing(Role.PREFILL, kv_lease_duration=8.0), "lease", WARNING)


def test_a_queue_that_lasts_longer_than_kv_is_kept() -> None:
    waited = Metrics(queue_buckets=((300.0, 1.0), (600.0, 90.0), (float("inf"), 100.0)))
    (finding,) = found(with_decode(metrics=waited), "lease", ERROR)
    assert "up to 600 s" in finding.evidence and "for 300 s only" in finding.evidence


@given(st.lists(st.floats(0.01, 900), min_size=1, max_size=60))
def test_the_longest_wait_is_a_bound_that_nearly_all_keep(waits: list[float]) -> None:
    bounds = (0.3, 1.0, 10.0, 60.0, 600.0)
    counts = [float(sum(wait <= bound for wait in waits)) for bound in bounds]
    buckets = (*zip(bounds, counts, strict=True), (float("inf"), float(len(waits))))
    told = longest_wait_s(
        dataclasses.replace(instance(Role.DECODE), metrics=Metrics(queue_buckets=buckets))
    )
    assert told in bounds
    assert told == bounds[-1] or sum(wait <= told for wait in waits) >= 0.95 * len(waits)


def test_no_requests_no_wait() -> None:
    assert longest_wait_s(instance(Role.DECODE)) is None


def test_a_client_that_leaves_before_it_is_told_why() -> None:
    findings = found(healthy(router=ROUTER, load=Load(client_timeout_s=30.0)), "waits", WARNING)
    assert len(findings) == 2 and all("the client" in each.evidence for each in findings)


def test_a_router_that_gives_up_before_d_does() -> None:
    router = dataclasses.replace(ROUTER, timeouts={**ROUTER.timeouts, "first_byte_s": 40.0})
    evidence = [each.evidence for each in found(healthy(router=router), "waits", WARNING)]
    assert any("push_registration_timeout is 60 s" in each for each in evidence)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_each_order_of_waits_can_be_broken(order: object) -> None:
    table = {"P": {}, "D": {}, "the router": {}, "the client": {}}
    table[order.first.owner][order.first.setting] = 1e6
    facts = healthy(
        router=dataclasses.replace(ROUTER, timeouts={**ROUTER.timeouts, **table["the router"]}),
        load=Load(client_timeout_s=1e5),
        prefill=with_timing(Role.PREFILL, **table["P"]).prefill,
        decode=with_timing(Role.DECODE, **table["D"]).decode,
    )
    assert any(order.else_ in each.evidence for each in found(facts, "waits", WARNING))


def test_a_skewed_clock() -> None:
    (finding,) = found(with_decode(clock=ClockOffset(59.5, 61.5)), "clock", WARNING)
    assert "ahead" in finding.evidence and "only durations cross" in finding.evidence
    (finding,) = found(with_decode(clock=ClockOffset(-61.5, -59.5)), "clock", WARNING)
    assert "59.5 to 61.5 s behind" in finding.evidence


# Machines and libraries.


def test_transports_that_do_not_meet() -> None:
    facts = healthy(
        prefill=with_about(Role.PREFILL, environment={"UCX_TLS": "tcp"}).prefill,
        decode=with_about(Role.DECODE, environment={"UCX_TLS": "sysv,self"}).decode,
    )
    (finding,) = found(facts, "ucx", ERROR)
    assert "UCX_TLS=tcp" in finding.evidence and "UCX_TLS=sysv,self" in finding.evidence


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_only_transports_to_oneself(role: Role) -> None:
    assert found(with_about(role, environment={"UCX_TLS": "self,cuda"}), "ucx", ERROR)


def test_shared_memory_between_two_machines() -> None:
    facts = healthy(
        prefill=with_about(Role.PREFILL, environment={"UCX_TLS": "shm,self"}).prefill,
        decode=with_about(Role.DECODE, boot_id="another").decode,
    )
    assert "within one machine" in found(facts, "ucx", ERROR)[0].evidence


def test_rdma_that_is_left_out() -> None:
    about = {"environment": {"UCX_TLS": "tcp"}, "rdma_devices": ["mlx5_0"]}
    assert "leaves RDMA out" in found(with_about(Role.DECODE, **about), "ucx", WARNING)[0].evidence


def test_a_device_that_is_not_there() -> None:
    facts = with_about(Role.DECODE, environment={"UCX_NET_DEVICES": "mlx5_9:1"})
    assert "mlx5_9:1" in found(facts, "ucx", ERROR)[0].evidence


def test_rdma_on_one_of_two_machines() -> None:
    facts = with_about(Role.DECODE, boot_id="another", rdma_devices=["mlx5_0"])
    assert found(facts, "ucx", WARNING)


@pytest.mark.parametrize(
    ("text", "some", "not_"),
    [("rc,cuda_copy", "rc_mlx5", "tcp"), ("tcp", "tcp", "posix"), ("sm", "cma", "tcp")],
)
def test_what_ucx_tls_allows(text: str, some: str, not_: str) -> None:
    allowed = transports(text)
    assert allowed is not None and some in allowed and not_ not in allowed


@pytest.mark.parametrize("text", [None, "", "all", "^tcp", "tcp,all"])
def test_what_leaves_everything_open(text: str | None) -> None:
    assert transports(text) is None


def test_differing_releases() -> None:
    facts = with_about(Role.DECODE, versions={"kvcourier": "9.9", "nixl": "1.5.1"})
    (finding,) = found(facts, "versions", WARNING)
    assert "0.1.0 on P, 9.9 on D" in finding.evidence


def test_no_backend_in_common() -> None:
    assert found(with_about(Role.DECODE, backends=["LIBFABRIC"]), "backends", ERROR)


# The router.


def test_a_router_that_believes_kv_elsewhere() -> None:
    wrong = KnownInstance(Role.PREFILL, "http://127.0.0.1:8100", True, "", Place("p", "h", 7))
    router = dataclasses.replace(ROUTER, instances=(wrong, ROUTER.instances[1]))
    assert "h:7" in found(healthy(router=router), "router-knows", ERROR)[0].evidence


def test_a_router_that_reaches_nobody() -> None:
    lost = tuple(dataclasses.replace(each, reachable=False) for each in ROUTER.instances)
    assert (
        len(
            found(
                healthy(router=dataclasses.replace(ROUTER, instances=lost)), "router-knows", ERROR
            )
        )
        == 2
    )


@pytest.mark.parametrize(
    ("changes", "severity"),
    [({"is_draining": True}, NOTE), ({"breaker": "open"}, WARNING), ({"breaker": "closed"}, OK)],
)
def test_a_router_that_sends_nothing_there(changes: dict[str, object], severity: Severity) -> None:
    shunned = dataclasses.replace(ROUTER.instances[1], **changes)
    router = dataclasses.replace(ROUTER, instances=(ROUTER.instances[0], shunned))
    findings = found(healthy(router=router), "router-knows", severity)
    assert any("D http" in each.subject for each in findings)


def test_a_router_without_an_instance() -> None:
    router = dataclasses.replace(ROUTER, instances=ROUTER.instances[:1])
    assert found(healthy(router=router), "router-knows", WARNING)


def test_a_router_that_is_none() -> None:
    assert found(healthy(router=RouterFacts("http://h:1", problem="no")), "router", ERROR)


# Load.


def test_a_full_decode_instance() -> None:
    facts = with_decode(metrics=Metrics(cache_usage=0.99, waiting=7))
    (finding,) = found(facts, "full", WARNING)
    assert "99 %" in finding.evidence and "7 requests waiting" in finding.evidence


def test_a_fragmented_cache() -> None:
    (finding,) = found(with_prefill(metrics=SCATTERED), "runs", WARNING)
    assert "1.2 blocks a run, 50 runs a prompt" in finding.evidence
    assert "1: 900, 2: 100" in finding.evidence


@pytest.mark.parametrize(
    "changes",
    [{"run_blocks": 64_000}, {"outcomes": 500}, {"runs": 60, "run_blocks": 72}],
    ids=["long runs", "short prompts", "too few"],
)
def test_a_cache_that_is_not_fragmented(changes: dict[str, float]) -> None:
    metrics = dataclasses.replace(SCATTERED, **changes)
    assert not found(with_prefill(metrics=metrics), "runs", WARNING)


def test_a_rate_that_saturates() -> None:
    at = found(healthy(load=Load(rate=1e7)), "posting", ERROR)
    assert at and "1e+07 requests/s are more than it can move" in at[0].evidence
    assert found(healthy(load=Load(rate=0.001)), "posting", OK)


def test_failures_so_far() -> None:
    many = Metrics(troubles={"leases expired": 30.0}, outcomes=70)
    few = Metrics(troubles={"leases expired": 1.0}, outcomes=7000)
    assert (
        "leases expired: 30" in found(with_prefill(metrics=many), "failures", WARNING)[0].evidence
    )
    assert not found(with_prefill(metrics=few), "failures", WARNING)


def _burden(tokens: int, run: float | None, post_us: float = 7.0):
    costs, _ = measured(MemoryKind.DRAM, [])
    costs = dataclasses.replace(costs, post_s=post_us * 1e-6)
    prefill, decode = instance(Role.PREFILL).offer, instance(Role.DECODE).offer
    assert prefill is not None and decode is not None
    return burden(prefill, decode, tokens, (run, run), costs)


@given(st.integers(1, 100_000), st.floats(1, 100))
def test_shorter_runs_and_longer_prompts_never_cost_less(tokens: int, run: float) -> None:
    base = _burden(tokens, run)
    assert _burden(tokens, run / 2).posting_s >= base.posting_s
    assert _burden(tokens * 2, run).num_bytes >= base.num_bytes
    assert base.pieces >= _burden(tokens, None).pieces
    assert base.most_per_second > 0


def test_pieces_are_counted_plane_by_plane() -> None:
    one_run, scattered = _burden(1600, None), _burden(1600, 1.0)
    assert scattered.path is TransferPath.DIRECT
    assert scattered.pieces > 10 * one_run.pieces
    assert scattered.num_bytes == one_run.num_bytes


def test_other_layouts_cost_more_pieces() -> None:
    costs, _ = measured(MemoryKind.DRAM, [])
    nhd, hnd = (
        check_offer(offer_of(name, tp_size=1, cache_layout=layout), Limits())
        for name, layout in (("p", CacheLayout.NHD), ("d", CacheLayout.HND))
    )
    alike = burden(nhd, nhd, 160, (None, None), costs)
    turned = burden(nhd, hnd, 160, (None, None), costs)
    # 2 layers of K and V: one run each, or every head of every token of its own.
    assert (alike.pieces, turned.pieces) == (4, 4 * 160 * 4)
    assert alike.num_bytes == turned.num_bytes


def test_what_was_measured_takes_the_place_of_the_guess() -> None:
    seen = Metrics(pieces=1000, post_s=0.02, num_bytes=1e9, transfer_s=0.52)
    costs, is_measured = measured(MemoryKind.DRAM, [seen])
    assert is_measured and costs.post_s == pytest.approx(20e-6)
    assert costs.wire_s == pytest.approx(0.5e-9)
    assert measured(MemoryKind.DRAM, [Metrics(pieces=3, post_s=1.0)])[1] is False
