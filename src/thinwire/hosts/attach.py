"""`thinwire.attach`: the entry point for all methods."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal, cast, overload

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.averaging.base import Schedule
from thinwire.core.exchange import Exchange
from thinwire.core.optimizers import Given, LossScale, Optimizers
from thinwire.errors import ConfigError
from thinwire.hosts.auto import attach_auto
from thinwire.hosts.compose import Host, Kind, check_auto, check_host, check_method, check_options
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
    optimizer: Given = None,
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
    overlap: bool | None = None,
    delay: Wait = 0,
    seed: int = 0,
    dense_below: int = 1024,
    scaler: LossScale | None = None,
    optimizer: Given = None,
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
    overlap: bool | None = None,
    delay: Wait = 0,
    replicas: Literal["any", "equal"] | None = None,
    seed: int = 0,
    dense_below: int = 1024,
    scaler: LossScale | None = None,
    optimizer: Given = None,
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
    overlap: bool | None = None,
    delay: Wait = 0,
    replicas: Literal["any", "equal"] | None = None,
    seed: int = 0,
    dense_below: int = 1024,
    scaler: LossScale | None = None,
    optimizer: Given = None,
    process_group: dist.ProcessGroup | None = None,
    inner_group: dist.ProcessGroup | None = None,
    steps: int | None = None,
    manager: Any = None,
    link: str | Link | None = None,
) -> BaseSession:
    """Train a model with a method; the training loop stays as it is.

        model = DistributedDataParallel(model)
        session = thinwire.attach(model, "qsgd(bits=4)", optimizer=optimizer)

    averages gradients during the backward pass. With AdamW, plain or fused, `adam` averages its momentum
    after some exact steps, in about a quarter of these bytes:

        session = thinwire.attach(model, "adam(warmup=400)", optimizer=optimizer)

    Schedules average parameters periodically. They take the
    optimizer and a bare model, or a DDP model, which then reduces no gradients:

        session = thinwire.attach(model, "pqasgd(every=8, bits=4)", optimizer=optimizer)

    Call it on every rank, before the first backward pass.

    DDP with find_unused_parameters ignores the result for a parameter that no rank has used in a step, even
    if the method has one (from a residual or an older upload).

    Args:
        model: the wrapped model (DDP or FSDP2); for a schedule also a bare one, which gets rank 0's
            parameters and buffers.
        method: a method string, its JSON, or an object such as `thinwire.methods.TopK(ratio=0.01)`; "auto"
            measures link and model in the first steps of a DDP model and picks one that suits the optimizer,
            and another one if the link changes (see `hosts/auto.py`).
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
            steps that it skips of each optimizer.
        optimizer: the optimizer in use, also as Accelerate or Lightning wrap it, or all that train the model,
            such as [muon, adamw]: a training step is complete when each has stepped once. Schedules and
            "auto" need it. A method with momentum of its own refuses an optimizer with momentum, `adam`
            needs AdamW. If replicas drift, the optimizers' states are averaged with them.
        process_group: for a schedule: the ranks to synchronise with; None is the default group, or DDP's. For
            an FSDP2 model: the ranks with the same shard in every replica, `mesh["replicate"].get_group()`;
            None if there is one replica only, sharded over all ranks (see the guide on FSDP2).
        inner_group: for `hierarchical`: the process group of this rank's host, if not consecutive ranks share
            hosts: `mesh["local"].get_group()` of a DeviceMesh, or one of `torch.distributed.new_subgroups`.
            Hosts have equally many ranks.
        steps: for `pqasgd`, `spasgd` and `localsgd`: the number of steps of the run, if it is known. Then a
            warning says whether their analysis covers it (see `thinwire.averaging.conditions`).
        manager: a `torchft.Manager`: average over its replica groups, which come and go, instead of over a
            process group. Methods then average gradients inside `manager.should_commit()`. The model is a
            bare one; in groups of several ranks, one that DDP or FSDP2 trains inside of each group (see the
            guide on torchft).
        link: the link by which the session chooses its operations, such as "100mbit,latency=5ms". None takes
            that of the environment variable THINWIRE_LINK, or measures it; see the guide on choosing.

    An option that the method would not use on this kind of model is refused, whatever its value. None says
    that an option is not given, and so does a delay of 0.
    """
    model = _without_compiler(model)
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"attach() takes a torch.nn.Module, not {type(cast(object, model)).__name__}")
    host = _host_of(model, process_group, manager)
    optimizers = list(Optimizers(optimizer))
    options: dict[str, Any] = {
        "overlap": overlap,
        "delay": delay or None,
        "replicas": replicas,
        "scaler": scaler,
        "optimizer": optimizers or None,
        "process_group": process_group,
        "inner_group": inner_group,
        "steps": steps,
        "manager": manager,
        "link": link,
    }
    given = {name for name, value in options.items() if value is not None}
    chosen = None if isinstance(method, str) and method.strip() == "auto" else _parsed(method)
    if chosen is None:
        kind: Kind = "auto"
    else:
        kind = "schedule" if isinstance(chosen, Schedule) else "gradients"
    check_host(kind, host, chosen or "auto", model)
    check_options(kind, host, chosen or "auto", given)
    if is_scheduled(model) or has_session(model) or (_is_fsdp(model) and _has_fsdp_session(model)):
        raise ConfigError("this model has a thinwire session already: detach() it first")
    common: dict[str, Any] = {"seed": seed, "dense_below": dense_below, "optimizer": optimizers}
    if chosen is None:
        check_auto(optimizers)
        common |= {"scaler": scaler, "overlap": overlap is not False, "replicas": replicas or "any"}
        return attach_auto(cast(DistributedDataParallel, model), **common)
    if isinstance(chosen, Exchange) and delay:
        chosen = Delayed(chosen, delay)
    check_method(chosen, host, given)
    if manager is not None:
        from thinwire.hosts.torchft import attach_managed

        return attach_managed(model, chosen, manager, **common)
    common |= {"scaler": scaler, "link": None if link is None else slowest_link(link)}
    if isinstance(chosen, Exchange) and _is_fsdp(model):
        from thinwire.hosts.fsdp import attach_fsdp

        return attach_fsdp(model, chosen, process_group, overlap=overlap is not False, **common)
    if isinstance(chosen, Exchange):
        ddp = cast(DistributedDataParallel, model)
        return attach_gradients(ddp, chosen, overlap=overlap is not False, inner_group=inner_group, **common)
    if _is_fsdp(model):
        from thinwire.hosts.fsdp import check_replicas

        check_replicas(model, cast(dist.ProcessGroup, process_group))
    groups = {"process_group": process_group, "inner_group": inner_group}
    return attach_schedule(model, chosen, steps=steps, **groups, **common)


def _parsed(method: str | Mapping[str, Any] | Exchange | Schedule) -> Exchange | Schedule:
    found = parse(method)
    if not isinstance(found, Exchange | Schedule):
        raise ConfigError(f"{found.name} is neither an exchange nor a schedule")
    return found


def _host_of(model: nn.Module, process_group: dist.ProcessGroup | None, manager: object) -> Host:
    if manager is not None:
        return "replica groups of torchft"
    if _is_fsdp(model):
        return "one replica of FSDP2" if process_group is None else "replicas of FSDP2"
    return "a DDP model" if isinstance(model, DistributedDataParallel) else "a bare model"


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
