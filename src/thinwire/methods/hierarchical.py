"""Two levels: exact inside a host, any method between hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from thinwire.core import Channel, Exchange, Layout, Link, Slot, Traits, checks
from thinwire.core.exchange import Levels
from thinwire.core.two_levels import ranks_per_host
from thinwire.errors import ConfigError, ThinwireError
from thinwire.methods.dense import Dense
from thinwire.methods.topk import TopK


@dataclass(frozen=True)
class Hierarchical(Exchange):
    """Averages exactly inside a host, and by another method between one leader of each host.

        h = (1/L) sum of g_i over the L ranks of a host;  out = outer exchange of h between the leaders

    The leader is the first rank of its host. It gets the mean of its host, takes part in the outer exchange,
    and sends the result to the others. Only leaders keep residuals. The link of a host carries the bytes of
    one rank, however many ranks the host has. The meter counts those inside apart, in `meter.inside`.

    Args:
        outer: the method between hosts.
        inner: the mean inside a host: dense, or fp16 or bf16 for half of the bytes there.
        local: the number of ranks per host. Consecutive ranks share a host, and the last one may have fewer.
            None takes LOCAL_WORLD_SIZE, which torchrun sets. For other hosts, give `attach` or `Session` the
            process group of this rank's host, of equal size everywhere, as inner_group.

    Example:
        >>> import thinwire
        >>> str(thinwire.parse("hierarchical(outer=topk(ratio=0.01), local=8)"))
        'hierarchical(outer=topk(ratio=0.01), local=8)'
    """

    name = "hierarchical"
    family = "combining"
    use_when = """Hosts have several workers each, with fast links inside a host and slow ones between hosts:
    the slow link carries one payload per host instead of one per worker."""
    avoid_when = """Every host has one worker, or there is only one host. FSDP2 and torchft refuse it. Methods
    that let replicas drift (`a2sgd`) or need second gradients (`lasg`) are refused as `outer`."""
    formula = ""
    formula_note = "the bytes of its outer method, once per host"
    rounds_per_step = "those of the outer method, and 2 inside each host (a mean and a broadcast)"
    compute = "that of the outer method on the leaders, and a copy of its state"
    outer: Exchange = TopK()
    inner: Exchange = Dense()
    local: int | None = None

    def __post_init__(self) -> None:
        checks.exchange(self.name, "outer", self.outer)
        checks.exchange(self.name, "inner", self.inner)
        checks.optional(checks.whole, self.name, "local", self.local, 1)
        if not self.inner.traits.single_mean:
            raise ConfigError(f"{self.name}: inner must be dense, fp16 or bf16, not {self.inner.name}")
        if not self.outer.traits.consensus or self.outer.traits.second_gradient:
            what = "second gradients of one rank" if self.outer.traits.consensus else "drifting replicas"
            raise ConfigError(f"{self.name}: {self.outer.name} has {what}; take another outer method")

    @property
    def traits(self) -> Traits:
        outer, exact = self.outer.traits, self.inner.traits.exact_mean
        return replace(
            outer,
            unbiased=outer.unbiased and exact,
            conserves=outer.conserves and exact,
            single_mean=False,
            scatters=False,
            payload="alternating" if outer.payload == "fixed" else outer.payload,
            two_levels=True,
        )

    @property
    def levels(self) -> Levels:
        return Levels(self.inner, ranks_per_host(self.name, self.local))

    @property
    def rounding(self) -> float:
        return max(self.inner.rounding, self.outer.rounding)

    def resolved(self, local: int | None = None) -> Exchange:
        return replace(self, local=ranks_per_host(self.name, self.local, local))

    def assign(self, slot: Slot, *, small: bool) -> Exchange | None:
        return self.outer.assign(slot, small=small)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Any, ch: Channel) -> None:
        raise ThinwireError("hierarchical does not run itself: the session runs its two levels")

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int | None:
        return self.outer.payload_bytes(layout, -(-size // ranks_per_host(self.name, self.local)), link)

    def exact(self) -> Exchange | None:
        outer = self.outer.exact()
        return None if outer is None else replace(self, outer=outer, inner=Dense())
