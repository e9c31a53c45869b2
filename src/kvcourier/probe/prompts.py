"""Prompts of random numbers with a wanted number of tokens.

Decides how many numbers make so many tokens, from what the server counted. Refuses to know any
tokenizer, and how a prompt is sent. Random numbers keep prefix caches from having seen a prompt.
"""

import random

_LOWEST, _HIGHEST = 100, 999


def number_prompt(generator: random.Random, num_numbers: int) -> str:
    """So many random three-digit numbers, with a space between them."""
    return " ".join(str(generator.randint(_LOWEST, _HIGHEST)) for _ in range(num_numbers))


def first_guess(num_tokens: int) -> int:
    """Numbers to try first: tokenizers make one to four tokens of " 123"."""
    return max(1, num_tokens // 2)


def better_guess(num_numbers: int, counted_tokens: int, wanted_tokens: int) -> int:
    """Numbers for `wanted_tokens`, where `num_numbers` made `counted_tokens`."""
    return max(1, round(num_numbers * wanted_tokens / max(1, counted_tokens)))
