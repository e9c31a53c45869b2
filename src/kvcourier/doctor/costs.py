"""What moving one prompt from a P to a D costs, and how many a second that leaves room for.

Decides by the cost model that chooses paths (`runtime/path_choice.py`), with what was measured in
place of its first guesses. Refuses to judge. Pure.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvcourier.config import MIB, TransferPath
from kvcourier.core.handshake import PeerInstance
from kvcourier.doctor.facts import Metrics
from kvcourier.ids import Rank
from kvcourier.layout import (
    BlockRun,
    GroupCache,
    RankCache,
    TokenSpan,
    estimate_pieces,
    plan_mapping,
    route,
    units_of,
)
from kvcourier.layout.geometry import MemoryKind
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
    span = TokenSpan(0, tokens)
    posted: dict[Rank, tuple[int, int]] = {}
    for each in route(prefill.geometries, decode.geometries):
        source = _roomy(prefill.ranks[each.source].cache, each.source_group, tokens)
        target = _roomy(decode.ranks[each.target].cache, each.target_group, tokens)
        plan = plan_mapping(source.geometry, target.geometry, each)
        needed = each.needed(span)
        pieces = estimate_pieces(
            plan,
            source,
            target,
            _blocks(source, needed, run_blocks[0]),
            _blocks(target, needed, run_blocks[1]),
            needed,
        )
        num_bytes = plan.bytes_per_unit * len(units_of(needed, plan.unit_tokens))
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


def _roomy(cache: RankCache, group: int, tokens: int) -> GroupCache:
    """A cache group, as if it had room for any prompt: only where blocks lie towards each other
    counts here."""
    found = cache.groups[group]
    room = found.geometry.num_reserved_blocks + 2 * (tokens // found.geometry.block_size + 2)
    return dataclasses.replace(found, geometry=dataclasses.replace(found.geometry, num_blocks=room))


def _blocks(cache: GroupCache, span: TokenSpan, run: float | None) -> BlockRun:
    """Blocks for these positions, in runs of so many consecutive ids, with a gap after each."""
    geometry = cache.geometry
    first = span.start // geometry.block_size
    places = np.arange(math.ceil(span.stop / geometry.block_size) - first, dtype=np.int64)
    gaps = np.zeros_like(places) if run is None else (places / max(run, 1.0)).astype(np.int64)
    ids = geometry.num_reserved_blocks + places + gaps
    return BlockRun(ids, first * geometry.block_size)
