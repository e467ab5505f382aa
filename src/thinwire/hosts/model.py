"""Periodic averaging of a model: the session is called after every optimizer step. DDP is not needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import log
from thinwire.averaging.analysis import conditions, is_analysed
from thinwire.averaging.base import Schedule
from thinwire.core import checks
from thinwire.core.optimizers import Given, LossScale
from thinwire.errors import ConfigError
from thinwire.net.costs import Link
from thinwire.sessions.periodic import PeriodicSession
from thinwire.sessions.replicas import bare

_scheduled: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_scheduled(model: nn.Module) -> bool:
    """Whether a schedule averages this model's parameters."""
    return bare(model) in _scheduled


def attach_schedule(
    model: nn.Module,
    method: Schedule,
    optimizer: Given,
    *,
    seed: int,
    dense_below: int,
    scaler: LossScale | None,
    process_group: dist.ProcessGroup | None,
    inner_group: dist.ProcessGroup | None,
    steps: int | None,
    link: Link | None = None,
) -> PeriodicSession:
    """Synchronise the replicas after the optimizer steps that `method` asks for."""
    if steps is not None:
        checks.whole("attach", "steps", steps, 1)
    if scaler is not None and method.gradient_warmup and method.warmup:
        raise ConfigError(
            f"{method.name} averages gradients in its warm-up, where a GradScaler would skip steps on single "
            "ranks: train in bfloat16 without a scaler, or take warmup=0"
        )
    if isinstance(model, DistributedDataParallel):
        process_group = process_group or cast(dist.ProcessGroup, model.process_group)
    module = bare(model)
    session = PeriodicSession(
        module,
        method,
        optimizer,
        process_group,
        seed=seed,
        dense_below=dense_below,
        inner_group=inner_group,
        link=link,
    )
    if isinstance(model, DistributedDataParallel):
        session.on_detach(silence(model))
    session.on_detach(watch_steps(session, scaler))
    _scheduled.add(module)
    session.on_detach(lambda: _scheduled.discard(module))
    _tell_conditions(session, steps)
    return session


def _tell_conditions(session: PeriodicSession, steps: int | None) -> None:
    """One line on rank 0: a warning if the analysis of the method does not cover what it is asked to do."""
    size = session.rank_info.size
    if session.speaks and size > 1 and is_analysed(session.method):
        found = conditions(session.method, size, steps)
        (log.warning if found.met is False else log.info)("%s", found)


def watch_steps(session: PeriodicSession, scaler: LossScale | None = None) -> Callable[[], None]:
    """Call the session before and after every training step; returns how to stop it."""
    return session.optimizers.watch(
        before=session.before_step if session.method.gradient_warmup else None,
        each=session.after_optimizer,
        after=session.after_step,
        scaler=scaler,
    )


def silence(model: DistributedDataParallel) -> Callable[[], None]:
    """While the session lasts, DDP reduces no gradients and broadcasts no buffers, as under `no_sync()`."""
    ddp = cast(Any, model)
    before = ddp.require_backward_grad_sync
    ddp.require_backward_grad_sync = False
    ddp.require_forward_param_sync = False

    def restore() -> None:
        ddp.require_backward_grad_sync = before
        ddp.require_forward_param_sync = True

    return restore
