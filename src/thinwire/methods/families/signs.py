"""Codes of signs: with mean magnitudes, as votes, and those of a rotated tensor with a scale per block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch

from thinwire import kernels
from thinwire.methods.families.quantised import Parts


def signs_of(v: torch.Tensor, bucket: int | None, bits: int = 1) -> list[torch.Tensor]:
    """sign(v), packed, and ||v||_1 / n, of every bucket if there are some; the same of what is left, ..."""
    parts = _signs_of(v, bucket)
    for _ in range(1, bits):
        coded = torch.empty(v.numel(), device=v.device)
        signs_mean([parts], bucket, coded)
        parts += _signs_of(v - coded, bucket)
    return parts


def signs_mean(received: Sequence[Parts], bucket: int | None, out: torch.Tensor) -> None:
    """The mean of what `signs_of` has made, of any number of bits."""
    _signs_mean([parts[:2] for parts in received], bucket, out)
    for bit in range(2, len(received[0]), 2):
        more = torch.empty_like(out)
        _signs_mean([parts[bit : bit + 2] for parts in received], bucket, more)
        out += more


def _signs_of(v: torch.Tensor, bucket: int | None) -> list[torch.Tensor]:
    if bucket is not None:
        return list(kernels.sign_pack_means(v, bucket))
    bits, magnitude = kernels.sign_pack_mean(v)
    return [bits, magnitude.float()]


def _signs_mean(received: Sequence[Parts], bucket: int | None, out: torch.Tensor) -> None:
    codes, magnitudes = [bits for bits, _ in received], [each for _, each in received]
    if bucket is None:
        kernels.sign_mean(codes, magnitudes, out.numel(), out)
    else:
        kernels.sign_means(codes, magnitudes, bucket, out.numel(), out)


def ballot(v: torch.Tensor, seed: int, scale: str | None) -> list[torch.Tensor]:
    """The votes and the magnitude: 0 for a tensor of zeros, non-finite for a non-finite tensor."""
    if seed % 2:
        bits, magnitude = kernels.sign_pack_mean(v)
    else:  # -v >= 0 where v <= 0: zeros now vote for -
        bits, magnitude = kernels.sign_pack_mean(-v)
        bits = ~bits
    if scale != "mean":
        other = torch.ones_like(magnitude) if scale is None else _rms(v, magnitude)
        magnitude = torch.where((magnitude > 0) & (magnitude < torch.inf), other, magnitude)
    return [bits, magnitude.float()]


def ballots_mean(received: Sequence[Parts], out: torch.Tensor) -> None:
    kernels.sign_mean([bits for bits, _ in received], [each for _, each in received], out.numel(), out)


def ballot_bytes(n: int) -> int:
    return -(-n // 8) + 4


def magnitude_of(told: torch.Tensor, scale: str | None) -> torch.Tensor:
    """The magnitude of a vote's result, from those of the ranks: a tensor with one entry."""
    mean = told.double().cumsum(0)[-1:] / told.numel()  # one after the other, so that all ranks agree
    found = torch.where(mean.isfinite(), told.max().double(), mean) if scale is None else mean
    return found.float()


def scaled_signs(y: torch.Tensor) -> list[torch.Tensor]:
    """sign(y) and ||y||_2^2 / ||y||_1 of every block: unbiased, if y was rotated at random."""
    return [kernels.sign_pack(y), kernels.sign_scales(y, kernels.block_of(y.numel()))]


def scaled_signs_mean(received: Sequence[Parts], out: torch.Tensor) -> None:
    n = out.numel()
    codes, scales = [parts[0] for parts in received], [parts[1] for parts in received]
    kernels.dequantise_mean(codes, scales, 1, kernels.block_of(n), n, out)


def scaled_signs_bytes(n: int) -> int:
    return -(-n // 8) + 4 * -(-n // kernels.block_of(n))


def _rms(v: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """The root of the mean square; the mean magnitude `mean` if the squares leave the range of float32."""
    norm = cast(torch.Tensor, torch.linalg.vector_norm(v, dtype=torch.float32))
    root = norm.double().view(1) / math.sqrt(max(v.numel(), 1))
    return torch.where((root > 0) & (root < torch.inf), root, mean)
