"""Starting a program for every tile of a tensor.

Products and sums are never fused into one rounding: results have the bits of the reference. The interpreter
(TRITON_INTERPRET=1 before the first import) runs the same programs on CPU tensors, one after the other.
"""

from typing import Any, cast

import torch
from torch import Tensor

TILE = 1024
"""The entries of a program; a power of two."""

Argument = Tensor | int | None


def launch(program: Any, count: int, *arguments: Argument, **constants: int) -> None:
    """Run `count` programs; nothing happens for none."""
    if count:
        program[(count,)](*arguments, **constants, enable_fp_fusion=False)


def over(n: int) -> int:
    """The programs for n entries."""
    return -(-n // TILE)


def launch_tiles(program: Any, n: int, *arguments: Argument, **constants: int) -> None:
    """One program for every tile of n entries."""
    launch(program, over(n), *arguments, **constants, BLOCK=TILE)


def int32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


def int32_full(like: Tensor, value: int, size: int = 1) -> Tensor:
    """One number on the device, or many: filled there, since a copy would make the host wait."""
    return torch.full((size,), value, dtype=torch.int32, device=like.device)


def on_host(x: Tensor) -> list[int]:
    """The numbers of a small tensor: the host waits for the device."""
    return cast("list[int]", x.tolist())


def signed32(word: int) -> int:
    """The bits of a 32-bit word as the integer that every launch passes with the same type."""
    return word - 2**32 if word >= 2**31 else word
