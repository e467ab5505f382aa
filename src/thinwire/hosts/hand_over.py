"""From one session to the next of the same model: all replicas are equal then, and residuals are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
from torch.utils.hooks import RemovableHandle

from thinwire import log
from thinwire.core.config import Configured
from thinwire.core.exchange import Exchange
from thinwire.core.optimizers import LossScale, Optimizers
from thinwire.core.state import SavedState
from thinwire.predict.families import same_family
from thinwire.sessions.gradient import Session
from thinwire.sessions.periodic import PeriodicSession
from thinwire.sessions.replicas import Replicas


def leave(
    session: Session | PeriodicSession,
    following: Configured,
    optimizers: Optimizers,
    scaler: LossScale | None,
) -> dict[str, torch.Tensor]:
    """Before a session ends: make the replicas equal. Returns what the next gradients have to carry.

    These are the residuals of gradients, and with a delay the means that no optimizer has seen yet, flat, by
    parameter. Call it on every rank, between two steps.

    A schedule that another period follows only synchronises: `go_on` carries over the rest.
    """
    if isinstance(session, PeriodicSession) and same_family(session.method, following):
        session.sync()
        return {}
    if isinstance(session, PeriodicSession):
        _flush(session, optimizers)
        return {}
    residuals = session.residuals()
    if _of_momenta(session.method) != _of_momenta(following):
        norm = math.hypot(*(float(residual.norm()) for residual in residuals.values()))
        if norm and session.engine.speaks:
            log.warning(
                "the residual of %s ends with it (norm %.3g on this rank): one of momenta does not fit %s",
                session.method,
                norm,
                following,
            )
        return {}
    scale = 1.0 if scaler is None else float(scaler.get_scale())
    return {name: residual * (scale / session.engine.scale) for name, residual in residuals.items()}


@torch.no_grad()
def go_on(before: PeriodicSession, after: PeriodicSession) -> None:
    """Continue a schedule that has synchronised with another period or other fragments.

    Steps are counted on, so a warm-up is not repeated, and what it measured stays. Residuals and the outer
    momentum stay as well, and the optimizer's state is each rank's own as before.
    """
    for counter in ("step", "start", "cycle", "synced"):
        setattr(after.clock, counter, getattr(before.clock, counter))
    after.sync_rounds, after.aborted = before.sync_rounds, before.aborted
    kept = before.engine.states.save()
    after.engine.states.load(SavedState(kept.additive, kept.shared, {}))
    for fragment in after.fragments:
        after.engine.make_states(fragment.layouts)
    momenta = _outer_momenta(before)
    for name, momentum in _outer_momenta(after).items():
        momentum.copy_(momenta[name])
    if before.gradient_warmup is not None and after.gradient_warmup is not None:
        after.gradient_warmup.go_on(before.gradient_warmup)


def _outer_momenta(session: PeriodicSession) -> dict[str, torch.Tensor]:
    return {
        name: part
        for block in session.blocks
        if block.velocity is not None
        for name, part in zip(block.layout.names, block.layout.parts(block.velocity), strict=True)
    }


def _of_momenta(method: Configured) -> bool:
    return isinstance(method, Exchange) and method.traits.optimizer == "Adam"


@torch.no_grad()
def _flush(session: PeriodicSession, optimizers: Optimizers) -> None:
    """Synchronise, apply what has not been sent, and average the optimizers' state, all of it exactly."""
    session.sync()
    residuals = session.residuals()
    for block in session.blocks:
        values = block.anchor.clone()
        for slot, part in zip(block.layout.slots, block.layout.parts(values), strict=True):
            if slot.name in residuals:
                part.sub_(residuals[slot.name].view(-1))
        block.write(values)
    replicas = Replicas(session.parameters, optimizers)
    session.run(replicas.reconcile(session.rank_info, session.step, session.engine.link))
    if session.method.outer.momentum and session.speaks:
        log.info("the outer momentum of %s ends with it", session.method)


class Carried:
    """Tensors that are added to the next gradients of this rank, each to the next one of its parameter."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        self._left = dict(tensors)
        self._handles: list[RemovableHandle] = [
            cast(RemovableHandle, parameters[name].register_hook(partial(self._added, name)))
            for name in tensors
        ]

    @property
    def left(self) -> bool:
        """Whether a tensor has not been added yet."""
        return bool(self._left)

    def _added(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        carried = self._left.pop(name, None)
        return gradient if carried is None else gradient + carried.view_as(gradient).to(gradient.dtype)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
