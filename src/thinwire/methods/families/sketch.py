"""The options, state and sizes of Sketched-SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from thinwire.core import Channel, Exchange, Layout, Link, Traits, checks
from thinwire.core.traits import Scope
from thinwire.methods.families.momentum import Accumulated
from thinwire.methods.families.sparse import count_of

# Entries are hashed in blocks of 64 to neighbouring columns. With fewer columns a block collides with itself.
FEWEST_COLS = 64
# Measured at equal bytes on gradients of real models (`python -m benchmarks recovery`): the candidates are
# told apart by their exact values, so more entries pay more than more columns.
COLS_PER_ENTRY = 0.25
WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class SketchOptions(Exchange):
    ratio: float = 0.02
    rows: int = 5
    cols: int | None = None
    k: int | None = None
    candidates: int = 4
    momentum: float = 0.9
    scope: Scope = "model"
    wire: Literal["fp32", "bf16", "fp16"] = "fp32"

    def __post_init__(self) -> None:
        checks.ratio(self.name, self.ratio)
        checks.one_of(self.name, "rows", self.rows, (1, 3, 5, 7))
        checks.optional(checks.whole, self.name, "cols", self.cols, 1)
        checks.optional(checks.whole, self.name, "k", self.k, 1)
        checks.whole(self.name, "candidates", self.candidates, 0)
        checks.one_of(self.name, "wire", self.wire, tuple(WIRE))
        checks.momentum(self.name, self.momentum)
        checks.scope(self.name, self.scope)

    @property
    def traits(self) -> Traits:
        plain = self.momentum == 0
        exact = plain and self.candidates > 0 and self.wire == "fp32"
        return Traits(conserves=exact, optimizer="any" if plain else "no momentum", scope=self.scope)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "selection", "scatter", "sketch")

    def init(self, layout: Layout) -> Accumulated:
        return Accumulated.for_layout(layout, with_momentum=self.momentum > 0)

    def sizes(self, n: int) -> tuple[int, int, int]:
        """k, the columns of the table, and the number of entries that are fetched (P k)."""
        k = count_of(self.ratio, n) if self.k is None else min(self.k, n)
        usual = int(COLS_PER_ENTRY * k) if self.candidates else k  # without candidates, estimates are sent
        cols = max(FEWEST_COLS, usual) if self.cols is None else self.cols
        return k, cols, min(n, self.candidates * k)

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int:
        n, (_, cols, fetched) = layout.numel, self.sizes(layout.numel)
        numbers = self.rows * cols + fetched
        return 4 * n if numbers >= n else WIRE[self.wire].itemsize * numbers

    async def averaged(self, x: torch.Tensor, ch: Channel) -> torch.Tensor:
        """The mean over the ranks, in the precision of the wire."""
        narrow = x.to(WIRE[self.wire])
        return (await ch.mean(narrow, narrow)).to(x.dtype)

    @property
    def rounding(self) -> float:
        return torch.finfo(WIRE[self.wire]).eps / 2
