"""One-bit codes in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.reference.a2sgd import two_means
from thinwire.kernels.reference.quantisation import mean_into, pack, unpack


def sign_pack(x: Tensor) -> Tensor:
    return pack((x >= 0).to(torch.uint8), 1)


def sign_pack_mean(x: Tensor) -> tuple[Tensor, float]:
    return sign_pack(x), float(x.double().abs().sum()) / max(x.numel(), 1)


def sign_scales(x: Tensor, bucket: int) -> Tensor:
    rows = x.new_zeros(-(-x.numel() // bucket) * bucket, dtype=torch.float64)
    rows[: x.numel()] = x
    rows = rows.view(-1, bucket)
    sums = rows.abs().sum(1)
    return torch.where(sums == 0, 0.0, rows.square().sum(1) / sums).float()


def sign_pack_means(x: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    begins = range(0, x.numel(), bucket)
    means = [float(x[begin : begin + bucket].double().abs().mean()) for begin in begins]
    return sign_pack(x), torch.tensor(means, dtype=torch.float32, device=x.device)


def onebit_pack(x: Tensor) -> tuple[Tensor, float, float]:
    plus, minus = two_means(x)
    return sign_pack(x), plus, minus


def onebit_mean(
    packed: Sequence[Tensor], plus: Sequence[float], minus: Sequence[float], numel: int, out: Tensor
) -> None:
    sent = zip(packed, plus, minus, strict=True)
    mean_into(out, (_decode(codes, high, low, numel) for codes, high, low in sent), len(packed))


def sign_means(
    packed: Sequence[Tensor], scales: Sequence[Tensor], bucket: int, numel: int, out: Tensor
) -> None:
    def decoded(codes: Tensor, scale: Tensor) -> Tensor:
        each = scale.repeat_interleave(bucket)[:numel]
        return torch.where(unpack(codes, 1, numel) == 1, each, -each + 0.0)

    sent = zip(packed, scales, strict=True)
    mean_into(out, (decoded(codes, scale) for codes, scale in sent), len(packed))


def sign_majority(packed: Sequence[Tensor], numel: int) -> Tensor:
    votes = torch.zeros(numel, dtype=torch.int32, device=packed[0].device)
    for codes in packed:
        votes += unpack(codes, 1, numel)
    return pack((2 * votes >= len(packed)).to(torch.uint8), 1)


def _decode(packed: Tensor, high: float, low: float, numel: int) -> Tensor:
    pair = torch.tensor([low, high], dtype=torch.float32, device=packed.device) + 0.0  # no -0.0: a sum
    return pair[unpack(packed, 1, numel).long()]
