"""What top-k loses of a vector, against the bounds on it.

Any vector loses at most 1 - k/d of its squared norm. Shi et al. (2019) prove (1 - k/d)^2 where the sorted
squares lie below the line from the largest to zero, as those of bell-shaped gradients do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

_PLACES = 61


@dataclass(frozen=True)
class Loss:
    """`lost` is ||u - top_k(u)||^2 / ||u||^2, at each of `kept` = k/d.

    - size: d, the number of entries;
    - worst: the largest part of (1 - k/d)^2 that is lost, over all k; the tighter bound holds up to 1.
    """

    size: int
    kept: tuple[float, ...]
    lost: tuple[float, ...]
    worst: float

    @property
    def classic(self) -> list[float]:
        """The bound for any vector."""
        return [1 - kept for kept in self.kept]

    @property
    def tight(self) -> list[float]:
        """The paper's bound for bell-shaped vectors."""
        return [(1 - kept) ** 2 for kept in self.kept]

    def near(self, ratio: float) -> tuple[float, float]:
        """k/d and what is lost at the place nearest to this ratio."""
        place = min(range(len(self.kept)), key=lambda j: abs(self.kept[j] - ratio))
        return self.kept[place], self.lost[place]


def lost_by_topk(u: torch.Tensor, *ratios: float) -> Loss:
    """At numbers of kept entries from 1 to d - 1, evenly on a logarithmic scale, and at the given ratios."""
    d = u.numel()
    squares = u.detach().double().square().sort().values
    # Sums of the smallest squares, so that what little is lost at large k is exact.
    lost = squares.cumsum(0).flip(0)[1:] / squares.sum().clamp(min=torch.finfo(torch.float64).tiny)
    kept = torch.arange(1, d, dtype=torch.float64, device=u.device) / d
    even = [round((d - 1) ** (place / (_PLACES - 1))) for place in range(_PLACES)]
    asked = [min(d - 1, max(1, round(ratio * d))) for ratio in ratios]
    places = torch.tensor(sorted({*even, *asked}), device=u.device) - 1
    return Loss(
        d,
        tuple(cast("list[float]", kept[places].tolist())),
        tuple(cast("list[float]", lost[places].tolist())),
        float((lost / (1 - kept).square()).max()),
    )
