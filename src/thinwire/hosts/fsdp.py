"""FSDP2 with replicas: the exchange between the replicas of a sharded model, shard by shard.

FSDP reduces and scatters the gradients inside each replica, over the shard mesh, and leaves every rank the
gradients of its shards. Hooks on the sharded parameters take them from there. A bucket has the parameters of
one FSDP module; the order of the buckets is fixed, so it is the same on all replicas.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from thinwire.core.agreement import digest_of
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.optimizers import Given, LossScale
from thinwire.core.routing import View
from thinwire.core.shards import is_sharded, local, named_shards, sharded_like
from thinwire.drivers.direct import Direct
from thinwire.drivers.lanes import Job, Lanes, Step, future_for
from thinwire.errors import ConfigError, ThinwireError
from thinwire.hosts.backward_pass import BackwardPass
from thinwire.hosts.ddp import session_with_driver
from thinwire.hosts.fsdp_scatter import attach_scatter
from thinwire.net import frames
from thinwire.net.costs import Link
from thinwire.net.executor import ProcessGroupExecutor
from thinwire.net.groups import private_groups
from thinwire.net.handshake import agree
from thinwire.net.meter import Meter
from thinwire.sessions.gradient import Session

_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def has_fsdp_session(model: nn.Module) -> bool:
    """Whether a session averages the gradients of this FSDP2 model."""
    return model in _attached


def attach_fsdp(
    model: nn.Module,
    exchange: Exchange,
    process_group: dist.ProcessGroup | None,
    *,
    overlap: bool,
    seed: int,
    dense_below: int,
    scaler: LossScale | None,
    optimizer: Given,
    link: Link | None = None,
) -> Session:
    """Average the shards' gradients over the replicas; the arguments are those of `thinwire.attach`.

    Without a group there is one replica, sharded over all ranks.
    """
    if process_group is None:
        session = attach_scatter(
            model,
            exchange,
            dict(_trained(model)),
            seed=seed,
            dense_below=dense_below,
            optimizer=optimizer,
            link=link,
        )
        _attached.add(model)
        session.on_detach(lambda: _attached.discard(model))
        return session
    check_gradients(exchange)
    parameters = sharded_parameters(model)
    check_replica_group(parameters.values(), process_group)
    session, driver = session_with_driver(
        parameters,
        exchange,
        process_group,
        overlap=overlap,
        seed=seed,
        dense_below=dense_below,
        scaler=scaler,
        optimizer=optimizer,
        link=link,
    )
    session.needs_forward("FSDP gathers parameters in it")
    host = _FsdpHost(session, _buckets(model, parameters), driver, overlap)
    handles: list[Any] = [p.register_post_accumulate_grad_hook(host.ready) for p in parameters.values()]
    handles.append(host.backward.watch(model))
    if session.reconcile_every is not None:
        # Before FSDP's own hook, which gathers the parameters.
        handles.append(model.register_forward_pre_hook(_reconciles(session), prepend=True))
    _attached.add(model)

    def detach() -> None:
        for handle in handles:
            handle.remove()
        host.close()
        _attached.discard(model)

    session.on_detach(detach)
    return session


def check_gradients(exchange: Exchange) -> None:
    """Refuse a method that needs a second gradient."""
    if exchange.traits.second_gradient:
        raise ConfigError(
            f"{exchange.name} compares gradients at two models, and an FSDP model cannot be computed at "
            "older parameters. The nearest method that works is 'laq', which compares with the last upload"
        )


def _reconciles(session: Session) -> Any:
    """If replicas drift: make them equal between two steps. Only in training: see `hosts/ddp.py`."""

    def hook(module: nn.Module, inputs: object) -> None:
        if module.training and torch.is_grad_enabled():
            session.reconcile(when_due=True)

    return hook


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that FSDP trains, by name and shard."""
    return cast("dict[str, nn.Parameter]", named_shards(_trained(model)))


def reshard(model: nn.Module) -> None:
    """Shard all parameters again: after an evaluation the root may still have whole ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that FSDP trains, by name; those that it was told to ignore are left alone."""
    reshard(model)
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad and is_sharded(p)]
    for name, parameter in found:
        placements = cast(Any, parameter).placements
        if len(placements) > 1 and placements[0].is_replicate():
            raise ConfigError(
                f"{name!r} is sharded over a mesh with replicas, and FSDP itself averages between them: "
                "thinwire cannot take its place. Shard over the second dimension alone, fully_shard(model, "
                'mesh=mesh["shard"]), and attach(model, method, process_group=mesh["replicate"].get_group())'
            )
    if not found:
        raise ConfigError("FSDP trains no parameter of this model")
    return found


def check_replicas(model: nn.Module, group: dist.ProcessGroup) -> None:
    """For schedules, which average the shards of several replicas."""
    check_replica_group(sharded_parameters(model).values(), group)


