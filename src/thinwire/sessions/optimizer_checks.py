"""Checks at attach that the optimizer is what the method requires."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch

from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError


def check_optimizer(exchanges: Collection[Exchange], optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Returns warnings. Raises ConfigError if the optimizer would apply momentum a second time."""
    warnings = _about_steps(exchanges, optimizer)
    owners = sorted({str(exchange) for exchange in exchanges if exchange.traits.optimizer == "no momentum"})
    if not owners:
        return warnings
    method = owners[0]
    if optimizer is None:
        return [
            *warnings,
            f"{method} keeps the momentum itself: the optimizer must have none (give it to attach or Session "
            "as optimizer=..., and this is checked)",
        ]
    name, groups = type(optimizer).__name__, optimizer.param_groups
    for group in groups:
        second = _momentum(group)
        if second is not None:
            raise ConfigError(
                f"{method} keeps the momentum itself, and {name} has {second}: it would act twice. Take an "
                "optimizer without (SGD with momentum=0, Adam with betas=(0, ...)), or a method that leaves "
                "it to the optimizer, such as topk"
            )
    without = sorted({str(exchange) for exchange in exchanges if exchange.traits.optimizer != "no momentum"})
    if without:
        warnings.append(f"tensors served by {without[0]} have no momentum, those served by {method} do")
    if any(_coupled_decay(optimizer, group) for group in groups):
        a = max(float(getattr(exchange, "momentum", 0.0)) for exchange in exchanges)
        warnings.append(
            f"weight decay comes after {method}, without momentum: it acts {1 - a:.3g} times as strong as in "
            f"SGD(momentum={a:g}); divide weight_decay by {1 - a:.3g} for the same effect"
        )
    return warnings


def _about_steps(exchanges: Collection[Exchange], optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Warnings for rules that measure past steps by past outputs, which is right for plain SGD only."""
    counting = sorted({str(exchange) for exchange in exchanges if exchange.traits.optimizer == "plain SGD"})
    if not counting or optimizer is None:
        return []
    name = type(optimizer).__name__
    found: list[str] = []
    if not is_plain_sgd(optimizer):
        found.append(
            f"{counting[0]} skips uploads by a rule for steps that are the learning rate times the gradient; "
            f"with {name} (momentum or adaptive steps) its guarantees do not hold, and more or fewer uploads "
            "may be skipped than is good"
        )
    if len({group.get("lr") for group in optimizer.param_groups}) > 1:
        found.append(f"{counting[0]} measures steps without the learning rate: {name} has several")
    return found


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is the learning rate times the gradient."""
    return isinstance(optimizer, torch.optim.SGD) and not any(map(_momentum, optimizer.param_groups))


def _momentum(group: dict[str, Any]) -> str | None:
    if group.get("momentum"):
        return f"momentum={group['momentum']}"
    betas = group.get("betas")
    if isinstance(betas, Sequence) and betas and float(cast("Sequence[Any]", betas)[0]):
        return f"betas={tuple(cast('Sequence[Any]', betas))}"
    return None


def _coupled_decay(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether weight decay is added to the gradient; that of AdamW acts on the weights, without momentum."""
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    return bool(group.get("weight_decay")) and not decoupled
