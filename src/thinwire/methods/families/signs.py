"""The code of one bit an entry and one magnitude for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.methods.families.quantised import Parts, Quantised, lengthened


@dataclass(frozen=True)
class ScaledSigns(Quantised):
    """v becomes m sign(v), m = mean|v|: the multiple of sign(v) that is nearest to v. A zero counts as +."""

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "feedback", "sign")

    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        bits, magnitude = kernels.sign_pack_mean(v)
        return [bits, torch.tensor([magnitude], dtype=torch.float32, device=v.device)]

    def encode_padded(self, v: torch.Tensor, n: int, seed: int) -> list[torch.Tensor]:
        bits, magnitude = self.encode(v, seed)
        return [lengthened(bits, -(-n // 8)), magnitude]

    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        kernels.sign_mean([parts[0] for parts in received], magnitudes(received), out.numel(), out)

    def code_bytes(self, n: int) -> int:
        return -(-n // 8) + 4

    def finite(self, received: Sequence[Parts]) -> bool:
        return all(kernels.all_finite(parts[1]) for parts in received)


def magnitudes(received: Sequence[Parts]) -> list[float]:
    return [float(parts[1]) for parts in received]
