"""Random rotation in plain torch."""

import math

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.generator import SPLIT_STEP, words

SECOND_WIDTH = 512
"""The second round stirs shorter stretches: sums of so many signed numbers are normal enough, and cheaper."""


def round_seeds(seed: int) -> tuple[int, int]:
    return seed, seed + SPLIT_STEP


def round_widths(block: int) -> tuple[int, int]:
    """The entries that are transformed together."""
    return block, min(block, SECOND_WIDTH)


def scale_of(width: int) -> float:
    """What normalises a transform, in float32."""
    return float(np.float32(1 / math.sqrt(width)))


def rotate(x: Tensor, seed: int, block: int, out: Tensor) -> None:
    out.copy_(x)
    for number, blocks in _blocks(out, block):
        for key, width in zip(round_seeds(seed), round_widths(block), strict=True):
            blocks.mul_(_signs(key, number, blocks) * scale_of(width))
            hadamard(blocks, width)


def rotate_back(x: Tensor, seed: int, block: int, out: Tensor) -> None:
    out.copy_(x)
    first, second = round_seeds(seed)
    longer, shorter = round_widths(block)
    scale = scale_of(longer) * scale_of(shorter)
    for number, blocks in reversed(_blocks(out, block)):
        hadamard(blocks, shorter)
        blocks.mul_(_signs(second, number, blocks) * scale)
        hadamard(blocks, longer)
        blocks.mul_(_signs(first, number, blocks))


def _blocks(x: Tensor, block: int) -> list[tuple[int, Tensor]]:
    """Views, in the order of `rotate`: the block that ends with x, and the regular ones; with its number."""
    n = x.numel()
    whole = n // block
    last = [(whole, x[n - block :].view(1, block))] if n % block else []
    return [*last, (0, x[: whole * block].view(whole, block))]


def _signs(seed: int, number: int, blocks: Tensor) -> Tensor:
    """One bit per entry of these blocks, the first of which has this number; 1 is minus."""
    count, block = blocks.shape
    total = (number + count) * block
    found = words(seed, -(-total // 32), blocks.device)
    bits = (found[:, None] >> torch.arange(32, device=blocks.device)) & 1
    return 1.0 - 2.0 * bits.flatten()[number * block : total].view(count, block).float()


def hadamard(blocks: Tensor, width: int) -> None:
    """H of every `width` entries, in place: sums and differences of entries that are `half` apart.

    H[r, c] = (-1)^(bits set in r & c), so H H = width x identity.
    """
    half = 1
    while half < width:
        pairs = blocks.view(-1, 2, half)
        low, high = pairs[:, 0].clone(), pairs[:, 1]
        pairs[:, 0] += high
        torch.sub(low, high, out=high)
        half *= 2
