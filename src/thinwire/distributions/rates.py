"""Minimax rates, up to constants: what no protocol can beat by more than a constant."""

from __future__ import annotations

import math


def minimax_l2(domain: int, bits: int, n: int) -> float:
    """The squared l2 error with n players of one sample and `bits` bits: domain / (n 2^bits), or 1 / n."""
    return max(domain / (n * 2.0**bits), 1.0 / n)


def minimax_l1(domain: int, bits: int, n: int) -> float:
    """The l1 error: domain / sqrt(n 2^bits), or sqrt(domain / n)."""
    return max(domain / math.sqrt(n * 2.0**bits), math.sqrt(domain / n))


def bit_factor(bits: int) -> float:
    """By what one bit more divides the squared l2 error of grouping, until the floor of 1 / n."""
    return (2.0 ** (bits + 1) - 1.0) / (2.0**bits - 1.0)
