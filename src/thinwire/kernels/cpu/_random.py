"""The shared counter-based generator, one word at a time and in 32-bit arithmetic, so that it vectorises."""

import numpy as np

from thinwire.kernels.cpu._jit import U32, kernel
from thinwire.kernels.cpu._simd import float_of
from thinwire.kernels.generator import MASK32, MIX_A, MIX_B, SPLIT_A, SPLIT_B, keys

_MIX_A = np.uint32(MIX_A)
_MIX_B = np.uint32(MIX_B)
_BITS_OF_ONE = np.int32(0x3F800000)
_SPLIT_A = np.uint64(SPLIT_A)
_SPLIT_B = np.uint64(SPLIT_B)


@kernel
def word(counter: np.uint32, key: np.uint32) -> np.uint32:
    """The word of position p is word(p + first key, second key)."""
    h = np.uint32(counter ^ (counter >> np.uint32(16)))
    h = np.uint32(h * _MIX_A)
    h = np.uint32(h ^ (h >> np.uint32(15)) ^ key)
    h = np.uint32(h * _MIX_B)
    return np.uint32(h ^ (h >> np.uint32(16)))


@kernel
def fill_words(counter: np.uint32, key: np.uint32, words: U32) -> None:
    """Consecutive words; as 16-bit halves they serve twice as many entries."""
    for j in range(len(words)):
        words[j] = word(np.uint32(counter + np.uint32(j)), key)


@kernel
def one_to_two(half: np.uint16) -> np.float32:
    """1 + half / 2^16, by setting the bits of the fraction."""
    return float_of(np.int32(_BITS_OF_ONE | (np.int32(half) << 7)))


@kernel
def mix64(value: np.uint64) -> np.uint64:
    """The splitmix64 finaliser."""
    value = (value ^ (value >> np.uint64(30))) * _SPLIT_A
    value = (value ^ (value >> np.uint64(27))) * _SPLIT_B
    return value ^ (value >> np.uint64(31))


def counters(seed: int, position: int) -> tuple[np.uint32, np.uint32]:
    """What `word` takes for the entry at `position`: the counter to start from, and the second key."""
    key_a, key_b = keys(seed)
    return np.uint32((key_a + position) & MASK32), np.uint32(key_b)
