"""1-bit SGD: a bit an entry, two means, error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire import kernels
from thinwire.methods.families.quantised import Parts, Quantised, lengthened


@dataclass(frozen=True)
class OneBit(Quantised):
    """An entry is sent as the mean of those that have its sign; what that loses is added next time.

    u_i = g_i + e_i;  m+ = mean of u_j >= 0;  m- = mean of u_j < 0
    Q(u)_j = m+ if u_j >= 0 else m-;  e_i = u_i - Q(u_i);  out = (1/W) sum_i Q(u_i)

    The two means are the best values that a bit of sign can choose between. One bit an entry and two
    float32 a tensor.

    Args:
        reduce: as for all methods that code every entry. With two shots every stretch has its own
            means, and its owner keeps what the second code loses.

    Reference: Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent and its application to
    data-parallel distributed training of speech DNNs", 2014.

    Differences from the paper: two means for a tensor instead of for each of its columns; gather for few
    ranks instead of always two shots.
    """

    name: ClassVar[str] = "onebit"

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "feedback", "sign")

    @property
    def feedback(self) -> bool:
        return True

    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        bits, plus, minus = kernels.onebit_pack(v)
        return [bits, torch.tensor([plus, minus], dtype=torch.float32, device=v.device)]

    def encode_padded(self, v: torch.Tensor, n: int, seed: int) -> list[torch.Tensor]:
        bits, means = self.encode(v, seed)
        return [lengthened(bits, -(-n // 8)), means]

    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        plus = [float(means[0]) for _, means in received]
        minus = [float(means[1]) for _, means in received]
        kernels.onebit_mean([bits for bits, _ in received], plus, minus, out.numel(), out)

    def code_bytes(self, n: int) -> int:
        return -(-n // 8) + 8

    def finite(self, received: Sequence[Parts]) -> bool:
        return all(kernels.all_finite(means) for _, means in received)
