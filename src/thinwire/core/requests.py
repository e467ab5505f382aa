"""Sums of whole numbers over the ranks: the channel's `mean` would round them."""

from __future__ import annotations

from typing import cast

import torch

from thinwire.core.channel import ask
from thinwire.net import frames


async def added(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a flat tensor over the ranks, in place; part of a program, not of an exchange."""
    return cast(torch.Tensor, await ask(frames.AllReduce(tensor, tensor.numel() * tensor.element_size())))
