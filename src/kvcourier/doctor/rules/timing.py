"""Do the durations of P, D, the router and the clients go together?

Decides which wait must be shorter than which. Refuses to know where the durations were set. Pure.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvcourier.doctor.facts import ClockOffset, Facts, InstanceFacts, pair_name
from kvcourier.doctor.findings import Finding, error, note, ok, warning

_SKEW_S = 1.5
"""HTTP dates are whole seconds, so what is below a second and a half is not seen for sure."""

_SHARE = 0.95
"""Of the requests seen, so many waited no longer than what is called the queue."""


def lease(facts: Facts) -> Iterator[Finding]:
    """P keeps a prompt for as long as D's queue may last."""
    for prefill, decode in facts.pairs:
        kept, renewing = _timing(prefill), _timing(decode)
        if not kept or not renewing:
            continue
        name = pair_name(prefill, decode)
        lease_s, beat_s = kept["kv_lease_duration"], renewing["heartbeat_s"]
        promised_s = kept["hold_limit_s"] if beat_s < lease_s else lease_s
        queue_s = longest_wait_s(decode)
        if beat_s >= lease_s:
            yield error(
                name,
                f"D renews every {beat_s:g} s a lease that P ends after {lease_s:g} s, so every "
                f"prompt that waits on D for longer than {lease_s:g} s is lost",
                "Give both the same --kv-lease-duration (kv_connector_extra_config."
                "kv_lease_duration in vLLM); D's heartbeat follows from its own",
            )
        elif beat_s > lease_s / 3:
            yield warning(
                name,
                f"D renews every {beat_s:g} s a lease that P ends after {lease_s:g} s: fewer than "
                "three heartbeats a lease, so one or two late ones end it",
                "Give both the same --kv-lease-duration; D's heartbeat follows from its own",
            )
        if queue_s is not None and queue_s > promised_s:
            yield error(
                name,
                f"requests wait up to {queue_s:g} s for their turn on D, but P keeps their KV for "
                f"{promised_s:g} s only (kv_lease_duration {lease_s:g} s, hold_limit_s "
                f"{kept['hold_limit_s']:g} s)",
                "Give D more instances or memory, send fewer requests, or raise the lease",
            )
        elif beat_s <= lease_s / 3:
            seen = "" if queue_s is None else f"; requests wait up to {queue_s:g} s on D"
            yield ok(
                name,
                f"a lease of {lease_s:g} s, renewed every {beat_s:g} s for up to "
                f"{kept['hold_limit_s']:g} s{seen}",
            )


@dataclass(frozen=True, slots=True)
class Wait:
    """A duration by its name and its owner."""

    owner: str
    setting: str


@dataclass(frozen=True, slots=True)
class Order:
    """A wait that must end before another one does; `else_` is what happens otherwise."""

    first: Wait
    then: Wait
    else_: str
    equal_is_fine: bool = False


_CLIENT = Wait("the client", "timeout")
_FIRST_BYTE = Wait("the router", "first_byte_s")
_TOTAL = Wait("the router", "total_s")

ORDERS: tuple[Order, ...] = (
    Order(
        Wait("D", "push_registration_timeout"),
        _FIRST_BYTE,
        "the router gives up before D says why, or computes the prompt itself",
    ),
    Order(
        Wait("D", "transfer_timeout_s"),
        _FIRST_BYTE,
        "the router gives up before D says why, or computes the prompt itself",
    ),
    Order(
        Wait("the router", "prefill_s"),
        _FIRST_BYTE,
        "in push the decode leg's wait includes the prefill, so it ends first",
        equal_is_fine=True,
    ),
    Order(_FIRST_BYTE, _TOTAL, "the whole answer's wait ends first", equal_is_fine=True),
    Order(
        Wait("the router", "connect_s"),
        Wait("P", "kv_lease_duration"),
        "P's KV is gone before D has heard of the request",
    ),
    Order(
        Wait("D", "push_registration_timeout"),
        _CLIENT,
        "clients leave before D says why, or computes the prompt itself",
    ),
    Order(_FIRST_BYTE, _CLIENT, "clients leave before the router tells them what is wrong"),
    *(
        Order(
            Wait(side, "transfer_timeout_s"),
            Wait(side, "quarantine_limit_s"),
            "memory is given back while a write to it may be in flight",
        )
        for side in ("P", "D")
    ),
)
"""Every order that the defaults keep."""


