"""One-bit codes on a GPU. The host waits once where a result is a number."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from thinwire.kernels.reference import sign as reference
from thinwire.kernels.reference.quantisation import pack, unpack
from thinwire.kernels.triton._compiled import compiled, mean_of, number, numbers
from thinwire.kernels.triton.a2sgd import class_sums, means


def sign_pack(x: Tensor) -> Tensor:
    return _pack(x) if x.numel() else reference.sign_pack(x)


def sign_pack_mean(x: Tensor) -> tuple[Tensor, float]:
    if x.numel() == 0:
        return reference.sign_pack_mean(x)
    packed, total = _pack_sum(x)
    return packed, float(total) / x.numel()


def sign_scales(x: Tensor, bucket: int) -> Tensor:
    return _scales(bucket)(x) if x.numel() else reference.sign_scales(x, bucket)


def sign_pack_means(x: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    return _pack_means(bucket)(x) if x.numel() else reference.sign_pack_means(x, bucket)


def onebit_pack(x: Tensor) -> tuple[Tensor, float, float]:
    if x.numel() == 0:
        return reference.onebit_pack(x)
    packed, sums = _pack_classes(x)
    return packed, *means(x.numel(), sums)


def onebit_mean(
    packed: Sequence[Tensor], plus: Sequence[float], minus: Sequence[float], numel: int, out: Tensor
) -> None:
    if numel:
        table = numbers(out, *zip(minus, plus, strict=True))
        _onebit_mean(list(packed), table, number(out, len(packed)), out)


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
def _pack_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    return reference.sign_pack(x), x.double().abs().sum()


@compiled
def _pack_classes(x: Tensor) -> tuple[Tensor, Tensor]:
    return reference.sign_pack(x), class_sums(x)


@compiled
def _onebit_mean(packed: list[Tensor], table: Tensor, workers: Tensor, out: Tensor) -> None:
    pairs = table + 0.0  # no -0.0: a sum
    parts = [pairs[w][unpack(codes, 1, out.numel()).long()] for w, codes in enumerate(packed)]
    out.copy_(mean_of(parts, workers))


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
