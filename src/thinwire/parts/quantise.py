"""b-bit stochastic quantisation: codes 0 .. 2s around zero, packed little-endian into bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.errors import PayloadError


def packed_bytes(numel: int, bits: int) -> int:
    return -(-numel * bits // 8)


def levels(bits: int) -> int:
    """Steps between zero and the norm. One bit has none: its two codes are plus and minus the norm."""
    return 2 ** (bits - 1) - 1


def encode(
    x: torch.Tensor, bits: int, bucket: int, norm: str, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes, one float32 scale per bucket). A bucket with a non-finite entry gets the scale NaN."""
    numel = x.numel()
    rows = -(-numel // bucket)
    v = torch.zeros(rows * bucket, dtype=torch.float32, device=x.device)
    v[:numel] = x
    v = v.view(rows, bucket)
    scales = v.abs().amax(1) if norm == "max" else torch.sqrt((v * v).sum(1))
    scales = torch.where(v.isfinite().all(1), scales, torch.nan)
    # A norm that overflows or underflows float32 cannot be divided by; the bucket is then refused or zero.
    scales = torch.where(scales.isinf(), torch.nan, scales)
    unit = (v / scales[:, None].clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(0.0).clamp_(-1, 1)
    dice = torch.rand(v.shape, generator=rng, device=x.device)
    if bits == 1:
        codes = (dice < (1 + unit) / 2).to(torch.uint8)
    else:
        s = levels(bits)
        codes = (torch.floor(unit * s + dice) + s).clamp_(0, 2 * s).to(torch.uint8)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    return pack(codes.view(-1)[:numel], bits), scales


def decode_mean(
    received: Sequence[Sequence[torch.Tensor]], bits: int, bucket: int, out: torch.Tensor
) -> None:
    """out = mean over ranks of what they quantised, added up in rank order."""
    total = torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
    for packed, scales in received:
        total += decode(packed, scales, bits, bucket, out.numel())
    out.copy_(total.mul_(1.0 / len(received)))


def decode(packed: torch.Tensor, scales: torch.Tensor, bits: int, bucket: int, numel: int) -> torch.Tensor:
    rows = -(-numel // bucket)
    if packed.numel() != packed_bytes(numel, bits) or scales.numel() != rows:
        raise PayloadError(
            f"{packed.numel()} bytes of codes and {scales.numel()} scales do not describe {numel} entries"
        )
    codes = unpack(packed, bits, numel).to(torch.float32)
    s = levels(bits)
    units = codes * 2 - 1 if bits == 1 else (codes - s) / s
    widths = scales.repeat_interleave(bucket)[:numel]
    return units * widths


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Little-endian: the first code in the lowest bits of the first byte."""
    per_byte = 8 // bits
    numel = codes.numel()
    padded = torch.zeros(packed_bytes(numel, bits) * per_byte, dtype=torch.uint8, device=codes.device)
    padded[:numel] = codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (padded.view(-1, per_byte) << shifts).sum(1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & (2**bits - 1)).view(-1)[:numel]
