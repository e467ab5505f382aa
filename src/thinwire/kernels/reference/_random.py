"""The shared generator in torch: 32-bit words held in int64, since torch has little unsigned arithmetic."""

import torch
from torch import Tensor

from thinwire.kernels._random import MASK32, MASK64, MIX_A, MIX_B, SPLIT_A, SPLIT_B, keys


def words(seed: int, numel: int, device: torch.device) -> Tensor:
    """One 32-bit word per position, as int64."""
    key_a, key_b = keys(seed)
    h = (torch.arange(numel, dtype=torch.int64, device=device) + key_a) & MASK32
    h ^= h >> 16
    h = (h * MIX_A) & MASK32
    h ^= (h >> 15) ^ key_b
    h = (h * MIX_B) & MASK32
    return h ^ (h >> 16)


def one_to_two(seed: int, numel: int, device: torch.device) -> Tensor:
    """Uniform 16-bit steps in [1, 2), two from each word."""
    pairs = words(seed, (numel + 1) // 2, device)
    halves = torch.stack((pairs & 0xFFFF, pairs >> 16), dim=1).flatten()[:numel]
    return 1.0 + halves.float() * 2.0**-16


def mix64(value: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 bit patterns."""
    value = (value ^ _shift(value, 30)) * _signed(SPLIT_A)
    value = (value ^ _shift(value, 27)) * _signed(SPLIT_B)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, by: int) -> Tensor:
    return (value >> by) & (MASK64 >> by)


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant
