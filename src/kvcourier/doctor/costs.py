"""What moving one prompt from a P to a D costs, and how many a second that leaves room for.

Decides by the cost model that chooses paths (`runtime/path_choice.py`), with what was measured in
place of its first guesses. Refuses to judge. Pure.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvcourier.config import MIB, TransferPath
from kvcourier.core.handshake import PeerInstance
from kvcourier.doctor.facts import Metrics
from kvcourier.ids import Rank
from kvcourier.layout import Route, plan_mapping, route
from kvcourier.layout.geometry import CacheGeometry, MemoryKind
from kvcourier.runtime.path_choice import FIRST_GUESS, PathCosts

ENOUGH_PIECES = 64
"""So many posted pieces make a measurement."""

_ENOUGH_BYTES = 16 * MIB
_SLOT_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class Burden:
    """What one prompt costs the rank that posts most of it.

    Attributes:
        path: which path should be faster.
        pieces, num_bytes: of one prompt.
        posting_s: how long its courier is busy with it.
        wire_s: how long its bytes are on their way.
    """

    path: TransferPath
    pieces: int
    num_bytes: int
    posting_s: float
    wire_s: float

    @property
    def most_per_second(self) -> float:
        """Prompts a second at which courier or wire is busy all the time."""
        return 1.0 / max(self.posting_s, self.wire_s, 1e-9)


def measured(memory: MemoryKind, seen: Iterable[Metrics]) -> tuple[PathCosts, bool]:
    """Costs of a piece and of a byte, and whether a piece's was measured or is a first guess."""
    costs = FIRST_GUESS[memory]
    metrics = list(seen)
    pieces = sum(each.pieces for each in metrics)
    num_bytes = sum(each.num_bytes for each in metrics)
    post_s = sum(each.post_s for each in metrics)
    wire_s = sum(each.transfer_s for each in metrics) - post_s
    if num_bytes >= _ENOUGH_BYTES and wire_s > 0:
        costs = dataclasses.replace(costs, wire_s=wire_s / num_bytes)
    if pieces < ENOUGH_PIECES:
        return costs, False
    return dataclasses.replace(costs, post_s=post_s / pieces), True


def burden(
    prefill: PeerInstance,
    decode: PeerInstance,
    tokens: int,
    run_blocks: tuple[float | None, float | None],
    costs: PathCosts,
) -> Burden:
    """What a prompt of so many tokens costs.

    Args:
        run_blocks: blocks in a run of consecutive ids, on average, at P and at D; None: taken to
            be one run.

    Raises:
        MappingError: the two do not fit.
    """
    posted: dict[Rank, tuple[int, int]] = {}
    for each in route(prefill.geometries, decode.geometries):
        source = _geometry(prefill, each.source, each)
        target = _geometry(decode, each.target, each)
        pieces, num_bytes = _pieces(source, target, each, tokens, run_blocks)
        before = posted.get(each.source, (0, 0))
        posted[each.source] = (before[0] + pieces, before[1] + num_bytes)
    busiest = max(posted, key=lambda rank: posted[rank][0] * costs.post_s)
    pieces, num_bytes = posted[busiest]
    contact = prefill.ranks[busiest]
    staging = next((each.staging for each in decode.ranks.values() if each.staging), None)
    slot_bytes = staging.slot_bytes if staging else _SLOT_BYTES
    parcels = math.ceil(num_bytes / slot_bytes)
    estimates = costs.estimate(pieces, parcels, num_bytes)
    if not contact.packs or staging is None:
        del estimates[TransferPath.PACKED]
    path = min(estimates, key=lambda each: estimates[each])
    wire_s = num_bytes * costs.wire_s
    posting_s = pieces * costs.post_s
    if path is TransferPath.PACKED:
        posting_s = estimates[path] - wire_s
    return Burden(path, pieces, num_bytes, posting_s, wire_s)


def _geometry(instance: PeerInstance, rank: Rank, of: Route) -> CacheGeometry:
    """The group of a rank that holds a route's layers."""
    return next(
        geometry for geometry in instance.geometries[rank] if set(of.layers) <= set(geometry.layers)
    )


def _pieces(
    source: CacheGeometry,
    target: CacheGeometry,
    of: Route,
    tokens: int,
    run_blocks: tuple[float | None, float | None],
) -> tuple[int, int]:
    """(pieces, bytes) of one route."""
    plan = plan_mapping(source, target, of)
    kept = tokens if source.window is None else min(tokens, source.window)
    units = math.ceil(kept / plan.unit_tokens)
    runs = units * len(plan.lengths)
    if len(plan.lengths) == 1:
        in_tokens = [
            blocks * side.block_size
            for blocks, side in zip(run_blocks, (source, target), strict=True)
            if blocks
        ]
        runs = math.ceil(kept / min(in_tokens)) if in_tokens else 1
        runs = max(1, min(runs, units))
    planes = source.kind.num_planes * len(of.layers)
    return runs * planes, plan.bytes_per_unit * units
