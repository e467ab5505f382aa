"""`thinwire.attach`: the entry point for all methods."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.averaging.base import Schedule
from thinwire.core.config import Configured
from thinwire.core.engine import LossScale
from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError
from thinwire.hosts.auto import attach_auto
from thinwire.hosts.ddp import attach_gradients, has_session
from thinwire.hosts.model import attach_schedule, is_scheduled
from thinwire.methods.delayed import Delayed
from thinwire.methods.registry import parse
from thinwire.net.costs import Link
from thinwire.net.link import slowest_link
from thinwire.sessions.base import BaseSession
from thinwire.sessions.gradient import Session
from thinwire.sessions.periodic import PeriodicSession

Wait = Literal[0, 1, "auto"]


@overload
def attach(
    model: nn.Module,
    method: Schedule,
    *,
    seed: int = 0,
    dense_below: int = 1024,
    scaler: LossScale | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    inner_group: dist.ProcessGroup | None = None,
    steps: int | None = None,
    manager: Any = None,
    link: str | Link | None = None,
) -> PeriodicSession: ...


@overload
def attach(
    model: nn.Module,
    method: Exchange,
    *,
    overlap: bool = True,
    delay: Wait = 0,
    seed: int = 0,
    dense_below: int = 1024,
    scaler: LossScale | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    inner_group: dist.ProcessGroup | None = None,
    steps: int | None = None,
    manager: Any = None,
    link: str | Link | None = None,
) -> Session: ...


@overload
def attach(
    model: nn.Module,
    method: str | Mapping[str, Any],
    *,
    overlap: bool = True,
    delay: Wait = 0,
    replicas: Literal["any", "equal"] | None = None,
    seed: int = 0,
    dense_below: int = 1024,
    scaler: LossScale | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    inner_group: dist.ProcessGroup | None = None,
    steps: int | None = None,
    manager: Any = None,
    link: str | Link | None = None,
) -> BaseSession: ...


def attach(
    model: nn.Module,
    method: str | Mapping[str, Any] | Exchange | Schedule,
    *,
    overlap: bool = True,
    delay: Wait = 0,
    replicas: Literal["any", "equal"] | None = None,
    seed: int = 0,
    dense_below: int = 1024,
    scaler: LossScale | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    inner_group: dist.ProcessGroup | None = None,
    steps: int | None = None,
    manager: Any = None,
    link: str | Link | None = None,
) -> BaseSession:
    """Train a model with a method; the training loop stays as it is.

        model = DistributedDataParallel(model)
        session = thinwire.attach(model, "topk(ratio=0.01)")

    averages gradients during the backward pass. Schedules average parameters periodically. They take the
    optimizer and a bare model, or a DDP model, which then reduces no gradients:

        session = thinwire.attach(model, "pqasgd(every=8, bits=4)", optimizer=optimizer)

    Call it on every rank, before the first backward pass.

    DDP with find_unused_parameters ignores the result for a parameter that no rank has used in a step, even
    if the method has one (from a residual or an older upload).

    Args:
        model: the wrapped model (DDP or FSDP2); for a schedule also a bare one, which gets rank 0's
            parameters and buffers.
        method: a method string, its JSON, or an object such as `thinwire.methods.TopK(ratio=0.01)`; "auto"
            measures link and model in the first steps of a DDP model and picks one, and another one if the
            link changes (see `hosts/auto.py`).
        overlap: for gradients: work during the backward pass (the default); False works in the hook. A
            schedule has an option of that name.
        delay: for gradients: 1 gives the optimizer the mean of the step before, while the mean of the present
            step is on its way; "auto" does so only while the training would wait for the network. It is the
            method `delayed(method=..., delay=...)`.
        replicas: for "auto": "equal" leaves out periodic averaging, whose replicas differ between sync
            rounds; None is "any".
        seed: of the random numbers that the ranks share.
        dense_below: tensors with fewer entries, and short vectors, are sent dense; 0 compresses all.
        scaler: the GradScaler in use, if any: residuals then follow its scale, and a schedule counts the
            steps that it skips.
        optimizer: the optimizer in use, also as Accelerate or Lightning wrap it. A schedule needs it. A
            method with momentum of its own refuses an optimizer with momentum, `adam` needs AdamW. If
            replicas drift, the optimizer's state is averaged with them.
        process_group: for a bare model: the ranks to synchronise with; None is the default group. For an
            FSDP2 model: the ranks with the same shard in every replica, `mesh["replicate"].get_group()`; None
            if there is one replica only, sharded over all ranks (see the guide on FSDP2).
        inner_group: for `hierarchical`: the process group of this rank's host, if not consecutive ranks share
            hosts: `mesh["local"].get_group()` of a DeviceMesh, or one of `torch.distributed.new_subgroups`.
            Hosts have equally many ranks.
        steps: for a schedule: the number of steps of the run, if it is known. Then a warning says whether the
            analysis of `pqasgd`, `spasgd` and `localsgd` covers it (see `thinwire.averaging.conditions`).
        manager: a `torchft.Manager`: average over its replica groups, which come and go, instead of over a
            process group. Methods then average gradients inside `manager.should_commit()`. The model is a
            bare one; in groups of several ranks, one that DDP or FSDP2 trains inside of each group (see the
            guide on torchft).
        link: the link by which the session chooses its operations, such as "100mbit,latency=5ms". None takes
            that of the environment variable THINWIRE_LINK, or measures it; see the guide on choosing.
    """
    optimizer = _unwrapped(optimizer)
    model = _without_compiler(model)
    sharded = _is_fsdp(model)
    if manager is not None and process_group is not None:
        raise ConfigError("a manager has process groups of its own: give either manager or process_group")
    if isinstance(method, str) and method.strip() == "auto":
        _check_auto(manager, inner_group, delay, link, sharded=sharded)
        return attach_auto(
            model,
            overlap=overlap,
            seed=seed,
            dense_below=dense_below,
            scaler=scaler,
            optimizer=optimizer,
            replicas=replicas or "any",
        )
    if replicas is not None:
        raise ConfigError(f"replicas is for the method auto, not for {method}: leave it out")
    chosen, slowest = _with_delay(parse(method), delay), None if link is None else slowest_link(link)
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"attach() takes a torch.nn.Module, not {type(cast(object, model)).__name__}")
    if is_scheduled(model) or has_session(model) or (sharded and _has_fsdp_session(model)):
        raise ConfigError("this model has a thinwire session already: detach() it first")
    _check_levels(chosen, inner_group, sharded=sharded, managed=manager is not None)
    _check_delay(chosen, sharded=sharded, managed=manager is not None)
    _check_needed(chosen, optimizer)
    if manager is not None:
        if slowest is not None:
            raise ConfigError("link is not for replica groups, which come and go: leave it out")
        from thinwire.hosts.torchft import attach_managed

        return attach_managed(
            model,
            cast(Exchange | Schedule, chosen),
            manager,
            seed=seed,
            dense_below=dense_below,
            scaler=scaler,
            optimizer=optimizer,
        )
    if sharded and isinstance(chosen, Exchange):
        from thinwire.hosts.fsdp import attach_fsdp

        return attach_fsdp(
            model,
            chosen,
            process_group,
            overlap=overlap,
            seed=seed,
            dense_below=dense_below,
            scaler=scaler,
            optimizer=optimizer,
            link=slowest,
        )
    if isinstance(chosen, Exchange):
        if process_group is not None:
            raise ConfigError(
                "process_group is for bare models: a DDP model has its own, given to its wrapper"
            )
        return attach_gradients(
            cast(DistributedDataParallel, model),
            chosen,
            overlap=overlap,
            seed=seed,
            dense_below=dense_below,
            scaler=scaler,
            optimizer=optimizer,
            inner_group=inner_group,
            link=slowest,
        )
    if not isinstance(chosen, Schedule):
        raise ConfigError(f"{chosen.name} is neither an exchange nor a schedule")
    if sharded:
        from thinwire.hosts.fsdp import check_replicas

        check_replicas(model, chosen.name, process_group)
    return attach_schedule(
        model,
        chosen,
        optimizer,
        seed=seed,
        dense_below=dense_below,
        scaler=scaler,
        process_group=process_group,
        inner_group=inner_group,
        steps=steps,
        link=slowest,
    )


def _with_delay(method: Configured, delay: Wait) -> Configured:
    if delay == 0:
        return method
    if not isinstance(method, Exchange):
        raise ConfigError(f"delay is for methods that average gradients; {method.name} has an option overlap")
    return Delayed(method, delay)


def _check_auto(
    manager: object,
    inner_group: dist.ProcessGroup | None,
    delay: Wait,
    link: str | Link | None,
    *,
    sharded: bool,
) -> None:
    if sharded and manager is None:
        raise ConfigError(
            "auto measures DDP models, and this one is sharded by FSDP2: choose a method, and give "
            "process_group"
        )
    if link is not None:
        raise ConfigError("auto measures the link: leave link out, or choose a method")
    if delay != 0:
        raise ConfigError("auto does not choose a method with a delay: leave delay out, or choose a method")
    if manager is not None:
        raise ConfigError("auto measures once, but replica groups come and go: choose a method yourself")
    if inner_group is not None:
        raise ConfigError("inner_group is for hierarchical, which auto never takes: leave it out")


def _check_levels(
    method: Configured, inner_group: dist.ProcessGroup | None, *, sharded: bool, managed: bool
) -> None:
    """FSDP2 and torchft have groups of their own, which are not those of hosts and leaders."""
    exchange = method.inner if isinstance(method, Schedule) else method
    two_levels = isinstance(exchange, Exchange) and exchange.traits.two_levels
    if two_levels and (sharded or managed):
        groups = "FSDP2's replicas" if sharded else "torchft's replica groups"
        raise ConfigError(f"{exchange.name}: {groups} are groups of their own: give its outer method alone")
    if inner_group is not None and not two_levels:
        raise ConfigError(f"inner_group is for hierarchical, not for {method}: leave it out")


def _check_delay(method: Configured, *, sharded: bool, managed: bool) -> None:
    if isinstance(method, Exchange) and method.traits.delayed and (sharded or managed):
        where = "FSDP2 model" if sharded else "torchft manager"
        raise ConfigError(f"{method.name}: a {where} takes no method with a delay: give its method alone")


def _check_needed(method: object, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is None and isinstance(method, Exchange) and method.traits.optimizer == "Adam":
        raise ConfigError(
            f"{method.name} averages Adam's momentum, and its steps are taken inside optimizer.step(): give "
            "torch.optim.AdamW as optimizer=..."
        )


def _unwrapped(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """The optimizer that takes the steps, inside the wrappers of Accelerate and Lightning."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _without_compiler(model: nn.Module) -> nn.Module:
    """The model that `torch.compile` was given."""
    return cast(nn.Module, getattr(model, "_orig_mod", model))


def _is_fsdp(model: nn.Module) -> bool:
    """Whether FSDP2 shards this model or a part of it; its import takes long, so only if it has happened."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(loaded, "FSDPModule", None)
    if kind is None or not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        return False
    if isinstance(model, kind):
        return True
    if any(isinstance(module, kind) for module in model.modules()):
        raise ConfigError("parts of this model are sharded: call fully_shard on the whole model as well")
    return False


def _has_fsdp_session(model: nn.Module) -> bool:
    from thinwire.hosts.fsdp import has_fsdp_session

    return has_fsdp_session(model)
