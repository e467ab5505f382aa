"""Sums of whole numbers over the ranks: the channel's `mean` would round them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import torch

from thinwire.net import frames


class _Operation:
    """Passes a primitive to the driver and evaluates to its answer."""

    def __init__(self, operation: frames.Primitive) -> None:
        self._operation = operation

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self._operation)


async def added(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a flat tensor over the ranks, in place; part of a program, not of an exchange."""
    operation = frames.AllReduce(tensor, tensor.numel() * tensor.element_size())
    return cast(torch.Tensor, await _Operation(operation))
