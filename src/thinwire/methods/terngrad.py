"""TernGrad: minus, zero or plus one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.core import Channel, State, Traits, checks
from thinwire.methods.families.quantised import Parts, Quantised, Reduce


@dataclass(frozen=True)
class TernGrad(Quantised):
    """Every entry becomes -s, 0 or s at random, so that its expectation is the clipped entry.

        sigma = standard deviation of g
        f(g)_j = g_j clipped to [-c sigma, c sigma];  s = max_j |f(g)_j|
        ternarize(g)_j = s sign(g_j) b_j,  b_j ~ Bernoulli(|f(g)_j| / s)
        out = (1/W) sum_i ternarize(g_i)

    The payload is two bits per entry and one float32 per tensor. In two shots every stretch has its own
    scale.

    Args:
        clip: c. None does not clip: the result is unbiased, with far more noise if a few entries are large.

    Differences from the paper: every rank has its own scale. A common scale would allow sums of integers, at
    the price of one more round and more noise.
    """

    name = "terngrad"
    use_when = "Two bits per entry without any state are worth more noise, for example with large batches."
    avoid_when = """A few entries are much larger than the rest: clipping biases them. Take `qsgd(bits=4)` if
    the accuracy must stay that of `dense`."""
    formula = "ceil(n / 4) + 4"
    reference = 'Wen, Xu, Yan, Wu, Wang, Chen and Li, "TernGrad", 2017'
    entries_per_byte = 4
    clip: float | None = 2.5
    reduce: Reduce = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.optional(checks.positive, self.name, "clip", self.clip)

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=self.clip is None, scatters=True)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "quantisation", "ternary")

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        mean = await self.average(x, ch)  # of ternarize(g), as `encode` draws it
        await ch.commit(mean.finite)
        mean.write(out)  # out = (1/W) sum ternarize(g)

    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        """The numbers sign(v) b, packed, and the scale s."""
        return list(kernels.ternary_quantise(v, self.clip, seed))

    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        n = out.numel()
        # The tensor is one bucket; one without entries has none.
        scales = [scale[: min(n, 1)] for _, scale in received]
        kernels.dequantise_mean([codes for codes, _ in received], scales, 2, max(n, 1), n, out)

    def code_bytes(self, n: int) -> int:
        return -(-n // 4) + 4
