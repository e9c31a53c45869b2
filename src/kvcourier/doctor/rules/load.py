"""Will it hold under load, and has it held so far?

Decides when a cache is fragmented or full, when posting saturates, and which counters are cause
for concern. Refuses to know how the figures were got. Pure.
"""

from collections.abc import Iterator

from kvcourier.doctor.costs import ENOUGH_PIECES, Burden, burden, measured
from kvcourier.doctor.facts import Facts, InstanceFacts, Metrics, pair_name
from kvcourier.doctor.findings import Finding, error, note, ok, warning
from kvcourier.errors import MappingError

_MIN_RUNS = 64
_SHORT_RUN = 4.0
_MANY_RUNS = 8.0
_LARGE_PIECE_BYTES = 256 << 10
_BUSY = 0.7
_FAILING = 0.05

_UNFRAGMENT = (
    "Let scattered blocks go packed (--path auto, --staging-mib; transfer_path and staging_mib in "
    "vLLM), raise the block size, or give the cache more memory; push can be packed, a READ cannot"
)


def runs(facts: Facts) -> Iterator[Finding]:
    """Prompts lie in few long runs of blocks, so that few pieces are posted."""
    for one in facts.instances:
        metrics = one.metrics
        if metrics is None or not one.engine.is_ours:
            continue
        if metrics.runs < _MIN_RUNS:
            yield note(
                one.name,
                f"{metrics.runs:.0f} runs of blocks so far, too few to judge the cache by",
            )
            continue
        mean = metrics.run_blocks / metrics.runs
        per_prompt = metrics.runs / max(metrics.outcomes, 1.0) / max(num_ranks(one), 1)
        piece_bytes = mean * block_bytes(one)
        seen = (
            f"{mean:.1f} blocks a run, {per_prompt:.0f} runs a prompt, pieces of "
            f"{piece_bytes / 1024:.0f} KiB ({histogram(metrics)})"
        )
        scattered = mean < _SHORT_RUN and per_prompt >= _MANY_RUNS
        if scattered and piece_bytes < _LARGE_PIECE_BYTES:
            yield warning(one.name, f"its cache is fragmented: {seen}", _UNFRAGMENT)
        else:
            yield ok(one.name, seen)


def posting(facts: Facts) -> Iterator[Finding]:
    """What posting costs here, and the load at which couriers do nothing else."""
    for prefill, decode in facts.pairs:
        if prefill.offer is None or decode.offer is None:
            continue
        name = pair_name(prefill, decode)
        memory = next(iter(prefill.offer.ranks.values())).cache.regions[0].memory
        both = [each.metrics for each in (prefill, decode) if each.metrics is not None]
        costs, is_measured = measured(memory, both)
        try:
            cost = burden(
                prefill.offer,
                decode.offer,
                facts.load.tokens,
                (mean_run(prefill), mean_run(decode)),
                costs,
            )
        except MappingError:
            continue  # `caches` has said it.
        yield from _saturation(name, facts, cost, _how(costs.post_s, both, is_measured))


def _saturation(name: str, facts: Facts, cost: Burden, how: str) -> Iterator[Finding]:
    most, rate = cost.most_per_second, facts.load.rate
    seen = (
        f"a prompt of {facts.load.tokens} tokens is {cost.pieces} pieces, "
        f"{cost.num_bytes / 1e6:.1f} MB, {cost.path}: {cost.posting_s * 1e3:.2f} ms of a courier "
        f"and {cost.wire_s * 1e3:.2f} ms of the wire ({how}); saturated at about {most:.0f} "
        "requests/s"
    )
    advice = (
        "Send less to this pair, add instances or ranks, or see to it that fewer pieces are posted "
        "(docs/packed.md)"
    )
    if rate is None:
        yield ok(name, seen)
    elif rate >= most:
        yield error(name, f"{rate:g} requests/s are more than it can move: {seen}", advice)
    elif rate >= _BUSY * most:
        yield warning(
            name, f"{rate:g} requests/s leave a courier or the wire hardly idle: {seen}", advice
        )
    else:
        yield ok(name, f"{rate:g} requests/s keep it {100 * rate / most:.1f} % busy: {seen}")


def full(facts: Facts) -> Iterator[Finding]:
    """No instance is full at the moment."""
    for one in facts.instances:
        usage = one.metrics.cache_usage if one.metrics else None
        if one.metrics is None or usage is None:
            continue
        waiting = one.metrics.waiting
        seen = f"{100 * usage:.0f} % of its cache in use, {waiting:.0f} requests waiting"
        if not one.is_full:
            yield ok(one.name, seen)
        else:
            yield warning(
                one.name,
                f"it is full: {seen}; prompts wait, and P keeps their KV meanwhile",
                "Give it more blocks, add an instance, or send fewer or shorter requests",
            )


def troubles(facts: Facts) -> Iterator[Finding]:
    """Nothing that is counted as a failure has happened since the start, or next to nothing."""
    for one in facts.instances:
        metrics = one.metrics
        if metrics is None or not one.engine.is_ours:
            continue
        if not metrics.troubles:
            yield ok(one.name, "no failure counted since it started")
        for what, count in sorted(metrics.troubles.items()):
            well = max(metrics.outcomes, metrics.posts)
            seen = f"{what}: {count:.0f} since it started, beside {well:.0f} that went well"
            if count > _FAILING * (count + well):
                yield warning(
                    one.name,
                    seen,
                    "Its log has a line with the story of each; docs/failure-model.md says what "
                    "each cause looks like",
                )
            else:
                yield note(one.name, seen)


def mean_run(one: InstanceFacts) -> float | None:
    """Blocks in a run, on average; None where too few were seen."""
    metrics = one.metrics
    if metrics is None or metrics.runs < _MIN_RUNS:
        return None
    return metrics.run_blocks / metrics.runs


def histogram(metrics: Metrics) -> str:
    """The run lengths that were seen, in words: up to 1: 60, 2: 3, 16: 1."""
    told, before = [], 0.0
    for bound, count in metrics.run_buckets:
        if count > before:
            length = "more" if bound == float("inf") else f"{bound:g}"
            told.append(f"{length}: {count - before:.0f}")
        before = max(before, count)
    return f"runs by length up to {', '.join(told)}" if told else "no histogram"


def num_ranks(one: InstanceFacts) -> int:
    """Ranks that count runs, each for itself; vLLM's workers sample likewise."""
    return len(one.offer.ranks) if one.offer else 1


def block_bytes(one: InstanceFacts) -> float:
    """Bytes of one block of one plane of one layer; the piece that a lone block makes."""
    if one.offer is None:
        return 0.0
    return min(
        float(geometry.block_bytes)
        for groups in one.offer.geometries.values()
        for geometry in groups
    )


def _how(post_s: float, seen: list[Metrics], is_measured: bool) -> str:
    if not is_measured:
        return f"{post_s * 1e6:.1f} us a piece, guessed: fewer than {ENOUGH_PIECES} were posted"
    pieces = sum(each.pieces for each in seen)
    transfer_s, num_bytes = (
        sum(getattr(each, name) for each in seen) for name in ("transfer_s", "num_bytes")
    )
    rate = f", {num_bytes / transfer_s / 1e9:.2f} GB/s on average" if transfer_s > 0 else ""
    return f"{post_s * 1e6:.1f} us a piece, measured over {pieces:.0f}{rate}"
