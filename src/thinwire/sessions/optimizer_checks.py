"""Checks at attach that the optimizer is what the method requires."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch

from thinwire.averaging.base import Schedule
from thinwire.averaging.postlocal import PostLocal
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.optimizers import Optimizers, has_coupled_decay
from thinwire.errors import ConfigError
from thinwire.methods.adam import Adam
from thinwire.methods.dense import Dense
from thinwire.methods.efsign import EFSign
from thinwire.sessions import frozen_adam

OptimizerKind = Literal["plain SGD", "adaptive", "other", "unknown"]
"""Plain SGD steps by the learning rate times the gradient; an adaptive one divides by a second moment."""

# Optimizers that divide by a running mean of squares (or by the largest), as parts of their names.
ADAPTIVE = ("adam", "adagrad", "adadelta", "adafactor", "rmsprop", "lamb")
# By our table of a language model (`thinwire.predict.language`), which a test compares.
BETTER_WITH_ADAMW: tuple[Exchange | Schedule, ...] = (Adam(exchange=EFSign(bucket=4096)), PostLocal(every=4))


def check_optimizers(exchanges: Collection[Exchange], optimizers: Optimizers) -> list[str]:
    """Returns warnings. Raises ConfigError if an optimizer would apply momentum a second time."""
    if any(exchange.traits.optimizer == "Adam" for exchange in exchanges):
        return _about_adam(exchanges, optimizers)
    warnings = [*_about_steps(exchanges, optimizers), *_about_second_moments(exchanges, optimizers)]
    owners = sorted({str(exchange) for exchange in exchanges if exchange.traits.optimizer == "no momentum"})
    if not owners:
        return warnings
    method = owners[0]
    if not len(optimizers):
        return [
            *warnings,
            f"{method} keeps the momentum itself: the optimizer must have none (give it to attach or Session "
            "as optimizer=..., and this is checked)",
        ]
    for optimizer in optimizers:
        second = next(filter(None, map(_momentum, optimizer.param_groups)), None)
        if second is not None:
            raise ConfigError(
                f"{method} keeps the momentum itself, and {type(optimizer).__name__} has {second}: it would "
                "act twice. Take an optimizer without (SGD with momentum=0, Adam with betas=(0, ...)), or a "
                "method that leaves it to the optimizer, such as topk"
            )
    without = sorted({str(exchange) for exchange in exchanges if exchange.traits.optimizer != "no momentum"})
    if without:
        warnings.append(f"tensors served by {without[0]} have no momentum, those served by {method} do")
    if any(has_coupled_decay(each, group) for each in optimizers for group in each.param_groups):
        a = max(float(getattr(exchange, "momentum", 0.0)) for exchange in exchanges)
        warnings.append(
            f"weight decay comes after {method}, without momentum: it acts {1 - a:.3g} times as strong as in "
            f"SGD(momentum={a:g}); divide weight_decay by {1 - a:.3g} for the same effect"
        )
    return warnings


def _about_adam(exchanges: Collection[Exchange], optimizers: Optimizers) -> list[str]:
    """All tensors of a step hold gradients or all hold momenta, and the optimizers know which."""
    settings = {
        replace(exchange, exchange=Dense()) if isinstance(exchange, Adam) else exchange
        for exchange in exchanges
    }
    if len(settings) > 1:
        names = " and ".join(sorted(map(str, settings)))
        raise ConfigError(
            f"some tensors would have momenta and others gradients ({names}): put the route inside, "
            "adam(exchange=route(...))"
        )
    (method,) = settings
    assert isinstance(method, Adam)
    if not len(optimizers):
        return [
            f"after {method.warmup} steps adam gives averaged momenta instead of gradients: give AdamW to "
            "Session as optimizer=..., which then takes the right steps"
        ]
    for optimizer in optimizers:
        frozen_adam.check(method, optimizer)
    return []


def _about_second_moments(exchanges: Collection[Exchange], optimizers: Optimizers) -> list[str]:
    """A warning for residuals under an optimizer that divides by the size of past gradients."""
    adaptive = next(filter(_is_adaptive, optimizers), None)
    if adaptive is None:
        return []
    late = sorted((exchange for exchange in exchanges if has_residual(exchange)), key=str)
    if not late:
        return []
    name, better = type(adaptive).__name__, " or ".join(map(str, BETTER_WITH_ADAMW))
    return [
        f"{late[0]} sends late what it leaves out, and {name} takes that for larger gradients: with it "
        f"transformers train worse than dense; {better} with AdamW does better"
    ]


def _is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has a second moment; by name, so that other packages' variants of Adam count as well."""
    names = [cls.__name__.lower() for cls in type(optimizer).__mro__]
    return any(word in name for name in names for word in ADAPTIVE)


def has_residual(exchange: Exchange) -> bool:
    """Whether parts of a gradient may arrive in later steps."""
    state = exchange.init(Layout.of([("", (64, 64))], device="meta"))
    return any(tensor.numel() for tensor in state.tensors("residual").values())


def _about_steps(exchanges: Collection[Exchange], optimizers: Optimizers) -> list[str]:
    """Warnings for rules that measure past steps by past outputs, which is right for plain SGD only."""
    counting = sorted({str(exchange) for exchange in exchanges if exchange.traits.optimizer == "plain SGD"})
    if not counting or not len(optimizers):
        return []
    found: list[str] = []
    if not all(map(is_plain_sgd, optimizers)):
        found.append(
            f"{counting[0]} skips uploads by a rule for steps that are the learning rate times the gradient; "
            f"with {optimizers} (momentum or adaptive steps) its guarantees do not hold, and more or fewer "
            "uploads may be skipped than is good"
        )
    if len({group.get("lr") for group in optimizers.groups}) > 1:
        found.append(f"{counting[0]} measures steps without the learning rate: {optimizers} has several")
    return found


def kind_of(optimizers: Optimizers) -> OptimizerKind:
    """Of several, the kind that asks the most of a method."""
    if not len(optimizers):
        return "unknown"
    if any(map(_is_adaptive, optimizers)):
        return "adaptive"
    return "plain SGD" if all(map(is_plain_sgd, optimizers)) else "other"


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
