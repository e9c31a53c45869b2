"""Copies between a cache and a slot: on the host, by the GPU kernel, and what is refused.

The oracle is `PackedSide.addresses`, which tests/layout/test_packing.py holds to what `bind` moves.
Every copier runs the same examples; the kernel also runs without a GPU, in triton's interpreter,
where triton is installed.
"""

import ctypes
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourier.errors import ConfigError, MappingError
from kvcourier.ids import Rank
from kvcourier.layout import (
    BlockRun,
    CacheGeometry,
    CacheKind,
    CacheLayout,
    GroupCache,
    MemoryKind,
    PackedSide,
    Parcel,
    Region,
    TokenSpan,
    instance_geometries,
    pack_source,
    pack_target,
    parcels,
    plan_mapping,
    route,
)
from kvcourier.transport.copying import Copier, LoadedTables, Ticket, copier_for
from kvcourier.transport.copying.host import HostCopier
from layout.test_mapping_properties import Scenario, scenarios
from layout_builders import (
    Buffer,
    PlacementStyle,
    make_cache,
    make_instance,
    model_cache,
    one_group,
)
from transport.interpreter import run_interpreted

check = settings(max_examples=60, derandomize=True, deadline=None, database=None)


@dataclass(frozen=True)
class Example:
    """Two caches of one rank each, and where a request lies in them."""

    source: CacheGeometry
    target: CacheGeometry
    source_style: PlacementStyle = PlacementStyle.STACKED
    target_style: PlacementStyle = PlacementStyle.STACKED

    @property
    def span(self) -> TokenSpan:
        """48 is a common multiple of the block sizes, so that it starts at a unit's border."""
        return TokenSpan(48, 48 + 70)


def geometries(heads: range, num_heads: int = 4, **changes: object) -> CacheGeometry:
    (whole,) = instance_geometries(model_cache(num_kv_heads=num_heads, **changes), 1).values()
    return replace(whole, head_start=heads.start, head_stop=heads.stop)


