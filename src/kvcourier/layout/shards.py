"""How a model's KV cache is split over the ranks of one instance.

Decides which layers and KV heads each rank holds, the way vLLM does. Refuses to know where the
bytes lie and who the peers are.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvcourier.errors import ConfigError
from kvcourier.ids import Rank
from kvcourier.layout.geometry import CacheGeometry, CacheKind, CacheLayout


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The KV cache of a whole model, before it is split over ranks.

    Attributes:
        kind: K and V, or one latent plane.
        num_layers: layers of the model.
        num_kv_heads: KV heads of the model (1 for a latent cache).
        head_dim: lanes per head.
        dtype: name of the element type.
        itemsize: bytes per element.
        block_size: tokens per block.
        num_blocks: blocks in each rank's cache.
        cache_layout: order of dimensions inside a block.
    """

    kind: CacheKind
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    itemsize: int
    block_size: int
    num_blocks: int
    cache_layout: CacheLayout


def split_heads(num_kv_heads: int, tp_size: int, tp_rank: int) -> range:
    """KV heads held by one tensor-parallel rank.

    With more ranks than heads, each head is held by `tp_size / num_kv_heads` consecutive ranks
    (replicated KV); a latent cache, with its one head, is held by all.

    Raises:
        ConfigError: neither number divides the other, or the rank is not below the size.
    """
    _check_rank("tp", tp_rank, tp_size)
    if num_kv_heads % tp_size == 0:
        share = num_kv_heads // tp_size
        return range(tp_rank * share, (tp_rank + 1) * share)
    if tp_size % num_kv_heads == 0:
        head = tp_rank // (tp_size // num_kv_heads)
        return range(head, head + 1)
    raise ConfigError(
        f"tp_size: expected a divisor or a multiple of the model's {num_kv_heads} KV heads, "
        f"found {tp_size}"
    )


def split_layers(num_layers: int, pp_size: int, pp_rank: int) -> range:
    """Global layers held by one pipeline-parallel stage, as even as possible.

    Layers left over go one each to the stages before the last, counted backwards, because the
    last stage also computes the logits: 10 layers over 4 stages are 2, 3, 3, 2 (as in vLLM).

    Raises:
        ConfigError: there are fewer layers than stages, or the rank is not below the size.
    """
    _check_rank("pp", pp_rank, pp_size)
    if pp_size > num_layers:
        raise ConfigError(f"pp_size: expected 1 to {num_layers} (layers), found {pp_size}")
    share, extra = divmod(num_layers, pp_size)
    first_larger = pp_size - 1 - extra
    start = pp_rank * share + min(max(pp_rank - first_larger, 0), extra)
    is_larger = first_larger <= pp_rank < pp_size - 1
    return range(start, start + share + is_larger)


def shard_geometry(
    model: ModelCache, tp_size: int, tp_rank: int, layers: Iterable[int]
) -> CacheGeometry:
    """Geometry of the rank `tp_rank` of `tp_size` that holds these global layers.

    Raises:
        ConfigError: the KV heads cannot be split over `tp_size` ranks.
    """
    heads = split_heads(model.num_kv_heads, tp_size, tp_rank)
    return CacheGeometry(
        kind=model.kind,
        layers=tuple(layers),
        num_kv_heads=model.num_kv_heads,
        head_start=heads.start,
        head_stop=heads.stop,
        head_dim=model.head_dim,
        dtype=model.dtype,
        itemsize=model.itemsize,
        block_size=model.block_size,
        num_blocks=model.num_blocks,
        cache_layout=model.cache_layout,
    )


def instance_geometries(
    model: ModelCache, tp_size: int, pp_size: int = 1
) -> dict[Rank, CacheGeometry]:
    """Geometry of every rank of an instance, in order of rank.

    Raises:
        ConfigError: heads or layers cannot be split over so many ranks.
    """
    return {
        Rank(pp_rank, tp_rank): shard_geometry(
            model, tp_size, tp_rank, split_layers(model.num_layers, pp_size, pp_rank)
        )
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    }


def _check_rank(axis: str, rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ConfigError(
            f"{axis}_rank: expected 0 to {axis}_size - 1, found {rank} of {axis}_size {size}"
        )
