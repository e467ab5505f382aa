"""The counter-based generator that all backends share, in Python integers and in torch.

One 32-bit word per element from (seed, position): no state, so a result depends neither on the number of
threads nor on how a tensor is cut, and a step can be replayed. The mixer is `lowbias32`, keyed twice.
"""

import torch
from torch import Tensor

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


def words(seed: int | Tensor, numel: int, device: torch.device) -> Tensor:
    """One 32-bit word per position, as int64, since torch has little unsigned arithmetic.

    The keys of a seed in an int64 tensor of two do as well: code that is compiled takes them as data.
    """
    key_a, key_b = keys(seed) if isinstance(seed, int) else (seed[0], seed[1])
    h = (torch.arange(numel, dtype=torch.int64, device=device) + key_a) & MASK32
    h ^= h >> 16
    h = (h * MIX_A) & MASK32
    h ^= (h >> 15) ^ key_b
    h = (h * MIX_B) & MASK32
    return h ^ (h >> 16)


def one_to_two(seed: int | Tensor, numel: int, device: torch.device) -> Tensor:
    """Uniform 16-bit steps in [1, 2), two from each word."""
    pairs = words(seed, (numel + 1) // 2, device)
    halves = torch.stack((pairs & 0xFFFF, pairs >> 16), dim=1).flatten()[:numel]
    return 1.0 + halves.float() * 2.0**-16


def mix64_tensor(value: Tensor) -> Tensor:
    """`mix64` of int64 bit patterns."""
    value = (value ^ _shift(value, 30)) * _signed(SPLIT_A)
    value = (value ^ _shift(value, 27)) * _signed(SPLIT_B)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, by: int) -> Tensor:
    return (value >> by) & (MASK64 >> by)


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant
