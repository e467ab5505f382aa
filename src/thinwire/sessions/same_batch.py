"""A second gradient on the same batch, at the parameters of a rank's last upload (for `lasg`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch

from thinwire.errors import ConfigError


def stale_gradients(
    stale_parameters: Mapping[str, torch.Tensor],
    model: torch.nn.Module,
    loss: Callable[[torch.nn.Module], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The gradients of this batch at other parameters. Model, buffers and random numbers stay as they are."""
    wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    inner = cast(torch.nn.Module, model.module) if wrapped else model
    old = {name: tensor.requires_grad_() for name, tensor in stale_parameters.items()}
    live = dict(inner.named_parameters())
    unknown = [name for name in old if name not in live]
    if unknown:
        raise ConfigError(
            f"same_batch: the session has a parameter {unknown[0]!r} that the model does not have"
        )
    buffers = {name: buffer.detach().clone() for name, buffer in inner.named_buffers()}
    devices = sorted({t.device.index for t in old.values() if t.device.type == "cuda"})
    tensors = {f"model.{name}": tensor for name, tensor in (old | buffers).items()}
    with torch.random.fork_rng(devices):
        value = torch.func.functional_call(_Loss(inner, loss), tensors, ())
        found = torch.autograd.grad(value, list(old.values()), allow_unused=True)
    gradients = cast("tuple[torch.Tensor | None, ...]", found)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for (name, tensor), gradient in zip(old.items(), gradients, strict=True)
    }


class _Loss(torch.nn.Module):
    """The loss as a module, so that `functional_call` can put other tensors in place of the model's."""

    def __init__(self, model: torch.nn.Module, loss: Callable[[torch.nn.Module], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self) -> torch.Tensor:
        return self._loss(self.model)
