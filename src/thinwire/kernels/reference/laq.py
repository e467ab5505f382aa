"""LAQ's deterministic quantiser in plain torch."""

import math

import torch
from torch import Tensor

from thinwire.kernels.reference.quantisation import pack, unpack

# Below this codes are divided by the step: its inverse might overflow.
TINY_STEP = 2.0**-100


def laq_quantise(grad: Tensor, last: Tensor, bits: int, update: bool) -> tuple[Tensor, float]:
    difference = grad.float() - last
    radius = float(difference.abs().max()) if difference.numel() else 0.0
    if radius == 0.0 or not math.isfinite(radius):
        codes = torch.zeros(last.numel(), dtype=torch.uint8, device=last.device)
        return pack(codes, bits), radius if radius == 0.0 else math.nan
    top = 2**bits - 1
    r = torch.tensor(radius, dtype=torch.float32, device=last.device)
    step = grid_step(r, bits)
    level = (difference + r) * (1.0 / step) if float(step) > TINY_STEP else (difference + r) / step
    codes = (level + 0.5).floor().clamp(0, top)
    packed = pack(codes.nan_to_num(top).to(torch.uint8), bits)
    if update:
        laq_apply(last, packed, radius, bits)
    return packed, radius


def laq_apply(last: Tensor, packed: Tensor, radius: float, bits: int) -> None:
    if radius == 0.0:
        return
    r = torch.tensor(radius, dtype=torch.float32, device=last.device)
    codes = unpack(packed, bits, last.numel()).float()
    last += codes * grid_step(r, bits) - r


def laq_norms(grad: Tensor, last: Tensor, packed: Tensor, radius: float, bits: int) -> tuple[float, float]:
    updated = last.clone()
    laq_apply(updated, packed, radius, bits)
    innovation = float((updated - last).double().square().sum())
    return innovation, float((grad.float() - updated).double().square().sum())


def grid_step(radius: Tensor, bits: int) -> Tensor:
    """2 tau R, formed without overflow."""
    return 2.0 * (radius / float(2**bits - 1))
