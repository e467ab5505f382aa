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
        self._all = tuple(map(_unwrapped, _listed(given)))
        self._watches: list[_TrainingStep] = []
        for position, optimizer in enumerate(self._all):
            if any(optimizer is other for other in self._all[:position]):
                raise ConfigError(f"optimizer has the same {_name(optimizer)} twice: give each once")
        holders: dict[int, int] = {}
        for position, optimizer in enumerate(self._all):
            for parameter in parameters_of(optimizer):
                other = holders.setdefault(id(parameter), position)
                if other != position:
                    raise ConfigError(
                        f"a parameter of shape {tuple(parameter.shape)} is in {_place(self._all, other)} and "
                        f"in {_place(self._all, position)}: give each parameter to one optimizer"
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
            f"no optimizer holds {parameter_name(lost[0])!r}{more} (given: {self}): give all that train the "
            "model, optimizer=[muon, adamw], or freeze what is not trained with requires_grad_(False)"
        )

    def remembered(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The momenta and second moments of a parameter: tensors of its shape, by name, in a fixed order.

        Of a sharded parameter: this rank's shards of them.
        """
        states = (cast("Mapping[torch.Tensor, Mapping[str, Any]]", each.state) for each in self._all)
        kept = next((state[parameter] for state in states if parameter in state), dict[str, Any]())
        # A step is a count, equal anyway: a mean would round it.
        names = [name for name in sorted(kept) if name != "step" and _alike(kept[name], parameter)]
        return {name: local(kept[name]) for name in names}

    def forget(self, parameter: torch.Tensor) -> None:
        """As if the parameter had never had a gradient."""
        for optimizer in self._all:
            optimizer.state.pop(parameter, None)

    def watch(
        self,
        *,
        before: Callable[[], None] | None = None,
        each: Callable[[torch.optim.Optimizer], None] | None = None,
        after: Callable[[], None] | None = None,
        scaler: LossScale | None = None,
    ) -> Callable[[], None]:
        """Call `before` when a training step begins, with all gradients there, and `after` when it is over.

        `each` is called with every optimizer that has stepped, right after its step. A step that the
        GradScaler skips, because this rank's gradients overflow, counts as one. Returns how to stop it.
        """
        watch = _TrainingStep(self._all, before, each, after, scaled=scaler is not None)
        self._watches.append(watch)
        stops = [lambda: self._watches.remove(watch)]
        for optimizer in self._all:
            stops.append(optimizer.register_step_pre_hook(watch.begins).remove)
            stops.append(optimizer.register_step_post_hook(watch.ends).remove)
        if hasattr(scaler, "step"):  # what only knows the scale skips nothing
            stops.append(_ScalerStep.watched_by(watch, scaler))

        def stop() -> None:
            for remove in stops:
                remove()

        return stop

    def begin_anew(self) -> None:
        """A checkpoint was loaded: the next step of any optimizer begins a training step."""
        for watch in self._watches:
            watch.begin_anew()


class _TrainingStep:
    """The training step under way: which optimizers have stepped in it."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        before: Callable[[], None] | None,
        each: Callable[[torch.optim.Optimizer], None] | None,
        after: Callable[[], None] | None,
        *,
        scaled: bool,
    ) -> None:
        self._optimizers = optimizers
        self._before = before
        self._each = each
        self._after = after
        self._scaled = scaled
        self._stepping: set[int] = set()
        self._stepped: set[int] = set()
        self._begun = False
        self.taken = 0
        """Steps of single optimizers so far, without those that a GradScaler skipped."""

    def begin_anew(self) -> None:
        self._stepped.clear()
        self._begun = False

    def begins(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The hook before a step."""
        self._check_turn(optimizer)
        self._stepping.add(id(optimizer))
        if self._before is None or self._begun:
            return None
        return with_gradients(optimizer, args, kwargs, self._begin)

    def _begin(self) -> None:
        assert self._before is not None
        self._before()
        self._begun = True

    def ends(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """The hook after a step."""
        if id(optimizer) not in self._stepping:
            return  # torch calls the hooks once more for a step() that calls that of its base class
        self._stepping.remove(id(optimizer))
        self.taken += 1
        if self._each is not None:
            self._each(optimizer)
        self._count(optimizer)

    def skipped(self, given: object) -> None:
        """The GradScaler has left out the step of this optimizer, which may be one of ours."""
        for optimizer in self._optimizers:
            if optimizer is given:
                self._check_turn(optimizer)
                self._count(optimizer)

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self.begin_anew()
            if self._after is not None:
                self._after()

    def _check_turn(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self._stepped:
            return
        every = enumerate(self._optimizers)
        places = {id(each): _place(self._optimizers, position) for position, each in every}
        missing = " and ".join(place for own, place in places.items() if own not in self._stepped)
        scaler = "" if self._scaled else ". If a GradScaler skips steps, give it as scaler=..."
        raise ConfigError(
            f"{places[id(optimizer)]} steps a second time before {missing} has stepped: in a training step "
            f"every optimizer steps once, in any order{scaler}"
        )


class _ScalerStep:
    """In place of `GradScaler.step`: tells of the steps that it skips, on this rank alone.

    Otherwise the ranks would synchronise after different batches, and at the end one would wait for ever.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._original = scaler.step
        self._own = "step" in scaler.__dict__
        self._watches: list[_TrainingStep] = []
        scaler.step = self

    @staticmethod
    def watched_by(watch: _TrainingStep, scaler: Any) -> Callable[[], None]:
        """Several sessions may share a scaler, and stop in any order."""
        present = scaler.step
        step = present if isinstance(present, _ScalerStep) else _ScalerStep(scaler)
        step._watches.append(watch)
        return lambda: step._remove(watch)

    def __call__(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        before = [(watch, watch.taken) for watch in self._watches]
        result = self._original(optimizer, *args, **kwargs)
        for watch, taken in before:
            if watch.taken == taken:
                watch.skipped(_inside(optimizer))
        return result

    def _remove(self, watch: _TrainingStep) -> None:
        self._watches.remove(watch)
        if self._watches or self._scaler.step is not self:
            return
        if self._own:
            self._scaler.step = self._original
        else:
            del self._scaler.step


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


def _listed(given: object) -> list[object]:
    if given is None:
        return []
    return list(cast("Sequence[object]", given)) if isinstance(given, Sequence) else [given]


def _unwrapped(given: object) -> torch.optim.Optimizer:
    optimizer = _inside(given)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer takes a torch.optim.Optimizer or a list of them, not a {type(given).__name__}"
        )
    return optimizer


def _inside(given: object) -> object:
    """The optimizer that takes the steps, inside the wrappers of Accelerate and Lightning."""
    while isinstance(inner := getattr(given, "optimizer", None), torch.optim.Optimizer):
        given = inner
    return given


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def _place(optimizers: Sequence[torch.optim.Optimizer], position: int) -> str:
    """Of several optimizers one, which may be of the same class as another."""
    return f"{_name(optimizers[position])} (optimizer[{position}])"
