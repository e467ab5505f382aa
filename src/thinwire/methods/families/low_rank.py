"""Gradients as matrices, and the factors of their low-rank approximation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.core.channel import Channel
from thinwire.core.exchange import State, replicated, residual
from thinwire.core.layout import Slot


@dataclass
class Factors(State):
    """The error, and the last P and Q; `p` is empty where it is not needed again."""

    error: torch.Tensor = residual()
    p: torch.Tensor = replicated()
    q: torch.Tensor = replicated()


def dimensions(slot: Slot, rank: int) -> tuple[int, int, int]:
    """Rows, columns and rank: n x m matrices, with factors of r columns."""
    n = slot.shape[0] if slot.shape else 1
    m = slot.numel // n if n else 0
    return n, m, min(rank, n, m)


def matrix(flat: torch.Tensor, m: int, turned: bool) -> torch.Tensor:
    """This memory as a matrix of m columns, or as its transpose."""
    found = flat.view(-1, m)
    return found.T if turned else found


def random_factor(factor: torch.Tensor, ch: Channel) -> torch.Tensor:
    """A factor to begin with, equal on all ranks."""
    return torch.randn(factor.shape, generator=ch.shared_rng(), device=factor.device)
