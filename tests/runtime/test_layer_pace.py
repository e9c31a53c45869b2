"""After which layers a part is sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.layout import instance_geometries
from kvcourier.runtime.layer_pace import MOST_PARTS, LayerPace
from layout_builders import model_cache


def make_pace(num_layers: int, least_bytes: int) -> tuple[LayerPace, int]:
    """A pace, and the bytes of one token in one layer."""
    (geometry,) = instance_geometries(model_cache(num_layers=num_layers), 1).values()
    token_bytes = geometry.cell_bytes * geometry.num_heads * 2
    return LayerPace((geometry,), least_bytes), token_bytes


@given(
    num_layers=st.integers(1, 80), num_tokens=st.integers(1, 40_000), least=st.integers(1, 1 << 28)
)
def test_parts_are_few_large_and_lose_no_layer(num_layers, num_tokens, least) -> None:
    pace, token_bytes = make_pace(num_layers, least)
    for _ in range(2):
        pace.begin()
        parts = [pace.after(layer, [1, num_tokens]) for layer in range(num_layers)]
        told = [layer for part in parts for layer in part]
        assert told == list(range(len(told)))
        sizes = [len(part) for part in parts if part]
        assert len(sizes) <= MOST_PARTS
        assert all(size * num_tokens * token_bytes >= least for size in sizes)
        # What is left over is less than a part; the end of the step tells of it.
        stride = sizes[0] if sizes else num_layers
        assert num_layers - len(told) < stride or not sizes


@pytest.mark.parametrize(("num_tokens", "num_parts"), [(16_000, 7), (2_000, 0)])
def test_a_long_prompt_goes_in_parts_and_a_short_one_does_not(num_tokens, num_parts) -> None:
    token_bytes = make_pace(28, 1)[1]
    pace, _ = make_pace(28, 16_000 * 4 * token_bytes)
    parts = [pace.after(layer, [num_tokens]) for layer in range(28)]
    assert sum(map(bool, parts)) == num_parts
