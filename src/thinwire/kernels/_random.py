"""The counter-based generator that the reference and the CPU kernels share.

One 32-bit word per element from (seed, position): no state, so a result depends neither on the number of
threads nor on how a tensor is cut, and a step can be replayed. The mixer is `lowbias32`, keyed twice.
"""

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF

MIX_A = 0x7FEB352D
MIX_B = 0x846CA68B

SPLIT_A = 0xBF58476D1CE4E5B9
SPLIT_B = 0x94D049BB133111EB
SPLIT_STEP = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """The splitmix64 finaliser."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * SPLIT_A) & MASK64
    value = ((value ^ (value >> 27)) * SPLIT_B) & MASK64
    return value ^ (value >> 31)


def keys(seed: int) -> tuple[int, int]:
    """Two independent 32-bit keys from a 64-bit seed."""
    mixed = mix64(seed + SPLIT_STEP)
    return mixed & MASK32, mixed >> 32
