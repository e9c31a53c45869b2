"""Which bytes go where between two KV caches. Pure: no memory is touched, nothing is posted.

Reading path: `geometry` (the words), `shards` (how an instance splits a model), `routes` (which
rank takes what from which rank), `plan` (pieces of one unit, no addresses), `blocks` (tokens to
blocks), `planes` (layers to memory), `bind` (addresses of both sides), `packing` (of one side, for
copies into staging slots and out of them), `digests` (what must be equal on both sides when all of
it has moved), `validate` (what a peer says of its cache).

Common changes: a new kind of cache is a member of `geometry.CacheKind`; a field that must be
equal on both sides goes into `compatibility.EQUAL_FIELDS`; a new bound on a peer's numbers into
`validate`. Anything that changes descriptors is held by the byte oracle in
`tests/layout/test_mapping_properties.py`.
"""

from kvcourier.layout.bind import BoundPieces, bind, estimate_pieces
from kvcourier.layout.blocks import BlockRun, block_run, units_of
from kvcourier.layout.compatibility import differing_fields, require_same_model
from kvcourier.layout.digests import Cells, Share, added, cells_of, digest_of
from kvcourier.layout.geometry import (
    CacheGeometry,
    CacheKind,
    CacheLayout,
    CachePlacement,
    GroupCache,
    GroupGeometries,
    Int64Array,
    MemoryKind,
    RankCache,
    Region,
    TokenSpan,
)
from kvcourier.layout.packing import PackedSide, Parcel, pack_source, pack_target, parcels
from kvcourier.layout.plan import MappingPlan, plan_mapping
from kvcourier.layout.routes import Route, consumers_of, route, routes_from, routes_to
from kvcourier.layout.shards import (
    ModelCache,
    instance_geometries,
    shard_geometry,
    split_heads,
    split_layers,
)
from kvcourier.layout.validate import validate_cache

__all__ = [
    "BlockRun",
    "BoundPieces",
    "CacheGeometry",
    "CacheKind",
    "CacheLayout",
    "CachePlacement",
    "Cells",
    "GroupCache",
    "GroupGeometries",
    "Int64Array",
    "MappingPlan",
    "MemoryKind",
    "ModelCache",
    "PackedSide",
    "Parcel",
    "RankCache",
    "Region",
    "Route",
    "Share",
    "TokenSpan",
    "added",
    "bind",
    "block_run",
    "cells_of",
    "consumers_of",
    "differing_fields",
    "digest_of",
    "estimate_pieces",
    "instance_geometries",
    "pack_source",
    "pack_target",
    "parcels",
    "plan_mapping",
    "require_same_model",
    "route",
    "routes_from",
    "routes_to",
    "shard_geometry",
    "split_heads",
    "split_layers",
    "units_of",
    "validate_cache",
]
