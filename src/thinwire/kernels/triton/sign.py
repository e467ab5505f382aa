"""One-bit codes on a GPU."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from thinwire.kernels.reference import sign as reference
from thinwire.kernels.reference.quantisation import pack, unpack
from thinwire.kernels.triton._compiled import compiled, mean_of, number
from thinwire.kernels.triton.a2sgd import means_of_signs


def sign_pack(x: Tensor) -> Tensor:
    return _pack(x) if x.numel() else reference.sign_pack(x)


def sign_pack_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return reference.sign_pack_mean(x)
    return _pack_mean(x, number(x, x.numel(), torch.float64))


def sign_scales(x: Tensor, bucket: int) -> Tensor:
    return _scales(bucket)(x) if x.numel() else reference.sign_scales(x, bucket)


def sign_pack_means(x: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    return _pack_means(bucket)(x) if x.numel() else reference.sign_pack_means(x, bucket)


def onebit_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    return _pack_classes(x) if x.numel() else reference.onebit_pack(x)


def onebit_mean(packed: Sequence[Tensor], pairs: Sequence[Tensor], numel: int, out: Tensor) -> None:
    if numel:
        _onebit_mean(list(packed), list(pairs), number(out, len(packed)), out)


def sign_means(
    packed: Sequence[Tensor], scales: Sequence[Tensor], bucket: int, numel: int, out: Tensor
) -> None:
    if numel:
        _sign_means(bucket)(list(packed), list(scales), number(out, len(packed)), out)


def sign_majority(packed: Sequence[Tensor], numel: int) -> Tensor:
    return _majority(list(packed), numel) if numel else reference.sign_majority(packed, numel)


@compiled
def _pack(x: Tensor) -> Tensor:
    return reference.sign_pack(x)


@compiled
def _pack_mean(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    return reference.sign_pack(x), (x.double().abs().sum() / count).view(1)


@compiled
def _pack_classes(x: Tensor) -> tuple[Tensor, Tensor]:
    return reference.sign_pack(x), means_of_signs(x)


@compiled
def _onebit_mean(packed: list[Tensor], pairs: list[Tensor], workers: Tensor, out: Tensor) -> None:
    def decoded(codes: Tensor, pair: Tensor) -> Tensor:
        high_and_low = pair + 0.0  # no -0.0: a sum
        return torch.where(unpack(codes, 1, out.numel()) == 1, high_and_low[0], high_and_low[1])

    out.copy_(mean_of([decoded(*sent) for sent in zip(packed, pairs, strict=True)], workers))


@compiled
def _majority(packed: list[Tensor], numel: int) -> Tensor:
    votes = torch.zeros(numel, dtype=torch.int32, device=packed[0].device)
    for codes in packed:
        votes = votes + unpack(codes, 1, numel)
    return pack((2 * votes >= len(packed)).to(torch.uint8), 1)


@cache
def _scales(bucket: int) -> Callable[[Tensor], Tensor]:
    return compiled(lambda x: reference.sign_scales(x, bucket))


@cache
def _pack_means(bucket: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    @compiled
    def steps(x: Tensor) -> tuple[Tensor, Tensor]:
        count = -(-x.numel() // bucket)
        rows = x.new_zeros(count * bucket, dtype=torch.float64)
        rows[: x.numel()] = x.double().abs()
        lengths = (x.numel() - bucket * torch.arange(count, device=x.device)).clamp(max=bucket)
        return reference.sign_pack(x), (rows.view(count, bucket).sum(1) / lengths.double()).float()

    return steps


@cache
def _sign_means(bucket: int) -> Callable[[list[Tensor], list[Tensor], Tensor, Tensor], None]:
    @compiled
    def steps(packed: list[Tensor], scales: list[Tensor], workers: Tensor, out: Tensor) -> None:
        where = torch.arange(out.numel(), device=out.device) // bucket

        def decoded(codes: Tensor, scale: Tensor) -> Tensor:
            each = scale[where]
            return torch.where(unpack(codes, 1, out.numel()) == 1, each, -each + 0.0)

        out.copy_(mean_of([decoded(*sent) for sent in zip(packed, scales, strict=True)], workers))

    return steps
