"""Training scripts as they are: every model that a script wraps gets a session before its first step.

`ScriptHost` watches what the script constructs: `DistributedDataParallel` models, roots of `fully_shard`,
optimizers and gradient scalers. A model is attached at its first training forward pass, because only then its
optimizer exists.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn, Self, cast

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.averaging.base import Schedule
from thinwire.core.exchange import Exchange
from thinwire.core.optimizers import Optimizers, parameters_of
from thinwire.errors import ConfigError
from thinwire.hosts.attach import attach
from thinwire.hosts.ddp import has_session
from thinwire.hosts.model import is_scheduled, silence
from thinwire.methods.registry import parse
from thinwire.net.link import parse as parse_link
from thinwire.net.link import throttle
from thinwire.net.meter import Meter
from thinwire.net.metered_group import MeteredGroup
from thinwire.sessions.base import BaseSession
from thinwire.sessions.replicas import bare

AUTO = "auto"
ALONE = "alone"
"""No exchange at all: every rank trains by itself."""
PYTORCH = ("pytorch", "pytorch-fp16", "pytorch-powersgd")
"""PyTorch's own methods: DDP without a session."""
ONE_BUCKET_MB = 4096
"""PyTorch's PowerSGD hook fails on gloo with two buckets or more."""


class ScriptError(ConfigError):
    """The script does something that a host cannot serve; the text says what."""


@dataclass(frozen=True)
class Attached:
    """A model of the script and what trains it.

    `alone` and PyTorch's own methods have no session. `alone` has no meter either, nor has a method of
    PyTorch in a lab.
    """

    model: nn.Module
    optimizers: Optimizers
    session: BaseSession | None
    meter: Meter | None

    @property
    def name(self) -> str:
        """The class of the model itself."""
        module = bare(self.model)
        return type(getattr(module, "_orig_mod", module)).__name__


