"""FSDP2 with one replica, sharded over all ranks: a compressed reduce-scatter in place of FSDP's own.

Each FSDP module hands over its gradients in one buffer, with one piece per rank, and gets the mean of this
rank's piece. FSDP waits for it, as on the CPU it waits for its own reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from thinwire.core.exchange import Exchange
from thinwire.core.optimizers import Given, Optimizers
from thinwire.core.shards import local
from thinwire.errors import ConfigError, ThinwireError
from thinwire.hosts.backward_pass import BackwardPass
from thinwire.methods.registry import list_methods
from thinwire.net.costs import Link
from thinwire.sessions.gradient import Session

HYBRID = (
    'With replicas every method works: fully_shard(model, mesh=mesh["shard"]) and attach(model, method, '
    'process_group=mesh["replicate"].get_group())'
)


def check_scatters(exchange: Exchange) -> None:
    """Refuse a method that cannot serve a reduce-scatter, with the reason and the nearest one that can."""
    if exchange.traits.scatters:
        return
    why = "it needs every tensor whole, on all ranks"
    if exchange.traits.conserves:
        why = "its residual is as large as the whole model, which no rank of a sharded one has"
    nearest = "signsgd" if exchange.family == "quantised" else "qsgd(bits=4)"
    others = [name for name, cls in list_methods().items() if cls().traits.scatters]
    raise ConfigError(
        f"{exchange.name} cannot reduce and scatter the gradients of a model that is sharded over all ranks: "
        f"{why}. The nearest method that works is {nearest!r}; those that work are {', '.join(others)}. "
        f"{HYBRID}"
    )


def attach_scatter(
    model: nn.Module,
    exchange: Exchange,
    parameters: dict[str, nn.Parameter],
    *,
    seed: int,
    dense_below: int,
    optimizer: Given,
    link: Link | None = None,
) -> Session:
    """Replace the reduce-scatter of every FSDP module; the arguments are those of `thinwire.attach`."""
    meshes = {cast(Any, p).device_mesh for p in parameters.values()}
    mesh = meshes.pop()
    if meshes or mesh.ndim != 1:
        raise ConfigError("FSDP shards this model over several meshes or dimensions: only one is supported")
    if mesh.size() < dist.get_world_size():
        raise ConfigError(
            f"this model is sharded over {mesh.size()} of {dist.get_world_size()} ranks: give process_group, "
            'the ranks with the same shard of each replica, such as mesh["replicate"].get_group()'
        )
    check_scatters(exchange)
    Optimizers(optimizer).check_all_held(parameters)
    # The whole tensors are described, without memory: all ranks have a part in each of them.
    whole = {
        name: torch.empty((), dtype=p.dtype, device=p.device).expand(p.shape)
        for name, p in parameters.items()
    }
    group = cast(dist.ProcessGroup, mesh.get_group())
    session = Session(
        whole.items(),
        exchange,
        group,
        seed=seed,
        dense_below=dense_below,
        optimizer=optimizer,
        link=link,
    )
    session.needs_forward("FSDP gathers parameters in it")
    # Empty ones, but a checkpoint has to have them.
    session.engine.make_states([session.engine.layout([name], p.device) for name, p in parameters.items()])
    switch = _Switch(session, parameters)
    handle = switch.backward.watch(model)
    session.on_detach(handle.remove)
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(module, FSDPModule):
            try:
                module.set_custom_reduce_scatter(cast(Any, _Scatter(name, switch)))
            except ValueError as error:
                switch.session = None
                session.detach()
                raise ConfigError(f"FSDP takes no other reduce-scatter for {name!r}: {error}") from error
    session.on_detach(switch.off)
    return session


class _Switch:
    """Whether the session serves the modules: FSDP keeps a custom reduce-scatter for good."""

    def __init__(self, session: Session, parameters: Mapping[str, nn.Parameter]) -> None:
        self.session: Session | None = session
        self.backward = BackwardPass(self._forget, self._ends)
        self._parameters = parameters
        self._in_step = False

    def off(self) -> None:
        self.session = None

    def begin(self, session: Session) -> None:
        """Count a step with the first buffer of a backward pass; it ends with the pass."""
        self.backward.ensure_begun()
        if not self._in_step:
            self._in_step = True
            session.engine.begin_step()

    def _forget(self) -> None:
        """A pass has failed: what it has averaged is no step."""
        if self.session is not None and self._in_step:
            self.session.engine.scattered_finite()
        self._in_step = False

    def _ends(self) -> None:
        """Every rank has heard of the same numbers, so all decide alike, without a round of their own."""
        if self.session is None or not self._in_step:
            return
        self._in_step = False
        committed = self.session.engine.scattered_finite()
        for parameter in () if committed else self._parameters.values():
            if parameter.grad is not None:  # FSDP has it already
                local(parameter.grad).fill_(torch.nan)
        self.session.engine.end_step(committed)


class _Scatter:
    """What FSDP calls in place of its own reduce-scatter (its abstract class `ReduceScatter`)."""

    def __init__(self, name: str, switch: _Switch) -> None:
        self._name = name
        self._switch = switch

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        session = self._switch.session
        if session is None:
            return _plain(output_tensor, input_tensor, group, op, async_op)
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ThinwireError(
                "thinwire averages: it cannot follow set_gradient_divide_factor; scale the loss instead"
            )
        self._switch.begin(session)
        pieces = list(input_tensor.view(session.rank_info.size, -1))
        session.run(session.engine.scatter_program(self._name, pieces, output_tensor))
        if op == dist.ReduceOp.SUM:  # FSDP divides by itself
            output_tensor.mul_(session.rank_info.size)
        return None


def _plain(
    output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool
) -> Any:
    # torch 2.13 renames reduce_scatter_tensor; older releases know only the old name.
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    return getattr(dist, name)(output, given, group=group, op=op, async_op=async_op)
