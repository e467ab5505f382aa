"""All entries above a fixed magnitude."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire import kernels
from thinwire.core import Channel, Exchange, HostWaits, Layout, Link, checks
from thinwire.errors import ConfigError
from thinwire.methods.families.feedback import Residual, Selector, SparseMemory
from thinwire.methods.families.sparse import Sparse

ABOVE = Selector(kernels.threshold, kernels.select_feedback_threshold, kernels.feedback_threshold)


@dataclass(frozen=True)
class _ValueOption(Exchange):
    value: float = 1e-3


@dataclass(frozen=True)
class Threshold(Sparse, _ValueOption):
    """Every rank sends the entries of residual + gradient above a fixed magnitude, however many there are.

        u_i = g_i + e_i;  c_i = u_i where |u_i| > value;  e_i = u_i - c_i;  out = (1/W) sum_i c_i

    Args:
        value: the magnitude, in units of the gradient. 0 sends every entry that is not zero.
        reduce: "gather" or "split", as for `topk`. "auto" gathers, because no rank knows beforehand how much
            will be sent.
        warmup: must be 0, because there is no ratio.

    Differences from the paper: the values themselves are sent, not plus or minus the threshold. `values` can
    quantise them.
    """

    name = "threshold"
    use_when = """You know the magnitude of your gradients and want layers with large gradients to send more
    than others."""
    avoid_when = """The gradients change their scale during training: the payload may grow to the whole tensor
    or shrink to nothing. Under AdamW it ends worse than `dense`, like `topk`."""
    formula = "index_bytes(n, k) + 4 * k"
    formula_note = "where k is the number of entries above the value"
    rounds_per_step = "2 (the lengths, then a gather), or 3 with the split reduction"
    waits = HostWaits(1, 1, why="the number of entries above the value")
    reference = 'Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015'
    ragged = True
    proven_codes = ("qsgd",)
    reads_early = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.not_negative(self.name, "value", self.value)
        if self.warmup:
            raise ConfigError(f"{self.name}: warmup is for methods with a ratio; this one has none")

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        n, t = x.numel(), self.value * ch.context.scale
        with SparseMemory(state.error, x, out) as u:  # u = g + e
            c = u.take(ABOVE, t)  # c = u where |u| > t
            mean = await self.average(c, n, n, ch)
            if await ch.commit(mean.finite):
                u.commit(mean.lost)  # e = u - c
        mean.write(await ch.output(out), ch)  # out = (1/W) sum c

    def splits(self, n: int, k: int, size: int, link: Link) -> bool:
        return self.reduce == "split" and size > 1

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> None:
        """The data decide."""

    def exact(self) -> Exchange:
        return replace(self, value=0.0, values=None, reduce="gather")
