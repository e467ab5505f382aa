"""The state of an optimizer for a parameter: momenta and second moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from thinwire.core.shards import local

SESSION = "session"
"""Where an optimizer that owns a session keeps the session's state in its own, one for each rank."""


def remembered(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The optimizer's tensors with one number per entry of the parameter, by name, in a fixed order.

    Of a sharded parameter: this rank's shards of them.
    """
    state = cast("Mapping[torch.Tensor, Mapping[str, Any]]", optimizer.state)
    kept = state.get(parameter, {})
    # A step is a count, equal anyway: a mean would round it.
    names = [name for name in sorted(kept) if name != "step" and _alike(kept[name], parameter)]
    return {name: local(kept[name]) for name in names}


def has_coupled_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether weight decay is added to the gradient; that of AdamW acts on the weights, without momentum."""
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    return bool(group.get("weight_decay")) and not decoupled


def with_gradients(
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    act: Callable[[], None],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """For a hook before `optimizer.step()`: act once the gradients are there, so after a closure if given."""
    given: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    if given is None:
        act()
        return None

    def closure() -> Any:  # it computes the gradients
        loss = given()
        act()
        return loss

    return (optimizer, closure), {}


def _alike(value: object, parameter: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    fits = value.shape == parameter.shape and value.device == parameter.device
    return fits and value.is_floating_point()
