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


def onebit_pack(x: Tensor) -> tuple[Tensor, float, float]:
    plus, minus = two_means(x)
    return sign_pack(x), plus, minus


def onebit_mean(
    packed: Sequence[Tensor], plus: Sequence[float], minus: Sequence[float], numel: int, out: Tensor
) -> None:
    sent = zip(packed, plus, minus, strict=True)
    mean_into(out, (_decode(codes, high, low, numel) for codes, high, low in sent), len(packed))


def sign_majority(packed: Sequence[Tensor], numel: int) -> Tensor:
    votes = torch.zeros(numel, dtype=torch.int32, device=packed[0].device)
    for codes in packed:
        votes += unpack(codes, 1, numel)
    return pack((2 * votes >= len(packed)).to(torch.uint8), 1)


def _decode(packed: Tensor, high: float, low: float, numel: int) -> Tensor:
    pair = torch.tensor([low, high], dtype=torch.float32, device=packed.device) + 0.0  # no -0.0: a sum
    return pair[unpack(packed, 1, numel).long()]
