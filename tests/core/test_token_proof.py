"""Digests that show how far two token sequences are the same."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.core.token_proof import (
    DIGEST_BYTES,
    LEAST_STEP,
    MAX_DIGESTS,
    TokenProof,
    is_proof_text,
    prove,
)

TOKENS = st.lists(st.integers(0, 2**31), max_size=200)


@given(TOKENS, TOKENS)
def test_a_sequence_and_all_that_begin_with_it_are_proven(tokens: list[int], more: list[int]):
    proof = prove(tokens)
    assert is_proof_text(proof.text)
    assert proof.num_tokens == len(tokens) // LEAST_STEP * LEAST_STEP
    assert proof.num_proven(tokens) == proof.num_proven(tokens + more) == proof.num_tokens


@given(st.lists(st.integers(0, 100), min_size=1, max_size=200), st.data())
def test_nothing_from_the_first_difference_on_is_proven(tokens: list[int], data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    proven = prove(tokens).num_proven(other)
    assert proven == min(at, prove(tokens).num_tokens) // LEAST_STEP * LEAST_STEP
    assert prove(tokens).num_proven(tokens[:at]) == at // LEAST_STEP * LEAST_STEP


@pytest.mark.parametrize("num_tokens", [0, 15, 16, 8192, 8193, 8208, 100_000])
def test_a_proof_stays_short(num_tokens: int):
    tokens = list(range(num_tokens))
    proof = prove(tokens)
    num_digests = len(base64.b64decode(proof.text)) // DIGEST_BYTES
    assert num_digests <= MAX_DIGESTS and is_proof_text(proof.text)
    assert num_tokens - proof.step < proof.num_tokens <= num_tokens
    assert proof.num_proven(tokens) == proof.num_tokens
    assert num_digests >= MAX_DIGESTS // 2 or proof.step == LEAST_STEP


def test_the_salt_is_part_of_it():
    tokens = list(range(40))
    assert prove(tokens, "a").num_proven(tokens, "b") == 0
    assert prove(tokens, "a").num_proven(tokens, "a") == 32
    assert prove(tokens).num_proven(tokens, "a") == 0


def test_digests_of_another_step_prove_nothing():
    tokens = list(range(64))
    proof = prove(tokens)
    assert TokenProof(2 * proof.step, proof.text).num_proven(tokens) == 0


@pytest.mark.parametrize("text", ["x", "====", "A" * 22, "é", base64.b64encode(b"x" * 16 * 513)])
def test_what_is_no_proof(text):
    assert not is_proof_text(text if isinstance(text, str) else text.decode())
