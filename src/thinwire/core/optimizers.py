"""The optimizers of a training step: who holds which parameter, and when a step is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from thinwire.core.shards import local, parameter_name
from thinwire.errors import ConfigError

SESSION = "session"
"""Where an optimizer that owns a session keeps the session's state in its own, one for each rank."""

Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""What users pass as `optimizer=`: one, or several that take a training step together."""


class LossScale(Protocol):
    """A GradScaler, or anything else that knows by how much the loss is scaled."""

    def get_scale(self) -> float: ...


class Optimizers:
    """The optimizers in use, such as Muon for the matrices and AdamW for the rest; there may be none.

    A training step is complete when each has stepped once, in any order.
    """

    def __init__(self, given: Given = None) -> None:
        several = [given] if isinstance(given, torch.optim.Optimizer) else list(given or ())
        self._all = tuple(map(_unwrapped, several))
        if len(set(map(id, self._all))) < len(self._all):
            raise ConfigError(f"optimizer has the same {self} twice: give each once")
        holders: dict[int, torch.optim.Optimizer] = {}
        for optimizer in self._all:
            for parameter in parameters_of(optimizer):
                other = holders.setdefault(id(parameter), optimizer)
                if other is not optimizer:
                    raise ConfigError(
                        f"a parameter of shape {tuple(parameter.shape)} is in {_name(other)} and in "
                        f"{_name(optimizer)}: give each parameter to one optimizer"
                    )

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __str__(self) -> str:
        return " and ".join(map(_name, self._all))

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all."""
        return [group for optimizer in self._all for group in optimizer.param_groups]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters that are trained."""
        return [parameter for optimizer in self._all for parameter in parameters_of(optimizer)]

    def check_all_held(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse trainable parameters that no optimizer holds, if there is an optimizer at all."""
        held = set(map(id, self.parameters))
        lost = [name for name, p in parameters.items() if p.requires_grad and id(p) not in held]
        if not self._all or not lost:
            return
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ConfigError(
            f"{self} does not hold {parameter_name(lost[0])!r}{more}: give all optimizers that train the "
            "model, optimizer=[muon, adamw], or freeze what is not trained with requires_grad_(False)"
        )

    def state_of(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """What the optimizer keeps for a parameter; empty before its first step."""
        holder = next((optimizer for optimizer in self._all if parameter in optimizer.state), None)
        return {} if holder is None else cast("Mapping[str, Any]", holder.state[parameter])

    def forget(self, parameter: torch.Tensor) -> None:
        """As if the parameter had never had a gradient."""
        for optimizer in self._all:
            optimizer.state.pop(parameter, None)

    def remembered(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The momenta and second moments of a parameter: tensors of its shape, by name, in a fixed order.

        Of a sharded parameter: this rank's shards of them.
        """
        kept = self.state_of(parameter)
        # A step is a count, equal anyway: a mean would round it.
        names = [name for name in sorted(kept) if name != "step" and _alike(kept[name], parameter)]
        return {name: local(kept[name]) for name in names}

    def watch(
        self,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
        scaler: LossScale | None = None,
    ) -> Callable[[], None]:
        """Call `before` when a training step begins, with all gradients there, and `after` when it is over.

        A step that the GradScaler skips, because this rank's gradients overflow, counts as one. Returns how
        to stop it.
        """
        return _Watch(self._all, before, after).start(scaler)


class _Watch:
    """Hooks on every optimizer of a training step."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        before: Callable[[], None] | None,
        after: Callable[[], None] | None,
    ) -> None:
        self._optimizers = optimizers
        self._before = before
        self._after = after
        self._stepped: set[int] = set()  # in this training step
        self._taken = 0  # steps of single optimizers

    def start(self, scaler: LossScale | None) -> Callable[[], None]:
        stops: list[Callable[[], None]] = []
        for optimizer in self._optimizers:
            stops.append(optimizer.register_step_pre_hook(self._begins).remove)
            stops.append(optimizer.register_step_post_hook(self._ends).remove)
        if scaler is not None:
            stops.append(self._watch_scaler(scaler))

        def stop() -> None:
            for each in stops:
                each()

        return stop

    def _begins(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_turn(optimizer)
        if self._before is None or self._stepped:
            return None
        return with_gradients(optimizer, args, kwargs, self._before)

    def _ends(self, optimizer: torch.optim.Optimizer, args: object = (), kwargs: object = None) -> None:
        self._taken += 1
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            if self._after is not None:
                self._after()

    def _check_turn(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self._stepped:
            return
        missing = " and ".join(_name(each) for each in self._optimizers if id(each) not in self._stepped)
        raise ConfigError(
            f"{_name(optimizer)} steps a second time before {missing} has stepped: in a training step each "
            "of the optimizers given to attach steps once, in any order. Step them equally often"
        )

    def _watch_scaler(self, scaler: LossScale) -> Callable[[], None]:
        """Count the steps that a GradScaler skips on this rank alone.

        Otherwise the ranks would synchronise after different batches, and at the end one would wait for ever.
        """
        watched = cast(Any, scaler)
        original, own = watched.step, "step" in watched.__dict__

        def step(stepped: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            taken, inner = self._taken, _unwrapped(stepped)
            result = original(stepped, *args, **kwargs)
            if self._taken == taken and any(inner is each for each in self._optimizers):
                self._check_turn(inner)
                self._ends(inner)
            return result

        def restore() -> None:
            if watched.__dict__.get("step") is not step:
                return
            if own:
                watched.step = original
            else:
                del watched.step

        watched.step = step
        return restore


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in cast("list[torch.Tensor]", group["params"])]


def has_coupled_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether weight decay is added to the gradient; that of AdamW and Muon acts on the weights alone."""
    apart = isinstance(optimizer, torch.optim.AdamW | torch.optim.Muon)
    decoupled = apart or group.get("decoupled_weight_decay")
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


def _unwrapped(given: object) -> torch.optim.Optimizer:
    """The optimizer that takes the steps, inside the wrappers of Accelerate and Lightning."""
    while isinstance(inner := getattr(given, "optimizer", None), torch.optim.Optimizer):
        given = inner
    if not isinstance(given, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer takes a torch.optim.Optimizer or a list of them, not a {type(given).__name__}"
        )
    return given


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__
