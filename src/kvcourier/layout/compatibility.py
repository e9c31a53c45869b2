"""Whether two cache geometries describe the same model's KV.

Decides which fields must be equal on both sides of a mapping. Refuses to know about those that
may differ: the split over ranks, block size, number of blocks and layout.
"""

from kvcourier.errors import MappingError
from kvcourier.layout.geometry import CacheGeometry

EQUAL_FIELDS = ("kind", "num_kv_heads", "head_dim", "dtype", "itemsize")
"""Fields of CacheGeometry that describe the model and not how one instance stores it."""


def differing_fields(source: CacheGeometry, target: CacheGeometry) -> list[str]:
    """One sentence for each field that must be equal and is not; empty if the caches fit."""
    return [
        f"{name}: source has {getattr(source, name)}, target has {getattr(target, name)}"
        for name in EQUAL_FIELDS
        if getattr(source, name) != getattr(target, name)
    ]


def require_same_model(source: CacheGeometry, target: CacheGeometry) -> None:
    """Raise MappingError, naming each differing field with both values, unless the caches fit."""
    differences = differing_fields(source, target)
    if differences:
        raise MappingError("; ".join(differences))
