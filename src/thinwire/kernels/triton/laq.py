"""LAQ's deterministic quantiser on a GPU. The host waits once, for the radius or the norms."""

from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor

from thinwire.kernels.reference import laq as reference
from thinwire.kernels.reference.laq import TINY_STEP
from thinwire.kernels.reference.quantisation import pack, unpack
from thinwire.kernels.triton._compiled import compiled, number


def laq_quantise(grad: Tensor, last: Tensor, bits: int, update: bool) -> tuple[Tensor, float]:
    if last.numel() == 0:
        return reference.laq_quantise(grad, last, bits, update)
    packed, radius = _quantise(bits, update)(grad, last, number(last, 2**bits - 1))
    return packed, float(radius)


def laq_apply(last: Tensor, packed: Tensor, radius: float, bits: int) -> None:
    if last.numel() and radius != 0.0:
        _apply(bits)(last, packed, number(last, radius), number(last, 2**bits - 1))


def laq_norms(grad: Tensor, last: Tensor, packed: Tensor, radius: float, bits: int) -> tuple[float, float]:
    if last.numel() == 0:
        return 0.0, 0.0
    r, top = number(last, radius), number(last, 2**bits - 1)
    norms = cast("list[float]", _norms(bits)(grad, last, packed, r, top).tolist())
    return norms[0], norms[1]


def _moved(last: Tensor, codes: Tensor, radius: Tensor, top: Tensor) -> Tensor:
    """As in the reference, where a radius of zero moves nothing."""
    return torch.where(radius == 0.0, last, last + (codes * (2.0 * (radius / top)) - radius))


@cache
def _quantise(bits: int, update: bool) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    @compiled
    def steps(grad: Tensor, last: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        difference = grad.float() - last
        radius = difference.abs().max()
        good = radius.isfinite() & (radius != 0.0)
        step = 2.0 * (radius / top)
        level = torch.where(
            step > TINY_STEP, (difference + radius) * (1.0 / step), (difference + radius) / step
        )
        codes = (level + 0.5).floor().clamp(0, 2**bits - 1).nan_to_num(2**bits - 1)
        codes = torch.where(good, codes, 0.0)
        if update:
            last.copy_(torch.where(good, _moved(last, codes, radius, top), last))
        return pack(codes.to(torch.uint8), bits), torch.where(radius.isfinite(), radius, torch.nan)

    return steps


@cache
def _apply(bits: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    @compiled
    def steps(last: Tensor, packed: Tensor, radius: Tensor, top: Tensor) -> None:
        last.copy_(_moved(last, unpack(packed, bits, last.numel()).float(), radius, top))

    return steps


@cache
def _norms(bits: int) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    @compiled
    def steps(grad: Tensor, last: Tensor, packed: Tensor, radius: Tensor, top: Tensor) -> Tensor:
        moved = _moved(last, unpack(packed, bits, last.numel()).float(), radius, top)
        innovation = (moved - last).double().square().sum()
        return torch.stack((innovation, (grad.float() - moved).double().square().sum()))

    return steps