def waits(facts: Facts) -> Iterator[Finding]:
    """No wait ends before another one that it is there to outlast."""
    for prefill, decode in facts.pairs:
        known = _durations(facts, prefill, decode)
        name = pair_name(prefill, decode)
        looked_at = 0
        for order in ORDERS:
            first, then = known.get(order.first), known.get(order.then)
            if first is None or then is None:
                continue
            looked_at += 1
            if first > then or (first == then and not order.equal_is_fine):
                yield warning(
                    name,
                    f"{order.first.owner}'s {order.first.setting} is {first:g} s and "
                    f"{order.then.owner}'s {order.then.setting} {then:g} s: {order.else_}",
                    f"Raise {order.then.setting} of {order.then.owner}, or lower "
                    f"{order.first.setting} of {order.first.owner}",
                )
        if looked_at:
            yield ok(name, f"{looked_at} pairs of time-outs compared")
        if facts.router is None or facts.load.client_timeout_s is None:
            missing = ["--router"] if facts.router is None else []
            missing += ["--client-timeout"] if facts.load.client_timeout_s is None else []
            yield note(name, f"not compared without {' and '.join(missing)}: their time-outs")


def clock(facts: Facts) -> Iterator[Finding]:
    """The clocks agree. No transfer of ours depends on them; people and vLLM do."""
    for one in facts.instances:
        offset = one.clock
        if offset is None:
            continue
        if offset.least_s < _SKEW_S:
            yield ok(one.name, "its clock agrees with ours, as far as an HTTP date tells")
            continue
        ahead = "ahead of" if offset.low_s > 0 else "behind"
        yield warning(
            one.name,
            f"its clock is {_range(offset)} s {ahead} the one here. Transfers do not suffer: each "
            "side measures leases and time-outs by its own clock, and only durations cross the "
            "wire. But stories, traces and logs of P and D cannot be laid side by side",
            "Run NTP or chrony on every node",
        )


def longest_wait_s(one: InstanceFacts) -> float | None:
    """How long nearly all requests waited for their turn at most; None if that is not known."""
    buckets = one.metrics.queue_buckets if one.metrics else ()
    total = buckets[-1][1] if buckets else 0.0
    if not total:
        return None
    finite = [bound for bound, count in buckets if count >= _SHARE * total and bound < float("inf")]
    return min(finite, default=max(bound for bound, _ in buckets[:-1]) if len(buckets) > 1 else 0.0)


def _timing(one: InstanceFacts) -> Mapping[str, float]:
    """Its durations, if it told the ones that we ask for."""
    timing = one.told.about.timing if one.told else {}
    needed = ("kv_lease_duration", "heartbeat_s", "hold_limit_s")
    return timing if all(timing.get(key, 0.0) > 0 for key in needed) else {}


def _durations(facts: Facts, prefill: InstanceFacts, decode: InstanceFacts) -> dict[Wait, float]:
    tables: dict[str, Mapping[str, float]] = {
        "P": _timing(prefill),
        "D": _timing(decode),
        "the router": facts.router.timeouts if facts.router else {},
    }
    found = {
        Wait(owner, setting): value
        for owner, table in tables.items()
        for setting, value in table.items()
    }
    if facts.load.client_timeout_s is not None:
        found[_CLIENT] = facts.load.client_timeout_s
    return found


def _range(offset: ClockOffset) -> str:
    low, high = sorted((abs(offset.low_s), abs(offset.high_s)))
    return f"{low:.1f} to {high:.1f}"
