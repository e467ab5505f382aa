"""Stochastic quantisation on a GPU."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from thinwire.kernels.reference import quantisation as reference
from thinwire.kernels.reference.quantisation import levels, unpack
from thinwire.kernels.triton._compiled import compiled, keys_of, mean_of, number


def quantise(x: Tensor, bits: int, bucket: int, norm: str, seed: int) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return reference.quantise(x, bits, bucket, norm, seed)
    return _quantise(bits, bucket, norm)(x, keys_of(seed, x))


def dequantise_mean(
    packed: Sequence[Tensor], scales: Sequence[Tensor], bits: int, bucket: int, numel: int, out: Tensor
) -> None:
    if numel:
        workers, top = number(out, len(packed)), number(out, levels(bits))
        _dequantise_mean(bits, bucket)(list(packed), list(scales), top, workers, out)


@cache
def _quantise(bits: int, bucket: int, norm: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    @compiled
    def steps(x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        scales = reference.bucket_scales(x, bucket, norm)
        return reference.pack(reference.encode(x, scales, bits, bucket, keys), bits), scales

    return steps


@cache
def _dequantise_mean(
    bits: int, bucket: int
) -> Callable[[list[Tensor], list[Tensor], Tensor, Tensor, Tensor], None]:
    @compiled
    def steps(packed: list[Tensor], scales: list[Tensor], top: Tensor, workers: Tensor, out: Tensor) -> None:
        where = torch.arange(out.numel(), device=out.device) // bucket

        def decoded(codes: Tensor, scale: Tensor) -> Tensor:
            wide = unpack(codes, bits, out.numel()).float()
            centred = wide * 2.0 - 1.0 if bits == 1 else wide - levels(bits)
            return centred * (scale / top)[where]

        out.copy_(mean_of([decoded(*sent) for sent in zip(packed, scales, strict=True)], workers))

    return steps