def examples() -> list[Example]:
    """Whole blocks to single cells, word sizes from 8 bytes to 1, one placement after the other."""
    styles = itertools.cycle(itertools.permutations(PlacementStyle, 2))
    orders = list(CacheLayout)
    made = []
    for sizes, source_order, target_order, heads, (lanes, itemsize) in [
        ((16, 16), 0, 0, range(4), (128, 2)),
        ((16, 16), 1, 1, range(4), (128, 2)),
        ((16, 48), 0, 0, range(4), (128, 2)),
        ((48, 16), 1, 0, range(4), (128, 2)),
        ((16, 16), 0, 0, range(1, 2), (128, 2)),
        ((24, 16), 1, 1, range(2, 4), (64, 2)),
        ((16, 16), 0, 1, range(1, 4), (64, 1)),
        ((3, 4), 0, 0, range(4), (20, 2)),
        ((16, 16), 0, 0, range(3), (6, 2)),
        ((2, 16), 1, 0, range(4), (5, 2)),
        ((16, 8), 0, 1, range(2), (3, 1)),
        ((1, 1), 0, 0, range(1, 4), (7, 1)),
    ]:
        common = {"head_dim": lanes, "itemsize": itemsize, "num_layers": 3}
        source_size, target_size = sizes
        whole = {"num_blocks": -(-160 // source_size), "block_size": source_size}
        part = {"num_blocks": -(-160 // target_size), "block_size": target_size}
        made.append(
            Example(
                geometries(range(4), cache_layout=orders[source_order], **whole, **common),
                geometries(heads, cache_layout=orders[target_order], **part, **common),
                *next(styles),
            )
        )
    # A latent cache, whose cells are no power of two: 9 * 128 bytes.
    latent = {"kind": CacheKind.LATENT, "head_dim": 576, "num_layers": 2, "num_blocks": 10}
    made.append(Example(geometries(range(1), 1, **latent), geometries(range(1), 1, **latent)))
    return made


def name_of(example: Example) -> str:
    source, target = example.source, example.target
    return (
        f"{source.block_size} {source.cache_layout} to {target.block_size} {target.cache_layout}, "
        f"{target.num_heads} of {source.num_heads} heads of {source.cell_bytes} bytes"
    )


class HostMemory:
    """A cache where it was made."""

    kind = MemoryKind.DRAM

    def place(self, memory: tuple[GroupCache, list[Buffer]]) -> tuple[GroupCache, list[Any]]:
        return memory

    def read(self, buffers: Sequence[Any]) -> list[npt.NDArray[np.uint8]]:
        return [each.copy() for each in buffers]

    def read_slot(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)

    def write_slot(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))


class GpuMemory:
    """A cache that was copied to a GPU, byte for byte."""

    kind = MemoryKind.VRAM

    def __init__(self, device_id: int) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", device_id)

    def place(self, memory: tuple[GroupCache, list[Buffer]]) -> tuple[GroupCache, list[Any]]:
        cache, buffers = memory
        there = [self._torch.from_numpy(each).to(self._device) for each in buffers]
        regions = tuple(
            Region(each.data_ptr(), each.numel(), MemoryKind.VRAM, self._device.index)
            for each in there
        )
        # The copier's stream does not wait for the default one, which copied.
        self._torch.cuda.synchronize(self._device)
        return replace(cache, regions=regions), there

    def read(self, buffers: Sequence[Any]) -> list[npt.NDArray[np.uint8]]:
        return [each.cpu().numpy() for each in buffers]

    def read_slot(self, address: int, num_bytes: int) -> bytes:
        return self._view(address, num_bytes).cpu().numpy().tobytes()

    def write_slot(self, address: int, content: bytes) -> None:
        arrived = self._torch.frombuffer(bytearray(content), dtype=self._torch.uint8)
        self._view(address, len(content)).copy_(arrived)
        self._torch.cuda.synchronize(self._device)

    def _view(self, address: int, num_bytes: int) -> Any:
        class Bare:
            def __init__(self) -> None:
                self.__cuda_array_interface__ = {
                    "data": (address, False),
                    "shape": (num_bytes,),
                    "typestr": "|u1",
                    "version": 3,
                }

        return self._torch.as_tensor(Bare(), device=self._device)


class PlainCopier(HostCopier):
    """The oracle: piece by piece, from and to the addresses that the sides tell."""

    def load(self, segments: Sequence[PackedSide]) -> LoadedTables:
        return LoadedTables(segments)

    def gather(self, tables: Any, parcel: Parcel, slot_address: int, after: Any = None) -> Ticket:
        for slot, piece, length in self._pieces(tables, parcel, slot_address):
            ctypes.memmove(slot, piece, length)
        return Ticket(None)

    def scatter(self, tables: Any, parcel: Parcel, slot_address: int) -> Ticket:
        for slot, piece, length in self._pieces(tables, parcel, slot_address):
            ctypes.memmove(piece, slot, length)
        return Ticket(None)

    def _pieces(
        self, tables: Any, parcel: Parcel, slot_address: int
    ) -> Iterator[tuple[int, int, int]]:
        side: PackedSide = tables[parcel.segment]
        for index, piece in enumerate(side.addresses(parcel.start, parcel.stop).tolist()):
            yield slot_address + index * side.piece_bytes, piece, side.piece_bytes


MakeCopier = Callable[[Sequence[Region]], Copier]
Segments = Sequence[tuple[PackedSide, PackedSide]]


def sides(example: Example, source: GroupCache, target: GroupCache) -> Segments:
    """Two segments: some layers each, and blocks in an order of their own."""
    rank = Rank(0, 0)
    (only,) = route({rank: (example.source,)}, {rank: (example.target,)})
    plan = plan_mapping(example.source, example.target, only)
    random = np.random.default_rng(2)

    def blocks(geometry: CacheGeometry) -> BlockRun:
        return BlockRun(random.permutation(geometry.num_blocks).astype(np.int64), 0)

    return [
        (
            pack_source(plan, source, blocks(example.source), example.span, layers),
            pack_target(plan, target, blocks(example.target), example.span, layers),
        )
        for layers in (only.layers[:1], only.layers[1:])
    ]


def moved(
    example: Example, make: MakeCopier, memory: HostMemory | GpuMemory
) -> tuple[list[bytes], list[npt.NDArray[np.uint8]]]:
    """Contents of each slot, and the target's memory, after a transfer through two slots."""
    source, buffers = make_cache(example.source, example.source_style)
    random = np.random.default_rng(1)
    for buffer in buffers:
        buffer[:] = random.integers(0, 256, buffer.size, np.uint8)
    source, _kept = memory.place((source, buffers))
    target, arrived = memory.place(make_cache(example.target, example.target_style))
    segments = sides(example, source, target)
    contents = through_slots(
        segments, make(source.regions), make(target.regions), memory, num_slots=2
    )
    return contents, memory.read(arrived)


def through_slots(
    segments: Segments,
    gathering: Copier,
    scattering: Copier,
    memory: HostMemory | GpuMemory,
    num_slots: int,
) -> list[bytes]:
    shapes = [(each.num_pieces, each.piece_bytes) for each, _ in segments]
    # Slots end inside a row, after a number of pieces that is round in no way.
    slot_bytes = max(count // 3 + 5 for count, _ in shapes) * shapes[0][1]
    stride = -(-slot_bytes // 64) * 64
    from_staging = gathering.allocate(num_slots * stride)
    to_staging = scattering.allocate(num_slots * stride)
    from_tables = gathering.load([each for each, _ in segments])
    to_tables = scattering.load([each for _, each in segments])
    contents = []
    for number, parcel in enumerate(parcels(shapes, slot_bytes)):
        behind = number % num_slots * stride
        ticket = gathering.gather(from_tables, parcel, from_staging.address + behind)
        gathering.wait(ticket)
        assert gathering.done(ticket)
        num_bytes = (parcel.stop - parcel.start) * shapes[parcel.segment][1]
        contents.append(memory.read_slot(from_staging.address + behind, num_bytes))
        memory.write_slot(to_staging.address + behind, contents[-1])
        scattering.wait(scattering.scatter(to_tables, parcel, to_staging.address + behind))
    gathering.close()
    scattering.close()
    return contents


def assert_moves_alike(example: Example, make: MakeCopier, memory: HostMemory | GpuMemory) -> None:
    wanted_contents, wanted_memory = moved(example, PlainCopier, HostMemory())
    contents, found_memory = moved(example, make, memory)
    assert contents == wanted_contents
    for found, wanted in zip(found_memory, wanted_memory, strict=True):
        np.testing.assert_array_equal(found, wanted)


# On the host.


@pytest.mark.parametrize("example", examples(), ids=name_of)
def test_the_host_copies_every_example(example: Example) -> None:
    assert_moves_alike(example, HostCopier, HostMemory())


@check
@given(scenarios())
def test_the_host_copies_what_the_addresses_say(scenario: Scenario) -> None:
    source, target = scenario.source, scenario.target
    filled = make_instance(source.geometries, source.style)
    random = np.random.default_rng(1)
    for _, buffers in filled.values():
        for buffer in buffers:
            buffer[:] = random.integers(0, 256, buffer.size, np.uint8)
    wanted, found = (make_instance(target.geometries, target.style) for _ in range(2))
    for each in route(one_group(source.geometries), one_group(target.geometries)):
        from_cache = filled[each.source][0]
        plan = plan_mapping(from_cache.geometry, target.geometries[each.target], each)
        from_side = pack_source(plan, from_cache, source.blocks, scenario.span)
        contents = []
        for instance, make in ((wanted, PlainCopier), (found, HostCopier)):
            cache = instance[each.target][0]
            to_side = pack_target(plan, cache, target.blocks, scenario.span)
            copiers = make(from_cache.regions), make(cache.regions)
            contents.append(through_slots([(from_side, to_side)], *copiers, HostMemory(), 1))
        assert contents[0] == contents[1]
    for rank, (_, buffers) in wanted.items():
        for mine, theirs in zip(found[rank][1], buffers, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@check
@given(st.data())
def test_the_host_copies_pieces_at_odd_places(data: st.DataObject) -> None:
    """Padded blocks and pieces with gaps, which no geometry here has."""
    numbers = st.integers(0, 40)
    memory = np.random.default_rng(1).integers(0, 256, 4000, np.uint8)
    piece_bytes = data.draw(st.integers(1, 40))
    offsets = data.draw(st.lists(numbers, min_size=1, max_size=3))
    units = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1))
    side = PackedSide(
        row_address=memory.ctypes.data + np.array(data.draw(st.lists(numbers, min_size=1))),
        row_block_stride_bytes=np.zeros(0, np.int64),
        piece_offset_bytes=np.array(offsets, np.int64),
        piece_bytes=piece_bytes,
        block_of_unit=np.array([block for block, _ in units], np.int64),
        unit_in_block=np.array([inner for _, inner in units], np.int64),
        unit_stride_bytes=data.draw(numbers),
        memory=MemoryKind.DRAM,
        device_id=0,
    )
    rows = len(side.row_address)
    strides = data.draw(st.lists(numbers, min_size=rows, max_size=rows))
    side = replace(side, row_block_stride_bytes=np.array(strides, np.int64))
    copier = HostCopier([Region(memory.ctypes.data, memory.nbytes, MemoryKind.DRAM, 0)])
    staging = copier.allocate(side.num_bytes)
    copier.gather(copier.load([side]), Parcel(0, 0, side.num_pieces), staging.address)
    found = ctypes.string_at(staging.address, side.num_bytes)
    assert found == b"".join(
        ctypes.string_at(each, piece_bytes) for each in side.addresses(0, side.num_pieces).tolist()
    )


class Event:
    """Work of somebody else's that ends when it is waited for."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._work()


def test_the_host_reads_the_cache_after_the_event() -> None:
    cache, buffers, side = lone_side()
    copier = HostCopier(cache.regions)
    staging = copier.allocate(side.num_bytes)
    tables = copier.load([side])

    def write() -> None:
        for buffer in buffers:
            buffer[:] = 77

    copier.gather(tables, Parcel(0, 0, side.num_pieces), staging.address, after=Event(write))
    assert set(ctypes.string_at(staging.address, side.num_bytes)) == {77}


# What is refused, before anything is touched.


def lone_side(**changes: object) -> tuple[GroupCache, list[Buffer], PackedSide]:
    geometry = geometries(range(4))
    cache, buffers = make_cache(geometry)
    (only,) = route({Rank(0, 0): (geometry,)}, {Rank(0, 0): (geometry,)})
    plan = plan_mapping(geometry, geometry, only)
    blocks = BlockRun(np.array([7, 0, 3], np.int64), 0)
    side = pack_target(plan, cache, blocks, TokenSpan(0, 48))
    return cache, buffers, replace(side, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shift", "message"),
    [
        ({"row": -65}, "found row 0 from"),
        ({"block": np.array([7, 0, 8])}, "found row 0 from"),
        ({"block": np.array([7, 0, -1])}, "found row 0 from"),
        ({"last": 65}, "found row 3 from"),
        ({"device_id": 1}, "expected DRAM on device 0, found DRAM on device 1"),
        ({"memory": MemoryKind.VRAM}, "expected DRAM on device 0, found VRAM on device 0"),
    ],
    ids=str,
)
def test_pieces_outside_the_cache_are_refused(shift: dict[str, Any], message: str) -> None:
    # 64 bytes before and after the blocks belong to the region too.
    cache, _, side = lone_side()
    rows = side.row_address.copy()
    rows[0] += shift.pop("row", 0)
    rows[-1] += shift.pop("last", 0)
    blocks = shift.pop("block", side.block_of_unit)
    wrong = replace(side, row_address=rows, block_of_unit=blocks, **shift)
    copier = HostCopier(cache.regions)
    with pytest.raises(MappingError, match=f"segment 1: .*{message}"):
        copier.load([side, wrong])


def test_pieces_in_the_gap_of_two_regions_are_refused() -> None:
    cache, _, side = lone_side()
    halves = [
        half
        for each in cache.regions
        for half in (
            replace(each, size_bytes=each.size_bytes // 2),
            replace(
                each, address=each.address + each.size_bytes // 2, size_bytes=each.size_bytes // 2
            ),
        )
    ]
    HostCopier(cache.regions).load([side])
    with pytest.raises(MappingError, match="expected pieces in one of the cache's 8 regions"):
        HostCopier(halves).load([side])


@pytest.mark.parametrize(
    "parcel", [Parcel(0, -1, 2), Parcel(0, 2, 2), Parcel(0, 0, 13), Parcel(1, 0, 1)], ids=str
)
def test_parcels_of_no_pieces_are_refused(parcel: Parcel) -> None:
    cache, _, side = lone_side()
    assert side.num_pieces == 12
    copier = HostCopier(cache.regions)
    tables, staging = copier.load([side]), copier.allocate(side.num_bytes)
    for copy in (copier.gather, copier.scatter):
        with pytest.raises(MappingError, match="parcel: "):
            copy(tables, parcel, staging.address)


@pytest.mark.parametrize("shift", [-16, 16, 8], ids=str)
def test_slots_outside_staging_memory_are_refused(shift: int) -> None:
    cache, buffers, side = lone_side()
    before = [buffer.copy() for buffer in buffers]
    copier = HostCopier(cache.regions)
    tables, staging = copier.load([side]), copier.allocate(side.num_bytes)
    parcel = Parcel(0, 0, side.num_pieces)
    for copy in (copier.gather, copier.scatter):
        with pytest.raises(MappingError, match="slot: "):
            copy(tables, parcel, staging.address + shift)
    copier.close()
    copier.close()
    with pytest.raises(MappingError, match="slot: "):
        copier.scatter(tables, parcel, staging.address)
    for buffer, kept in zip(buffers, before, strict=True):
        np.testing.assert_array_equal(buffer, kept)


def test_staging_memory_begins_at_a_page() -> None:
    copier = copier_for(MemoryKind.DRAM, 3, [])
    for num_bytes in (1, 4096, 100_000):
        region = copier.allocate(num_bytes)
        assert region.address % 4096 == 0
        assert (region.size_bytes, region.memory, region.device_id) == (num_bytes, "DRAM", 3)
    copier.close()


# On a GPU, and its kernel without one.


@pytest.mark.slow
def test_without_triton_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvcourier.transport.copying.kernel", None)
    with pytest.raises(ConfigError, match="torch and triton"):
        copier_for(MemoryKind.VRAM, 0, [])


@pytest.mark.parametrize("example", examples(), ids=name_of)
def test_cuts_are_as_coarse_as_all_addresses_allow(example: Example) -> None:
    cuda = pytest.importorskip("kvcourier.transport.copying.cuda")
    source, _source_buffers = make_cache(example.source, example.source_style)
    target, _target_buffers = make_cache(example.target, example.target_style)
    for pair in sides(example, source, target):
        for side in pair:
            cut = cuda.cut_of(side)
            chunk_bytes = cut.word_bytes * cut.chunk_words
            assert chunk_bytes * cut.chunks_per_piece == side.piece_bytes
            addresses = side.addresses(0, side.num_pieces)
            assert not (addresses % cut.word_bytes).any()
            assert not (addresses % cut.alignment).any() and chunk_bytes % cut.alignment == 0
            if side.piece_bytes % 256 == 0 and not (addresses % 16).any():
                warm = {
                    cuda.cut_of(cuda._lone_piece(0, each, 0)) for each in cuda._WARM_PIECE_BYTES
                }
                compiled = {(each.word_bytes, each.chunk_words, each.alignment) for each in warm}
                assert (cut.word_bytes, cut.chunk_words, cut.alignment) in compiled


def test_more_chunks_than_the_kernel_counts_are_refused() -> None:
    cuda = pytest.importorskip("kvcourier.transport.copying.cuda")
    _, _, side = lone_side()
    with pytest.raises(MappingError, match="expected at most 1073741824 chunks"):
        cuda.cut_of(replace(side, piece_bytes=(1 << 31) + 1))


def interpret() -> None:
    """Run every example through the kernel, in triton's interpreter; in a process of its own."""
    import torch

    from kvcourier.transport.copying import kernel
    from kvcourier.transport.copying.cuda import cut_of, table_of

    class Interpreted(HostCopier):
        def load(self, segments: Sequence[PackedSide]) -> LoadedTables:
            return LoadedTables(segments)

        def gather(self, tables: Any, parcel: Parcel, slot: int, after: Any = None) -> Ticket:
            return self._run(tables[parcel.segment], parcel, slot, to_slot=True)

        def scatter(self, tables: Any, parcel: Parcel, slot: int) -> Ticket:
            return self._run(tables[parcel.segment], parcel, slot, to_slot=False)

        def _run(self, side: PackedSide, parcel: Parcel, slot: int, *, to_slot: bool) -> Ticket:
            cut = cut_of(side)
            kernel.start(
                torch.from_numpy(table_of(side)),
                slot,
                range(parcel.start, parcel.stop),
                side.shape[1:],
                word_bytes=cut.word_bytes,
                chunk_words=cut.chunk_words,
                chunks_per_piece=cut.chunks_per_piece,
                alignment=cut.alignment,
                to_slot=to_slot,
            )
            return Ticket(None)

    for example in examples():
        assert_moves_alike(example, Interpreted, HostMemory())
    print("interpreted", len(examples()))


@pytest.mark.slow
def test_the_kernel_copies_every_example_when_interpreted() -> None:
    said = run_interpreted("transport.test_copying", timeout_s=100)
    assert f"interpreted {len(examples())}" in said


@pytest.mark.slow
@pytest.mark.parametrize("example", examples(), ids=name_of)
def test_a_gpu_copies_every_example(example: Example, num_gpus: int) -> None:
    # The last device, while the current one stays the first.
    device = num_gpus - 1

    def make(regions: Sequence[Region]) -> Copier:
        return copier_for(MemoryKind.VRAM, device, regions)

    assert_moves_alike(example, make, GpuMemory(device))


@pytest.mark.slow
def test_a_gpu_reads_the_cache_after_the_event(num_gpus: int) -> None:
    import torch

    device = num_gpus - 1
    memory = GpuMemory(device)
    before, buffers, _ = lone_side()
    cache, there = memory.place((before, buffers))
    (only,) = route({Rank(0, 0): (cache.geometry,)}, {Rank(0, 0): (cache.geometry,)})
    plan = plan_mapping(cache.geometry, cache.geometry, only)
    blocks = BlockRun(np.array([7, 0, 3], np.int64), 0)
    side = pack_source(plan, cache, blocks, TokenSpan(0, 48))
    copier = copier_for(MemoryKind.VRAM, device, cache.regions)
    staging = copier.allocate(side.num_bytes)
    tables = copier.load([side])
    written = torch.cuda.Event()
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        # Long enough for a copy that does not wait to be there first.
        torch.cuda._sleep(100_000_000)
        for buffer in there:
            buffer.fill_(77)
        written.record()
    ticket = copier.gather(tables, Parcel(0, 0, side.num_pieces), staging.address, after=written)
    assert torch.cuda.current_device() == 0
    copier.wait(ticket)
    assert copier.done(ticket)
    assert set(memory.read_slot(staging.address, side.num_bytes)) == {77}
    copier.close()
