"""Flat memory that sync rounds leave to later ones: on a CPU, fresh pages cost more than the work on them."""

from __future__ import annotations

import torch

from thinwire.core.layout import Layout


class Spares:
    """The flat tensors of sync rounds that are over.

    A tensor that was lent belongs to one sync round until that gives it back. A failed sync round does not:
    an operation may still be writing there. Only memory of the CPU is kept. Other devices have an allocator
    that keeps it, and that can use it for the model in between.
    """

    poison = False
    """For tests: fill what is given back with NaN, so that a late reader is noticed."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def lend(self, layout: Layout) -> torch.Tensor:
        """A flat tensor for this layout, with any contents."""
        alike = [flat for flat in self._free if flat.dtype == layout.dtype]
        if layout.device.type == "cpu" and alike:
            fits = [flat for flat in alike if flat.numel() >= layout.numel]
            # If none is long enough, a longer one takes the place of the longest.
            taken = min(fits, key=torch.Tensor.numel) if fits else max(alike, key=torch.Tensor.numel)
            self._free = [flat for flat in self._free if flat is not taken]
            if fits:
                return taken[: layout.numel]
        return torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)

    def give_back(self, flat: torch.Tensor) -> None:
        """Nobody reads or writes this tensor any more."""
        if self.poison:
            flat.fill_(torch.nan)
        if flat.device.type == "cpu":
            self._free.append(torch.empty(0, dtype=flat.dtype).set_(flat.untyped_storage()))