def check_replica_group(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Refuse a group in which two ranks hold different shards of one replica."""
    ranks, me = set(dist.get_process_group_ranks(group)), dist.get_rank()
    for mesh in _meshes(parameters):
        both = sorted(ranks & set(cast("list[int]", mesh.mesh.flatten().tolist())) - {me})
        if both:
            raise ConfigError(
                f"rank {both[0]} is in process_group, and it holds another shard of this rank's replica. "
                "process_group has the ranks with the same shard of each replica: "
                'mesh["replicate"].get_group()'
            )


def _meshes(parameters: Iterable[torch.Tensor]) -> list[Any]:
    return list(dict.fromkeys(cast(Any, p).device_mesh for p in parameters if is_sharded(p)))


@dataclass(eq=False)
class _Bucket:
    """The parameters of one FSDP module, of one type."""

    parameters: dict[str, nn.Parameter]
    missing: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Zeros, then their results, for parameters that had no gradient in this step."""


def _buckets(model: nn.Module, parameters: dict[str, nn.Parameter]) -> list[_Bucket]:
    """In the order of a usual backward pass: modules last to first, and what is the root's own at the end."""
    name_of = {id(p): name for name, p in parameters.items()}
    buckets: list[_Bucket] = []
    for module in reversed(list(model.modules())):
        if not isinstance(module, FSDPModule):
            continue
        own = [p for p in module.parameters() if id(p) in name_of]
        for _, alike in groupby(sorted(own, key=_kind), key=_kind):
            buckets.append(_Bucket({name_of.pop(id(p)): p for p in alike}))
    return buckets


def _kind(parameter: nn.Parameter) -> str:
    return f"{parameter.dtype} {parameter.device}"


class _FsdpHost:
    """Submits each bucket to the lanes when its last gradient is there, and waits for all of them."""

    def __init__(
        self, session: Session, buckets: list[_Bucket], driver: Lanes | Direct, overlap: bool
    ) -> None:
        self._session = session
        self._engine = session.engine
        self._driver = driver
        self._overlap = overlap and self._engine.method.traits.scope != "model"
        self._buckets = buckets
        self._number_of = {
            id(p): number for number, bucket in enumerate(buckets) for p in bucket.parameters.values()
        }
        self._shards = [
            ProcessGroupExecutor(private_groups(group, 1)[0], Meter())
            for mesh in _meshes(p for bucket in buckets for p in bucket.parameters.values())
            for group in cast("list[dist.ProcessGroup]", mesh.get_all_groups())
        ]
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._compared = False
        self._unused: bool | None = None  # whether parameters can be without a gradient; None: not known yet
        self.backward = BackwardPass(self._forget, self._ends)  # what is forgotten is of a pass that failed
        self._step: Step | None = None
        self._arrived: dict[int, int] = {}  # gradients of each parameter in this step
        self._expected: dict[int, int] = {}  # and in the step before
        self._submitted = 0
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        self._errors: list[BaseException] = []

    def close(self) -> None:
        self._driver.close()
        for executor in self._shards:
            executor.close()

    # -- the backward pass -----------------------------------------------------------------------------

    def ready(self, parameter: torch.Tensor) -> None:
        """The gradient of a shard is there."""
        self.backward.ensure_begun()
        try:
            if self._step is None:
                self._begin_step()
            self._arrived[id(parameter)] = self._arrived.get(id(parameter), 0) + 1
            if self._number_of[id(parameter)] < self._submitted:
                raise ThinwireError(
                    "a module was used more often than in the step before, so its gradient was sent too "
                    "early: attach with overlap=False"
                )
            if self._overlap and self._expected:
                self._submit_complete()
        except BaseException as error:
            self._fail(error)
            raise

    def _begin_step(self) -> None:
        self._compare_replicas()
        self._step = Step(self._engine.end_step)
        self._engine.begin_step()

    def _submit_complete(self) -> None:
        """In order, the buckets whose parameters have as many gradients as in the step before.

        A module that is used repeatedly in a step gives its parameters several.
        """
        while self._submitted < len(self._buckets):
            bucket = self._buckets[self._submitted]
            for parameter in bucket.parameters.values():
                if self._arrived.get(id(parameter), 0) < self._expected.get(id(parameter), 1):
                    return
            self._submit([bucket])

    def _ends(self) -> None:
        """After FSDP's own callback, with which the last gradients come. All is final when this returns."""
        step = self._step
        try:
            if step is None:  # a pass without synchronisation, or without these parameters
                return
            rest = self._buckets[self._submitted :]
            if self._engine.method.traits.scope == "model":
                self._submit(rest)
            else:
                for bucket in rest:
                    self._submit([bucket])
            finite = not self._engine.remembers or self._finite_on_all_shards(step)
            self._step = None
            step.close(finite)
            for future in self._futures:
                future.wait()
            if self._errors:
                raise self._errors[0]
            self._fill_in_missing()
            self._expected = self._arrived
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._forget()

    def _finite_on_all_shards(self, step: Step) -> bool:
        """A step is committed by all shards of the model, or by none."""
        finite = step.finite_so_far()
        if self._errors:
            raise self._errors[0]
        for executor in (*self._shards, *self._shards[-2::-1]):
            bad = torch.tensor([float(not finite)])
            executor.execute(frames.AllReduce(bad, 0))
            finite = not float(bad)
        return finite

    def _fill_in_missing(self) -> None:
        """Give the mean to parameters without a gradient here, if another replica has one.

        The first step shows whether there are such parameters; only then the replicas tell each other in
        every step, in a small round of its own.
        """
        parameters = {name: p for bucket in self._buckets for name, p in bucket.parameters.items()}
        missing = {name: mean for bucket in self._buckets for name, mean in bucket.missing.items()}
        if self._unused is False:
            if missing:
                raise ThinwireError(
                    f"{min(missing)!r} has no gradient in this step, and in the first one every parameter "
                    "had one on every replica. Call model.set_reduce_scatter_unused_params(True), which "
                    "makes it zero"
                )
            return
        holders = torch.tensor([float(name not in missing) for name in parameters])
        self._engine.executor.execute(frames.AllReduce(holders, 0))
        self._unused = bool((holders < self._engine.rank_info.size).any())
        for (name, parameter), count in zip(
            parameters.items(), cast("list[float]", holders.tolist()), strict=True
        ):
            if name in missing and count:
                _add(missing[name], parameter)

    def _fail(self, error: BaseException) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.fail(error)

    def _forget(self) -> None:
        self._fail(ThinwireError("the backward pass was given up"))
        self._arrived = {}
        self._submitted = 0
        self._futures, self._errors = [], []
        for bucket in self._buckets:
            bucket.missing = {}

    def _compare_replicas(self) -> None:
        """Once: nobody else would notice that the replicas have begun with different parameters."""
        if self._compared:
            return
        self._compared = True
        shards = [local(p) for bucket in self._buckets for p in bucket.parameters.values()]
        group = self._engine.executor.group
        said = {
            "values of the parameters (load the same checkpoint, or set the same seed)": digest_of(shards)
        }
        agree(said, ProcessGroupExecutor(group, Meter()).execute, dist.get_process_group_ranks(group))

    # -- buckets ---------------------------------------------------------------------------------------

    def _submit(self, buckets: Sequence[_Bucket]) -> None:
        assert self._step is not None
        views = [view for bucket in buckets for view in self._views(bucket)]
        future, errors = future_for(views[0].x.device), self._errors
        self._futures.append(future)

        def done(error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            future.set_result(views[0].out)

        job = Job(self._engine.program(views), self._step, done, views[0].x.device)
        self._driver.submit(self._submitted, job)
        self._submitted += len(buckets)

    def _views(self, bucket: _Bucket) -> list[View]:
        """Gradients that are neighbours in memory, as FSDP leaves them, become one view."""
        gradients = {name: self._gradient(bucket, name, p) for name, p in bucket.parameters.items()}
        views: list[View] = []
        for names in _neighbours(gradients):
            layout = self._layouts.get(names)
            if layout is None:
                layout = self._layouts[names] = self._engine.layout(names, gradients[names[0]].device)
            first = gradients[names[0]]
            flat = first if len(names) == 1 else first.as_strided((layout.numel,), (1,))
            views.append(View(layout, flat, flat))
        return views

    def _gradient(self, bucket: _Bucket, name: str, parameter: nn.Parameter) -> torch.Tensor:
        if id(parameter) in self._arrived and parameter.grad is not None:
            return local(parameter.grad).view(-1)
        # No gradient here, but another replica may have one: it counts as zeros, and takes part.
        zeros = bucket.missing[name] = torch.zeros_like(
            local(parameter), memory_format=torch.contiguous_format
        )
        return zeros.view(-1)


def _neighbours(gradients: dict[str, torch.Tensor]) -> Iterator[tuple[str, ...]]:
    """The names, in lists whose tensors are one stretch of memory each."""
    names: list[str] = []
    end = 0
    for name, flat in gradients.items():
        if names and (flat.data_ptr() != end or not _same_memory(gradients[names[0]], flat)):
            yield tuple(names)
            names = []
        names.append(name)
        end = flat.data_ptr() + flat.numel() * flat.element_size()
    yield tuple(names)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _add(mean: torch.Tensor, parameter: nn.Parameter) -> None:
    if parameter.grad is None:
        parameter.grad = sharded_like(mean, parameter)
    else:
        local(parameter.grad).add_(mean)
