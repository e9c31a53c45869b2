"""The published geometry of the cache against what is really written, cell by cell."""

import itertools

import numpy as np
import pytest
import torch

from engine.fake_endpoint import CacheMemory
from kvcourier.engine.kv_cache import CacheShape, KVCache, Slots
from kvcourier.ids import Rank
from kvcourier.layout.geometry import CacheLayout

SHAPE = CacheShape(num_layers=3, num_kv_heads=2, head_dim=4)
BLOCK_SIZE, NUM_BLOCKS = 4, 6


def make_cache(cache_layout: CacheLayout, tp_size: int, pp_size: int) -> KVCache:
    return KVCache(
        SHAPE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        cache_layout=cache_layout,
        tp_size=tp_size,
        pp_size=pp_size,
    )


@pytest.mark.parametrize("cache_layout", list(CacheLayout))
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (4, 3), (1, 2)])
def test_every_cell_is_where_the_geometry_says(
    cache_layout: CacheLayout, tp_size: int, pp_size: int
) -> None:
    cache = make_cache(cache_layout, tp_size, pp_size)
    blocks, offsets = torch.tensor([5, 0, 3]), torch.tensor([1, 3, 0])
    written = torch.arange(3 * 2 * 3 * 2 * 4, dtype=torch.float32).view(3, 2, 3, 2, 4) + 1
    for layer, (key, value) in enumerate(written):
        cache.write(layer, Slots(blocks, offsets), key, value)
    memory = CacheMemory(cache.rank_caches())
    assert memory.keys == {(la, plane, h) for la in range(3) for plane in (0, 1) for h in (0, 1)}
    for (layer, plane, head), replicas in memory._views.items():
        assert len(replicas) == max(1, tp_size // 2)
        for cells in replicas:
            values = cells.copy().view(np.float32)
            for token, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
                expected = written[layer, plane, token, head].numpy()
                assert (values[block, offset] == expected).all()
            assert np.count_nonzero(values) == 3 * 4  # nothing was written elsewhere


@pytest.mark.parametrize("cache_layout", list(CacheLayout))
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_read_gathers_blocks_in_the_order_of_the_table(
    cache_layout: CacheLayout, tp_size: int
) -> None:
    cache = make_cache(cache_layout, tp_size, 1)
    slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    key = torch.randn(len(slots), 2, 4)
    cache.write(1, Slots(slots // BLOCK_SIZE, slots % BLOCK_SIZE), key, -key)
    table = torch.tensor([[4, 1], [0, 5]])
    keys, values = cache.read(1, table)
    assert keys.shape == (2, 2, 2 * BLOCK_SIZE, 4)
    for row, blocks in enumerate(table.tolist()):
        tokens = [block * BLOCK_SIZE + i for block in blocks for i in range(BLOCK_SIZE)]
        assert torch.equal(keys[row], key[tokens].transpose(0, 1))
        assert torch.equal(values[row], -key[tokens].transpose(0, 1))


def test_rank_caches_name_their_rank_layers_and_heads() -> None:
    caches = make_cache(CacheLayout.NHD, 4, 2).rank_caches()
    assert [cache.rank for cache in caches] == [Rank(p, t) for p in range(2) for t in range(4)]
    layers = {cache.rank.pp_rank: cache.geometries[0].layers for cache in caches}
    assert sorted(layers[0] + layers[1]) == [0, 1, 2]
    heads = [(c.head_start, c.head_stop) for (c,) in (cache.geometries for cache in caches[:4])]
    assert heads == [(0, 1), (0, 1), (1, 2), (1, 2)]
    ranges = sorted((r.address, r.address + r.size_bytes) for c in caches for r in c.regions)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert sum(r.size_bytes for c in caches for r in c.regions) == (
        2 * NUM_BLOCKS * BLOCK_SIZE * SHAPE.token_bytes(torch.float32)
    )
