"""Coverage against a grid with one boolean per layer and token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.core.coverage import Coverage
from kvcourier.layout import TokenSpan

LAYERS = (0, 3, 4, 9)


@st.composite
def tiles(draw):
    """A tile that may lie outside, be empty, upside down or of foreign layers."""
    start = draw(st.integers(0, 22))
    span = TokenSpan(start, start + draw(st.integers(-1, 12)))
    layers = draw(
        st.none()
        | st.lists(st.sampled_from(LAYERS), max_size=5)
        | st.lists(st.sampled_from([*LAYERS, 7]), min_size=1, max_size=3)
    )
    return span, layers


@pytest.mark.slow
@given(start=st.integers(0, 6), length=st.integers(1, 14), landed=st.lists(tiles(), max_size=14))
def test_any_tiles_in_any_order(start, length, landed):
    stop = start + length
    coverage = Coverage(LAYERS, TokenSpan(start, stop))
    missing = {(layer, token) for layer in LAYERS for token in range(start, stop)}
    for span, layers in landed:
        named = set(LAYERS if layers is None else layers)
        inside = start <= span.start < span.stop <= stop and named <= set(LAYERS)
        assert coverage.land(span, layers) is inside
        if inside:
            missing -= {(layer, t) for layer in named for t in range(span.start, span.stop)}
        assert coverage.complete is (not missing)


@pytest.mark.slow
@given(
    length=st.integers(1, 12),
    order=st.randoms(use_true_random=False),
)
def test_complete_with_the_last_cell_and_not_before(length, order):
    coverage = Coverage(LAYERS, TokenSpan(0, length))
    cells = [(layer, token) for layer in LAYERS for token in range(length)]
    order.shuffle(cells)
    for layer, token in cells:
        assert not coverage.complete
        assert coverage.land(TokenSpan(token, token + 1), [layer])
    assert coverage.complete


def test_a_duplicate_counts_once():
    coverage = Coverage([0, 1], TokenSpan(0, 32))
    assert coverage.land(TokenSpan(0, 16))
    assert coverage.land(TokenSpan(0, 16))
    assert not coverage.complete
    assert coverage.land(TokenSpan(16, 32))
    assert coverage.complete
    assert coverage.land(TokenSpan(16, 32)), "a repeated tile is expected, only not needed"


@pytest.mark.parametrize(
    ("span", "layers"),
    [
        (TokenSpan(0, 33), None),
        (TokenSpan(15, 32), None),
        (TokenSpan(20, 20), None),
        (TokenSpan(24, 20), None),
        (TokenSpan(16, 32), [0, 2]),
    ],
)
def test_a_foreign_tile_changes_nothing(span, layers):
    coverage = Coverage([0, 1], TokenSpan(16, 32))
    assert not coverage.land(span, layers)
    assert coverage.land(TokenSpan(16, 32))
    assert coverage.complete


def test_nothing_expected_is_complete():
    assert Coverage([], TokenSpan(0, 16)).complete
    empty = Coverage([0, 1], TokenSpan(16, 16))
    assert empty.complete
    assert not empty.land(TokenSpan(16, 17))