class ScriptHost:
    """While it is entered, models that are constructed are attached.

    Args:
        method: a method string, "auto", "alone" or one of `PYTORCH`.
        link: every session is throttled to it; a link of the lab is slow by itself.
        on_model: called before a model is attached, with the model and its optimizers.
        on_attached: called afterwards, before the model's first training forward pass.
    """

    def __init__(
        self,
        method: str,
        *,
        link: str = "none",
        on_model: Callable[[nn.Module, Optimizers], None] | None = None,
        on_attached: Callable[[Attached], None] | None = None,
    ) -> None:
        self.method = method
        self.link = link
        self.attached: list[Attached] = []
        self._needs_optimizer = _needs_optimizer(method)
        self._groups: weakref.WeakKeyDictionary[nn.Module, MeteredGroup] = weakref.WeakKeyDictionary()
        self._on_model = on_model
        self._on_attached = on_attached
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] = []
        self._waiting: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        undo = self._patches.callback
        undo(
            _replace(
                DistributedDataParallel,
                "__init__",
                self._watched_ddp(cast(Any, DistributedDataParallel).__init__),
            )
        )
        undo(_after_init(torch.optim.Optimizer, lambda made: self._optimizers.append(weakref.ref(made))))
        undo(_after_init(torch.amp.GradScaler, lambda made: self._scalers.append(weakref.ref(made))))
        from torch.distributed import fsdp  # takes long

        undo(_replace(fsdp, "fully_shard", self._watched_shard(fsdp.fully_shard)))
        for name in ("spawn", "start_processes"):
            undo(_replace(torch.multiprocessing, name, _refuse_spawn))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        for handle in list(self._waiting.values()):
            handle.remove()

    # -- models ----------------------------------------------------------------------------------------

    def _watched_ddp(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            group = None
            if (
                self.method in PYTORCH
                and len(args) < 7
                and not parse_link(self.link).lab
                and kwargs.get("process_group") is None
            ):
                group = kwargs["process_group"] = MeteredGroup()
                group.throttle(self.link)
            if self.method == "pytorch-powersgd":
                kwargs["bucket_cap_mb"] = ONE_BUCKET_MB
            original(model, *args, **kwargs)
            if group is not None:
                self._groups[model] = group
            self._wait_for(model)

        return init

    def _watched_shard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fully_shard(module: nn.Module | list[nn.Module], *args: Any, **kwargs: Any) -> Any:
            sharded = original(module, *args, **kwargs)
            for each in module if isinstance(module, list) else [module]:
                self._wait_for(each)
            return sharded

        return fully_shard

    def _wait_for(self, model: nn.Module) -> None:
        """Attach the model before its first training forward pass."""

        # An evaluation may run on one rank alone, before the first step.
        def first(module: nn.Module, inputs: object) -> None:
            if module.training and torch.is_grad_enabled():
                self._attach(module)

        hook = cast(Any, torch.compiler.disable(first))
        self._waiting[model] = model.register_forward_pre_hook(hook, prepend=True)

    def _attach(self, model: nn.Module) -> None:
        # Parts of a sharded model are called after its root, and belong to it.
        for part in model.modules():
            handle = self._waiting.pop(part, None)
            if handle is not None:
                handle.remove()
        if has_session(model) or is_scheduled(model):
            raise ScriptError(
                "the script calls thinwire.attach itself: start it with torchrun, or leave that call out"
            )
        optimizers = self._optimizers_of(model)
        if self._on_model is not None:
            self._on_model(model, optimizers)
        try:
            session = self._session_of(model, optimizers)
        except ConfigError as error:
            raise ScriptError(str(error)) from error
        metered = session or self._groups.get(model)
        self.attached.append(Attached(model, optimizers, session, metered.meter if metered else None))
        if self._on_attached is not None:
            self._on_attached(self.attached[-1])

    def _session_of(self, model: nn.Module, optimizers: Optimizers) -> BaseSession | None:
        if self.method not in (ALONE, *PYTORCH):
            # On a sharded model, which is one replica, nothing follows the scale of the loss.
            scaler = self._scaler() if isinstance(model, DistributedDataParallel) else None
            session = attach(model, self.method, optimizer=list(optimizers), scaler=scaler)
            throttle(session, self.link)
            return session
        if not isinstance(model, DistributedDataParallel):
            raise ScriptError(f"{self.method} is for DDP models, and the script shards its model")
        if self.method == ALONE:
            silence(model)
        else:
            add_pytorch_hook(model, self.method, self._groups.get(model))
        return None

    # -- what trains them ------------------------------------------------------------------------------

    def _optimizers_of(self, model: nn.Module) -> Optimizers:
        """Those that hold the model's parameters; of two that hold the same one, the newer."""
        own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        alive = [optimizer for each in self._optimizers if (optimizer := each()) is not None]
        chosen, held = list[torch.optim.Optimizer](), set[int]()
        for optimizer in reversed(alive):
            holds = set(map(id, parameters_of(optimizer)))
            if own & holds and not held & holds:
                chosen.insert(0, optimizer)
                held |= holds
        if self._needs_optimizer and not chosen:
            raise ScriptError(
                f"{self.method} {self._needs_optimizer} the model's optimizer, and the script has made none "
                "for this model: take a method that needs none, such as qsgd(bits=4)"
            )
        return Optimizers(chosen)

    def _scaler(self) -> torch.amp.GradScaler | None:
        enabled = [scaler for each in self._scalers if (scaler := each()) is not None and scaler.is_enabled()]
        if len(enabled) > 1:
            raise ScriptError(
                f"the script has {len(enabled)} gradient scalers, and it cannot be told which one belongs to "
                "this model: attach it in the script, thinwire.attach(model, method, scaler=scaler)"
            )
        return enabled[0] if enabled else None


# The callbacks of PyTorch's hooks hold the default group and are freed on its own thread. If the program has
# destroyed the group meanwhile, that was the last reference: the thread waits for itself, and the process
# aborts. One more reference, until the interpreter ends, prevents it.
_kept: list[object] = []


def add_pytorch_hook(model: DistributedDataParallel, method: str, group: MeteredGroup | None) -> None:
    """The hook of one of PyTorch's own methods; plain DDP has none."""
    if group is None:
        _kept.append(dist.group.WORLD)
    if method == "pytorch-fp16":
        model.register_comm_hook(group, cast(Any, default_hooks).fp16_compress_hook)
    elif method == "pytorch-powersgd":
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _needs_optimizer(method: str) -> str:
    """What the method does with an optimizer, if it cannot do without."""
    if method == AUTO:
        return "chooses by"
    parsed = None if method in (ALONE, *PYTORCH) else parse(method)
    if isinstance(parsed, Schedule):
        return "counts the steps of"
    return "takes the steps of" if isinstance(parsed, Exchange) and parsed.traits.optimizer == "Adam" else ""


def _after_init(kind: type[Any], note: Callable[[Any], object]) -> Callable[[], None]:
    """Call `note` with every new object of this class; returns how to stop it."""
    original = cast(Any, kind).__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        note(self)

    return _replace(kind, "__init__", init)


def _replace(owner: object, name: str, value: object) -> Callable[[], None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def _refuse_spawn(*args: object, **kwargs: object) -> NoReturn:
    raise ScriptError(
        "the script starts its own workers (torch.multiprocessing.spawn), and thinwire run has done that: "
        "call the function of a worker directly, with the rank from os.environ['RANK'], as under torchrun"
    )


def summary_order(attached: Sequence[Attached]) -> list[tuple[str, Attached]]:
    """The models with a name each: that of the class, numbered where several have the same."""
    names = [one.name for one in attached]
    return [
        (name if names.count(name) == 1 else f"{name} {names[: number + 1].count(name)}", one)
        for number, (name, one) in enumerate(zip(names, attached, strict=True))
    ]
