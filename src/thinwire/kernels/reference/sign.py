"""One-bit codes in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.reference.a2sgd import two_means
from thinwire.kernels.reference.quantisation import mean_into, pack, unpack


def sign_pack(x: Tensor) -> Tensor:
    return pack((x >= 0).to(torch.uint8), 1)


def sign_pack_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    return sign_pack(x), (x.double().abs().sum() / max(x.numel(), 1)).view(1)


def sign_scales(x: Tensor, bucket: int) -> Tensor:
    rows = x.new_zeros(-(-x.numel() // bucket) * bucket, dtype=torch.float64)
    rows[: x.numel()] = x
    rows = rows.view(-1, bucket)
    sums = rows.abs().sum(1)
    return torch.where(sums == 0, 0.0, rows.square().sum(1) / sums).float()


def sign_pack_means(x: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    begins = range(0, x.numel(), bucket)
    means = [x[begin : begin + bucket].double().abs().mean() for begin in begins]
    return sign_pack(x), torch.stack(means).float() if means else x.new_empty(0, dtype=torch.float32)


def onebit_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    return sign_pack(x), two_means(x)


def onebit_mean(packed: Sequence[Tensor], pairs: Sequence[Tensor], numel: int, out: Tensor) -> None:
    sent = zip(packed, pairs, strict=True)
    mean_into(out, (_decode(codes, pair, numel) for codes, pair in sent), len(packed))


def sign_means(
    packed: Sequence[Tensor], scales: Sequence[Tensor], bucket: int, numel: int, out: Tensor
) -> None:
    def decoded(codes: Tensor, scale: Tensor) -> Tensor:
        each = scale[torch.arange(numel, device=scale.device) // bucket]
        return torch.where(unpack(codes, 1, numel) == 1, each, -each + 0.0)

    sent = zip(packed, scales, strict=True)
    mean_into(out, (decoded(codes, scale) for codes, scale in sent), len(packed))


def sign_majority(packed: Sequence[Tensor], numel: int) -> Tensor:
    votes = torch.zeros(numel, dtype=torch.int32, device=packed[0].device)
    for codes in packed:
        votes += unpack(codes, 1, numel)
    return pack((2 * votes >= len(packed)).to(torch.uint8), 1)


def _decode(packed: Tensor, pair: Tensor, numel: int) -> Tensor:
    high, low = pair + 0.0  # no -0.0: a sum
    return torch.where(unpack(packed, 1, numel) == 1, high, low)
