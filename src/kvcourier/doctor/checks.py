"""All checks, in the order of the report.

Decides their names. Refuses to know how they judge (`rules`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvcourier.doctor.facts import Facts
from kvcourier.doctor.findings import Finding
from kvcourier.doctor.rules import fit, load, moving, nodes, reach, router, timing


@dataclass(frozen=True, slots=True)
class Check:
    """One question: its name, what should be the case, and the rule that says whether it is."""

    name: str
    title: str
    rule: Callable[[Facts], Iterable[Finding]]


CHECKS: tuple[Check, ...] = (
    Check("http", "every instance answers over HTTP", reach.http),
    Check("connector", "a courier of ours runs in it", reach.connector),
    Check("side-channel", "its side channel answers", reach.side_channel),
    Check("told-address", "peers are told an address that leads to it", reach.told_address),
    Check("handshake", "P and D fit", fit.handshake),
    Check("caches", "D's cache can be filled from P's", fit.caches),
    Check("modes", "P and D share the modes", fit.modes),
    Check("versions", "P and D run the same releases", nodes.versions),
    Check("backends", "P and D share a NIXL backend", nodes.backends),
    Check("ucx", "UCX has a way from P to D", nodes.ucx),
    Check("router", "the router answers", router.answers),
    Check("router-knows", "the router reaches its instances", router.knows),
    Check("lease", "P keeps KV for as long as D's queue lasts", timing.lease),
    Check("waits", "no time-out ends before one that it must outlast", timing.waits),
    Check("clock", "the clocks agree", timing.clock),
    Check("machine", "the fabric of this machine is known", moving.machine),
    Check("nixl", "NIXL moves bytes on this machine", moving.nixl),
    Check("fetch", "KV comes here, by pull and by push, and is the same", moving.fetch),
    Check("measured", "the cost of moving it is known", moving.measured),
    Check("answers", "P and D together answer as P alone", moving.answers),
    Check("full", "no instance is full", load.full),
    Check("runs", "caches are not fragmented", load.runs),
    Check("posting", "posting and wire bear the load", load.posting),
    Check("failures", "nothing has failed so far", load.troubles),
)


def judge(facts: Facts) -> list[Finding]:
    """Every check's findings, in the order of the checks."""
    return [found.of(check.name) for check in CHECKS for found in check.rule(facts)]
