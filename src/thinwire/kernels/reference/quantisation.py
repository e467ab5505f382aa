"""Stochastic b-bit quantisation in plain torch, and the grid: how codes, scales and values relate."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from thinwire.kernels.generator import one_to_two

NORMS = ("max", "l2")

# Below this scale s / scale could overflow, so values are first multiplied by a power of two.
TINY_SCALE = 2.0**-64
TINY_BOOST = 2.0**80
LARGEST = torch.finfo(torch.float32).max

# Rounding adds 1 + r / 2^16, r being 16 random bits, to y + s - 1 and cuts the fraction off. For integer y
# that is exact in float32, so levels (and zeros) stay what they are. Half a unit of r centres the rounding;
# 8-bit codes have no bit of precision left for it, and are centred by the rounding of y + s - 1 itself.
CENTRE = 2.0**-17


def shift(bits: int) -> float:
    """What the rounding adds to a scaled value before its random part."""
    return levels(bits) - 1.0 + (CENTRE if bits < 8 else 0.0)


def levels(bits: int) -> int:
    """The largest magnitude of a centred code: value = (code - levels) * scale / levels; one bit has none."""
    return 2 ** (bits - 1) - 1 if bits > 1 else 1


def buckets(numel: int, bucket: int) -> int:
    return (numel + bucket - 1) // bucket


def quantise(x: Tensor, bits: int, bucket: int, norm: str, seed: int) -> tuple[Tensor, Tensor]:
    scales = bucket_scales(x, bucket, norm)
    return pack(encode(x, scales, bits, bucket, seed), bits), scales


def bucket_scales(x: Tensor, bucket: int, norm: str) -> Tensor:
    n = x.numel()
    count = buckets(n, bucket)
    if count == 0:
        return torch.empty(0, dtype=torch.float32, device=x.device)
    padded = torch.zeros(count * bucket, dtype=torch.float32, device=x.device)
    padded[:n] = x
    rows = padded.view(count, bucket)
    finite = torch.isfinite(rows).all(dim=1)
    if norm == "max":
        scales = rows.abs().amax(dim=1)
    else:
        scales = rows.double().square().sum(dim=1).sqrt().clamp(max=LARGEST).float()
    return torch.where(finite, scales, torch.full_like(scales, torch.nan))


def encode(x: Tensor, scales: Tensor, bits: int, bucket: int, seed: int | Tensor) -> Tensor:
    """Codes 0..2s (b > 1) or 0..1 (b = 1), one byte each."""
    n = x.numel()
    s = levels(bits)
    boost = torch.where(scales < TINY_SCALE, TINY_BOOST, 1.0).float()
    inverse = s / (scales * boost)
    # Rounded so that no entry leaves the grid: scale times it is at most s.
    inverse = torch.where(
        scales * boost * inverse > s, torch.nextafter(inverse, torch.zeros_like(inverse)), inverse
    )
    usable = scales > 0  # false for zero and for NaN: those buckets send the middle code
    boost = torch.where(usable, boost, 1.0)
    inverse = torch.where(usable, inverse, 0.0)
    where = torch.arange(n, device=x.device) // bucket
    values = torch.where(usable[where], x.float(), 0.0)
    y = ((values * boost[where]) * inverse[where]).clamp(-s, s)
    r = one_to_two(seed, n, x.device)
    if bits == 1:
        return (r < (y + 1.0) * 0.5 + (1.0 - CENTRE)).to(torch.uint8)
    return ((y + shift(bits)) + r).to(torch.uint8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of 1 to 8 bits one after the other, the first in the lowest bits of the first byte."""
    if bits == 8:
        return codes
    if 8 % bits:
        places = torch.arange(bits, device=codes.device)
        return pack(((codes[:, None] >> places) & 1).flatten(), 1)
    per_byte = 8 // bits
    padded = torch.zeros(-(-codes.numel() // per_byte) * per_byte, dtype=torch.uint8, device=codes.device)
    padded[: codes.numel()] = codes
    columns = padded.view(-1, per_byte)
    packed = torch.zeros(columns.shape[0], dtype=torch.uint8, device=codes.device)
    for j in range(per_byte):
        packed |= columns[:, j] << (bits * j)
    return packed


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    if bits == 8:
        return packed[:numel]
    if 8 % bits:
        places = torch.arange(bits, device=packed.device)
        return (unpack(packed, 1, bits * numel).view(numel, bits) << places).sum(1).to(torch.uint8)
    mask = 2**bits - 1
    columns = [(packed >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(columns, dim=1).flatten()[:numel]


def dequantise_mean(
    packed: Sequence[Tensor], scales: Sequence[Tensor], bits: int, bucket: int, numel: int, out: Tensor
) -> None:
    sent = zip(packed, scales, strict=True)
    mean_into(out, (decode(codes, scale, bits, bucket, numel) for codes, scale in sent), len(packed))


def mean_into(out: Tensor, parts: Iterable[Tensor], workers: int) -> None:
    """out = the mean, summed in order; one worker's part keeps its bits, even the sign of a zero."""
    total = torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
    for part in parts:
        total = total + part if workers > 1 else part
    out.copy_(total / workers)


def decode(packed: Tensor, scales: Tensor, bits: int, bucket: int, numel: int) -> Tensor:
    codes = unpack(packed, bits, numel).float()
    where = torch.arange(numel, device=packed.device) // bucket
    centred = codes * 2.0 - 1.0 if bits == 1 else codes - levels(bits)
    return centred * (scales / levels(bits))[where]
