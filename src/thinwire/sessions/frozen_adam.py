"""Steps of Adam with a frozen second moment: what `adam` needs inside `optimizer.step()`.

In the exact steps of the method torch takes its own step, plain, foreach or fused. In the others `.grad`
holds the averaged momentum m: a hook before torch's step takes the frozen one and hides `.grad` from torch,
and a hook after it gives it back. The optimizer's `step` counts the updates of the second moment, whose bias
correction it is for.

A GradScaler leaves two things to a fused optimizer: it unscales the gradients inside the step, and skips the
step if they are not finite. So does the frozen step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from thinwire.core.engine import Engine
from thinwire.core.optimizers import has_coupled_decay, with_gradients
from thinwire.core.shards import local
from thinwire.errors import ConfigError, ThinwireError
from thinwire.methods.adam import Adam

_ops = cast(Any, torch)  # for its operations on lists of tensors
REFUSED = {
    "amsgrad": "the second moment that is frozen is the running one, not the largest",
    "maximize": "the frozen step goes down. Minimise the negative loss instead",
    "capturable": "a CUDA graph would repeat an exact step, or a frozen one, for ever",
    "differentiable": "autograd cannot see the frozen step",
}
"""What an optimizer may not be set to, and why."""


def check(method: Adam, optimizer: torch.optim.Optimizer) -> None:
    """Raise a ConfigError if this optimizer cannot take frozen steps."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        raise ConfigError(
            f"{method.name} averages the momentum of torch.optim.AdamW or Adam, not of "
            f"{type(optimizer).__name__}"
        )
    for group in optimizer.param_groups:
        _check_group(method, optimizer, group)


def _check_group(method: Adam, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    beta1, name = float(group["betas"][0]), type(optimizer).__name__
    if beta1 != method.beta1:
        raise ConfigError(
            f"{name} has betas={tuple(group['betas'])}, and the ranks exchange a momentum with "
            f"beta1={method.beta1}: they must be equal and stay so. Write adam(..., beta1={beta1}); "
            "OneCycleLR needs cycle_momentum=False"
        )
    for option, reason in REFUSED.items():
        if group.get(option):
            raise ConfigError(
                f"{method.name} cannot take the steps of {name}({option}=True): {reason}. Leave {option} out"
            )
    if has_coupled_decay(optimizer, group):
        raise ConfigError(
            f"{method.name} averages the momentum of the gradients alone, and {name} adds weight decay to "
            "them: take torch.optim.AdamW, or weight_decay=0"
        )


def install(method: Adam, optimizer: torch.optim.Optimizer, engine: Engine) -> Callable[[], None]:
    """Take the frozen steps of this optimizer; returns how to stop it."""
    frozen = _FrozenSteps(method, optimizer, engine)
    before = optimizer.register_step_pre_hook(frozen.before)
    after = optimizer.register_step_post_hook(frozen.after)

    def remove() -> None:
        before.remove()
        after.remove()

    return remove


class _FrozenSteps:
    def __init__(self, method: Adam, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        self._method = method
        self._optimizer = optimizer
        self._engine = engine
        self._names = {id(parameter): name for name, parameter in engine.parameters.items()}
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_gradients(optimizer, args, kwargs, self._take)

    def after(self, *_: object) -> None:
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden = []

    @torch.no_grad()
    def _take(self) -> None:
        """The frozen step, if the last step that the ranks averaged was one of momenta."""
        step = self._engine.given_step
        if (step is not None and self._method.is_exact(step)) or self._from_scaler("found_inf"):
            return  # torch's own step, which skips what is not finite
        groups = [(group, given) for group in self._optimizer.param_groups if (given := self._given(group))]
        mine = [parameter for _, given in groups for parameter in given]
        if mine and step is not None:  # zeros, which a delay begins with, are no momentum
            updates = dict(zip(mine, self._updates(mine), strict=True))
            if scale := self._from_scaler("grad_scale"):
                _ops._foreach_div_([local(cast(torch.Tensor, p.grad)) for p in mine], scale)
            for group, given in groups:
                self._step(group, given, [updates[p] for p in given], step + 1)
        for parameter in mine:
            self._hidden.append((parameter, cast(torch.Tensor, parameter.grad)))
            parameter.grad = None

    def _given(self, group: Mapping[str, Any]) -> list[torch.Tensor]:
        """The session's parameters of a group that have a momentum."""
        _check_group(self._method, self._optimizer, group)
        return [p for p in group["params"] if p.grad is not None and id(p) in self._names]

    def _from_scaler(self, name: str) -> float:
        """What a GradScaler tells a fused optimizer for this step; 0 if it does not."""
        told = cast("torch.Tensor | None", getattr(self._optimizer, name, None))
        return 0.0 if told is None else float(told)

    def _updates(self, parameters: Sequence[torch.Tensor]) -> list[float]:
        """How often torch has updated the second moments, at least once.

        Fused optimizers count on the device, also the steps that a GradScaler has skipped: as none.
        """
        states = cast("Mapping[torch.Tensor, Mapping[str, torch.Tensor]]", self._optimizer.state)
        counts = [local(states.get(p, {}).get("step", torch.zeros(()))) for p in parameters]
        together = torch.stack([count.to(counts[0].device) for count in counts])
        found = cast("list[float]", cast(Any, together).tolist())
        never = next((p for p, count in zip(parameters, found, strict=True) if not count), None)
        if never is not None:
            raise ThinwireError(
                f"{self._names[id(never)]!r} has its first step after the warm-up of {self._method.name}, so "
                "there is no second moment to divide by: give every parameter a gradient in the warm-up, or "
                "attach anew"
            )
        return found

    def _step(
        self, group: Mapping[str, Any], parameters: list[torch.Tensor], updates: list[float], steps: int
    ) -> None:
        """m = grad;  theta = theta (1 - gamma decay) - gamma / c1 m / (sqrt(v / c2) + eps)."""
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        states = [cast("Mapping[str, torch.Tensor]", self._optimizer.state[p]) for p in parameters]
        theta = [local(parameter).detach() for parameter in parameters]
        m, v = ([local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
        c1 = 1 - beta1**steps
        c2 = [math.sqrt(1 - beta2**count) for count in updates]
        _ops._foreach_copy_(m, [local(cast(torch.Tensor, p.grad)) for p in parameters])
        scale = _ops._foreach_sqrt(v)
        _ops._foreach_div_(scale, c2)
        _ops._foreach_add_(scale, float(group["eps"]))
        for each, second in zip(scale, v, strict=True):
            self._fill(each, second == 0)
        if decay:
            _ops._foreach_mul_(theta, 1 - lr * decay)
        _ops._foreach_addcdiv_(theta, m, scale, -lr / c1)

    def _fill(self, scale: torch.Tensor, empty: torch.Tensor) -> None:
        """Where there was no gradient in the warm-up, no entry moves, or the method knows how far.

        It clears the momentum until it does, and takes the largest scale of the tensor to be the entry's.
        """
        if self._method.refresh is None or not scale.numel():
            scale.masked_fill_(empty, math.inf)
        else:
            scale.masked_fill_(empty, torch.where(empty.all(), math.inf, scale.amax()))
