"""Do a P and a D belong together?

Decides what of two instances differs that must not, or should not. Refuses to know addresses. The
verdict on what must be equal is the handshake's own.
"""

from collections.abc import Iterator

from kvcourier.config import TransferMode
from kvcourier.core.handshake import Facts as Shape
from kvcourier.core.handshake import PeerInstance, judge
from kvcourier.doctor.facts import Facts, InstanceFacts, pair_name
from kvcourier.doctor.findings import Finding, error, note, ok
from kvcourier.errors import MappingError
from kvcourier.layout import route

_ADVICE = {
    "model": "Serve the same model under the same name on both (--model, --served-model-name)",
    "dtype": "Give both the same --dtype and --kv-cache-dtype",
    "itemsize": "Give both the same --dtype and --kv-cache-dtype",
    "cache_format": "Give both the same attention backend, --kv-cache-dtype and block size",
}
_SAME_MODEL = "Serve the same model, in the same version, on both"


def handshake(facts: Facts) -> Iterator[Finding]:
    """What must be equal on both sides is: model, shape, element type, cache format."""
    for prefill, decode in facts.pairs:
        name = pair_name(prefill, decode)
        if prefill.told is None or decode.told is None:
            if prefill.engine.is_ours and decode.engine.is_ours:
                yield note(name, "not compared: one of them has not told of itself")
            continue
        ours, theirs = prefill.told.offer.facts, decode.told.offer.facts
        differing = [
            field
            for field in Shape.__struct_fields__
            if getattr(ours, field) != getattr(theirs, field)
        ]
        for field in differing:
            yield error(
                name,
                f"{field}: P has {getattr(ours, field)!r}, D has {getattr(theirs, field)!r}",
                _ADVICE.get(field, _SAME_MODEL),
            )
        if not differing:
            yield ok(
                name,
                f"{ours.model}: {ours.num_layers} layers, {ours.num_kv_heads} KV heads of "
                f"{ours.head_dim}, {ours.dtype}",
            )


def caches(facts: Facts) -> Iterator[Finding]:
    """Every layer and head that D wants, some rank of P has, whatever their sizes and layouts."""
    for prefill, decode in facts.pairs:
        name = pair_name(prefill, decode)
        for one in (prefill, decode):
            if one.offer_problem:
                yield error(
                    one.name,
                    f"describes its cache in an unusable way: {one.offer_problem}",
                    "Run the same release of kvcourier on both",
                )
        if prefill.offer is None or decode.offer is None or not _same_facts(prefill, decode):
            continue
        try:
            routes = route(prefill.offer.geometries, decode.offer.geometries)
        except MappingError as reason:
            yield error(
                name,
                str(reason),
                "P must keep what D needs: give both the same settings "
                "for cache groups and windows",
            )
            continue
        yield ok(
            name,
            f"tp {prefill.offer.tp_size} x pp {prefill.offer.pp_size}, blocks of "
            f"{_block_sizes(prefill.offer)} tokens -> tp {decode.offer.tp_size} x pp "
            f"{decode.offer.pp_size}, blocks of {_block_sizes(decode.offer)}: "
            f"{len(routes)} routes",
        )


def modes(facts: Facts) -> Iterator[Finding]:
    """Both take part in the modes that shall work."""
    for prefill, decode in facts.pairs:
        if prefill.offer is None or decode.offer is None:
            continue
        name = pair_name(prefill, decode)
        shared = prefill.offer.modes & decode.offer.modes
        for mode in facts.modes or (() if shared else tuple(TransferMode)):
            if mode not in shared:
                yield error(
                    name,
                    f"{mode}: P takes part in {_listed(prefill.offer)}, D in "
                    f"{_listed(decode.offer)}",
                    f"Add {mode} to --kv-modes of both, or choose another mode",
                )
        if shared:
            yield ok(name, f"both take part in {', '.join(sorted(shared))}")


def _same_facts(prefill: InstanceFacts, decode: InstanceFacts) -> bool:
    """Otherwise the handshake's reasons say it better."""
    if prefill.told is None or decode.told is None:
        return False
    return judge(prefill.told.offer.facts, decode.told.offer.facts).compatible


def _listed(offer: PeerInstance) -> str:
    return ", ".join(sorted(offer.modes)) or "none"


def _block_sizes(offer: PeerInstance) -> str:
    sizes = {each.block_size for groups in offer.geometries.values() for each in groups}
    return ", ".join(map(str, sorted(sizes)))
