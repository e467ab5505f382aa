"""Checks that stand between callers (or the wire) and kernels that do not check bounds themselves."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import PayloadError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BIT_WIDTHS = (1, 2, 4, 8)
MAX_NUMEL = 2**31 - 1


def flat_float(name: str, x: Tensor) -> None:
    """`x` is a flat contiguous tensor of a supported float type, short enough for int32 indices."""
    _flat(name, x)
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, not {x.dtype}")


def flat_float32(name: str, x: Tensor) -> None:
    _flat(name, x)
    if x.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, not {x.dtype}")


def flat_any_float(name: str, x: Tensor) -> None:
    """`flat_float` that takes float64 as well, which the reference alone can read."""
    _flat(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name} must hold floating-point numbers, not {x.dtype}")


def same_size(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.numel() != other.numel():
        raise ValueError(f"{name} has {x.numel()} entries but {other_name} has {other.numel()}")
    if x.device != other.device:
        raise ValueError(f"{name} is on {x.device} but {other_name} is on {other.device}")


def residual_and_grad(residual: Tensor, grad: Tensor, undo: Tensor | None = None) -> None:
    """What error feedback works on: the residual (and where to keep the old one) float32, all of one size."""
    flat_float32("residual", residual)
    flat_float("grad", grad)
    same_size("residual", residual, "grad", grad)
    if undo is not None:
        flat_float32("undo", undo)
        same_size("residual", residual, "undo", undo)


def output(out: Tensor, numel: int) -> None:
    flat_float("out", out)
    if out.numel() != numel:
        raise ValueError(f"out has {out.numel()} entries, expected {numel}")


def bit_width(bits: int) -> None:
    if bits not in BIT_WIDTHS:
        raise ValueError(f"bits must be one of {BIT_WIDTHS}, not {bits}")


def any_bit_width(bits: int) -> None:
    if bits not in range(1, 9):
        raise ValueError(f"bits must be 1 to 8, not {bits}")


def count(k: int, numel: int) -> int:
    """How many entries to select: negative is an error, more than there are means all."""
    if k < 0:
        raise ValueError(f"k must not be negative, got {k}")
    return min(k, numel)


def packed_length(bits: int, numel: int) -> int:
    return (bits * numel + 7) // 8


def packed(payload: Tensor, expected: int) -> None:
    """A received byte string has exactly the length that its element count implies."""
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise PayloadError(f"a packed payload must be flat contiguous uint8, got {payload.dtype}")
    if payload.numel() != expected:
        raise PayloadError(f"a packed payload has {payload.numel()} bytes, expected {expected}")


def scales(payload: Tensor, expected: int) -> None:
    if payload.dtype != torch.float32 or payload.dim() != 1 or not payload.is_contiguous():
        raise PayloadError(f"scales must be flat contiguous float32, got {payload.dtype}")
    if payload.numel() != expected:
        raise PayloadError(f"a payload has {payload.numel()} scales, expected {expected}")


def workers(*lists: Sequence[object]) -> int:
    """The number of workers: at least one, and the same in every list."""
    sizes = {len(items) for items in lists}
    if len(sizes) != 1 or 0 in sizes:
        raise PayloadError(f"payload lists must be non-empty and equally long, got lengths {sorted(sizes)}")
    return sizes.pop()


def _flat(name: str, x: Tensor) -> None:
    if x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"{name} must be flat and contiguous, got shape {tuple(x.shape)}")
    if x.numel() > MAX_NUMEL:
        raise ValueError(f"{name} has {x.numel()} entries; int32 indices allow at most {MAX_NUMEL}")
