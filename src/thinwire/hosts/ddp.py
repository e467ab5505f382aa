"""DistributedDataParallel: a communication hook submits every bucket to the lanes."""

# No `from __future__ import annotations` here: DDP inspects the hook's annotations and refuses strings.
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.core.engine import Engine
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.measured_link import Buckets
from thinwire.core.optimizers import Given, LossScale
from thinwire.core.routing import View
from thinwire.drivers.behind import Behind, Delivered
from thinwire.drivers.direct import Direct
from thinwire.drivers.lanes import Job, Lanes, Step, future_for
from thinwire.errors import ConfigError, ThinwireError
from thinwire.net.costs import Link
from thinwire.net.liveness import is_of_the_network
from thinwire.sessions.gradient import Session

LANES = 2


class _Switch:
    """The state of the hook. DDP takes one hook for life, so detaching and attaching again changes this."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.host: _DdpHost | None = None


_switches: "weakref.WeakKeyDictionary[DistributedDataParallel, _Switch]" = weakref.WeakKeyDictionary()


def thinwire_hook(state, bucket):  # pyright: ignore[reportUnknownParameterType, reportMissingParameterType]
    """The function DDP calls with each bucket that is ready."""
    switch, grads = cast(_Switch, state), cast(dist.GradBucket, bucket)
    if switch.host is None:
        tensor = grads.buffer().div_(switch.group.size())
        work = cast(Any, dist.all_reduce(tensor, group=switch.group, async_op=True))
        return work.get_future().then(_first)
    return switch.host.take(grads)


def _first(done: Any) -> torch.Tensor:
    return done.value()[0]


def has_session(model: torch.nn.Module) -> bool:
    """Whether a session averages this model's gradients."""
    switch = _switches.get(model) if isinstance(model, DistributedDataParallel) else None
    return switch is not None and switch.host is not None


def attach_gradients(
    model: DistributedDataParallel,
    exchange: Exchange,
    *,
    overlap: bool,
    seed: int,
    dense_below: int,
    scaler: LossScale | None,
    optimizer: Given,
    inner_group: dist.ProcessGroup | None = None,
    link: Link | None = None,
) -> Session:
    """Average a DDP model's gradients; the arguments are those of `thinwire.attach`."""
    if getattr(model, "mixed_precision", None) is not None:
        raise ConfigError("DDP's own mixed_precision installs a hook of its own: use torch.autocast instead")
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError(
            'torch._dynamo.config.optimize_ddp is "python_reducer": DDP then hands over single gradients '
            "instead of buckets. Leave it at True, the default, where the model is wrapped in DDP; "
            "torch.compile works with that"
        )
    switch = _switches.get(model)
    if has_session(model):
        raise ConfigError("this model has a thinwire session already: detach() it first")
    if switch is None and cast(Any, model)._comm_hooks:
        raise ConfigError("this model has a communication hook already, and DDP takes only one")
    names = _names(model)
    group = cast(dist.ProcessGroup, model.process_group)
    session, driver = session_with_driver(
        names,
        exchange,
        group,
        overlap=overlap,
        seed=seed,
        dense_below=dense_below,
        scaler=scaler,
        optimizer=optimizer,
        inner_group=inner_group,
        link=link,
    )
    host = _DdpHost(session.engine, names, driver)
    if session.behind is not None:
        host = _DelayedHost(session.engine, names, session.behind)
    host.looks_for_unused = model.find_unused_parameters
    if switch is None:
        switch = _Switch(group)
        model.register_comm_hook(switch, thinwire_hook)
        _name_failures(model, switch)
        _switches[model] = switch
    switch.host = host
    handle = _reconcile_before_forward(model, session)
    if model.broadcast_buffers and list(cast(torch.nn.Module, model.module).buffers()):
        session.needs_forward("DDP broadcasts buffers in it; construct it with broadcast_buffers=False")
    if model.find_unused_parameters:
        session.needs_forward("DDP looks for unused parameters; use find_unused_parameters=False")
    session.on_detach(lambda: _detach(switch, handle))
    return session


def session_with_driver(
    parameters: Mapping[str, torch.Tensor],
    exchange: Exchange,
    group: dist.ProcessGroup,
    *,
    overlap: bool,
    **options: Any,
) -> tuple[Session, Lanes | Direct]:
    """A session for a backward pass, and what runs its programs; the options are those of `Session`."""
    on_gloo = dist.get_backend(group) == "gloo"
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters.values())
    if exchange.traits.delayed and not overlap:
        raise ConfigError(f"{exchange} works during the next step: leave overlap=False out")
    direct = overlap and on_gloo and on_cpu and exchange.traits.single_mean
    # Communicators of NCCL must not run side by side in an order that may differ between ranks.
    lanes = LANES if overlap and on_gloo and not direct else 1
    session = Session(parameters.items(), exchange, group, lanes=lanes, **options)
    if session.behind is not None:
        return session, session.behind.lanes
    executors = session.engine.executors
    return session, Direct(executors[0]) if direct else Lanes(executors, overlap=overlap)


def _name_failures(model: DistributedDataParallel, switch: _Switch) -> None:
    """Let an error of DDP's own communication name the ranks that are missing, as those of the session do.

    DDP compares its buckets before the second step, and broadcasts buffers before every one.
    """
    if "forward" in vars(model):  # somebody else's
        return
    # A model that referred to itself would outlive its last use, with its process groups.
    forward = weakref.WeakMethod(cast("Callable[..., Any]", model.forward))

    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return cast("Callable[..., Any]", forward())(*args, **kwargs)
        except RuntimeError as error:
            if switch.host is None or not switch.host.engine.executors or not is_of_the_network(error):
                raise
            raise switch.host.engine.executor.diagnose("the forward pass", error) from error

    model.forward = named


def _reconcile_before_forward(model: DistributedDataParallel, session: Session) -> RemovableHandle | None:
    """If replicas drift: reconcile them between two steps, so that gradients belong to the reconciled model.

    This happens only before a training forward pass: an evaluation may run on one rank alone.
    """
    if session.reconcile_every is None:
        return None

    def hook(module: torch.nn.Module, inputs: object) -> None:
        if module.training and torch.is_grad_enabled():
            session.reconcile(when_due=True)

    return model.register_forward_pre_hook(hook)


def _detach(switch: _Switch, handle: RemovableHandle | None) -> None:
    if handle is not None:
        handle.remove()
    host, switch.host = switch.host, None
    if host is not None:
        host.lanes.close()


def _names(model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """The parameters DDP reduces, by name; a tied parameter appears once."""
    ignored = set(cast("list[str]", getattr(model, "parameters_to_ignore", ())))
    parameters = cast("Iterable[tuple[str, torch.nn.Parameter]]", model.module.named_parameters())
    return {
        name: parameter for name, parameter in parameters if parameter.requires_grad and name not in ignored
    }


def _value(done: "torch.futures.Future[torch.Tensor]") -> torch.Tensor:
    return done.value()


def _raise_after_backward(
    errors: list[BaseException], first: "Sequence[torch.futures.Future[torch.Tensor]]" = ()
) -> None:
    """Let `backward()` raise the first of `errors`; call this with the last bucket.

    DDP would keep only the text of an error. The callback queues itself a second time, to run after DDP's own
    callback, which unpacks the buckets as they arrive: waiting for all of them first would cost that overlap.
    With an earlier bucket it could run too early, in a backward pass inside this one (a reentrant
    checkpoint).

    The futures `first` are waited for all the same: DDP's callback would raise an error of its own.
    """
    engine = cast(Any, torch.autograd.Variable)._execution_engine

    def behind_ddp() -> None:
        if errors:
            raise errors[0]

    def before_ddp() -> None:
        for future in first:
            future.wait()
        if first:
            behind_ddp()
        engine.queue_callback(behind_ddp)

    engine.queue_callback(before_ddp)


class _DdpHost:
    """Gives each bucket a future and submits it to the lanes."""

    def __init__(self, engine: Engine, names: dict[str, torch.Tensor], lanes: Lanes | Direct) -> None:
        self.engine = engine
        self.lanes = lanes
        self._name_of = {id(parameter): name for name, parameter in names.items()}
        self._parameters = names  # keeps the ids valid
        self._step: Step | None = None
        self._held: list[tuple[View, torch.futures.Future[torch.Tensor]]] = []
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._known: set[tuple[int, int]] = set()
        self._errors: list[BaseException] = []
        self.looks_for_unused = False
        """Whether DDP sums up, beside the buckets, which parameters were used."""
        self._awaited: list[torch.futures.Future[torch.Tensor]] = []
        self._in_backward = False
        self._plain = engine.method.traits.exact_mean
        self._whole_model = any(exchange.traits.scope == "model" for exchange in engine.exchanges)
        self._next_lane = 0
        self._last_done = 0.0
        self._taken = 0
        self._buckets = None if self._plain else _buckets_of(engine)
        self._merges = False

    def take(self, bucket: dist.GradBucket) -> "torch.futures.Future[torch.Tensor]":
        if self._step is None:
            self._step = Step(self.engine.end_step)
            self._next_lane = 0
            self._errors, self._awaited = [], []
            if self._buckets is not None and self._taken:
                self._buckets.count = self._taken
            self._taken = 0
            # Under `join()` a rank that has finished early calls the hook outside any backward pass.
            self._in_backward = cast(Any, torch)._C._current_graph_task_id() >= 0
            self.engine.begin_step()
            self._merges = self._whole_model or (self._buckets is not None and self._buckets.merged)
        step = self._step
        try:
            return self._take(step, bucket)
        except BaseException as error:  # DDP gives up this backward pass; nothing of it may linger
            self._step, self._held = None, []
            step.fail(error)
            raise

    def _take(self, step: Step, bucket: dist.GradBucket) -> "torch.futures.Future[torch.Tensor]":
        last, lanes = bucket.is_last(), self.lanes
        self._taken += 1
        if self._plain and self._in_backward and isinstance(lanes, Direct):
            future = lanes.mean(self._checked(bucket), step, self._errors)
        else:
            view = self._view(bucket)
            future = future_for(view.x.device)
            self._hand_over(step, view, future, last)
        if self.looks_for_unused:
            self._awaited.append(future)
        if last:
            self._step = None
            step.close()
            if self._in_backward:
                _raise_after_backward(self._errors, self._awaited)
        # Only a callback's exception is a failure to DDP; it takes the one that `set_exception` leaves in a
        # future for a gradient.
        return future if self._in_backward else future.then(_value)

    def _hand_over(
        self, step: Step, view: View, future: "torch.futures.Future[torch.Tensor]", last: bool
    ) -> None:
        if self._merges:
            self._held.append((view, future))
            if last:
                held, self._held = self._held, []
                self._submit(step, held)
        else:
            self._submit(step, [(view, future)])

    def _submit(self, step: Step, buckets: list[tuple[View, "torch.futures.Future[torch.Tensor]"]]) -> None:
        done = self._deliver(buckets)
        lane = self._next_lane
        self._next_lane += 1
        program = self.engine.program([view for view, _ in buckets])
        self.lanes.submit(lane, Job(program, step, done, buckets[0][0].x.device))

    def _deliver(self, buckets: list[tuple[View, "torch.futures.Future[torch.Tensor]"]]) -> Delivered:
        """Completes the futures of these buckets."""
        errors, in_backward = self._errors, self._in_backward

        def done(error: BaseException | None, means: Sequence[torch.Tensor] = ()) -> None:
            if error is not None:
                errors.append(error)
            self._last_done = time.perf_counter()
            for (view, future), mean in zip(buckets, means or [view.out for view, _ in buckets], strict=True):
                if error is None:
                    future.set_result(mean)  # DDP copies it to the gradients, if it is not the bucket's own
                elif in_backward:  # `backward()` is about to raise; nobody shall take this for a gradient
                    future.set_result(view.out.fill_(torch.nan))
                else:
                    cast(Any, future).set_exception(error)

        return done

    def _checked(self, bucket: dist.GradBucket) -> torch.Tensor:
        """The memory of a bucket. Where only its length counts, its parameters are looked at once."""
        buffer = bucket.buffer()
        key = (bucket.index(), buffer.numel())
        if key not in self._known:
            self._view(bucket)
            self._known.add(key)
        return buffer

    def _view(self, bucket: dist.GradBucket) -> View:
        buffer, parameters = bucket.buffer(), bucket.parameters()
        key = tuple(map(id, parameters))
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._layout(buffer, parameters)
        return View(layout, buffer, buffer)

    def _layout(self, buffer: torch.Tensor, parameters: list[torch.Tensor]) -> Layout:
        if buffer.is_sparse:
            raise ThinwireError(
                "a bucket holds a sparse gradient (an Embedding with sparse=True): thinwire averages dense "
                "gradients only; construct the layer with sparse=False"
            )
        names = [self._name_of.get(id(parameter), "") for parameter in parameters]
        if "" in names:
            raise ThinwireError(
                "DDP averages a parameter that was frozen or not there at attach: freeze parameters before "
                "the model is wrapped in DistributedDataParallel, and attach after both"
            )
        layout = self.engine.layout(names, buffer.device)
        if layout.numel != buffer.numel():
            raise ThinwireError(f"a bucket of {buffer.numel()} entries has parameters for {layout.numel}")
        return layout


def _buckets_of(engine: Engine) -> Buckets | None:
    """If the link is measured: decides whether buckets are exchanged together.

    Only where that changes no state: an exchange sees one tensor at a time, or is a mean without state.
    """
    apart = all(e.traits.single_mean or not e.traits.elementwise for e in engine.exchanges)
    if engine.measured is None or not apart or any(e.traits.scope != "tensor" for e in engine.exchanges):
        return None
    engine.measured.buckets = Buckets()
    return engine.measured.buckets


class _DelayedHost(_DdpHost):
    """Gives the buckets of a delayed step the means of the step before; other steps are as without delay."""

    def __init__(self, engine: Engine, names: dict[str, torch.Tensor], behind: Behind) -> None:
        super().__init__(engine, names, behind.lanes)
        self._behind = behind
        self._begun = False
        self._delayed = False
        self._last_bucket = 0.0

    def take(self, bucket: dist.GradBucket) -> "torch.futures.Future[torch.Tensor]":
        waiting, last = self._behind.waiting, bucket.is_last()
        if not self._begun:
            if waiting is not None and not self._delayed:
                waiting.waited(self._last_bucket, self._last_done)
            self._begun, self._delayed = True, self._behind.is_due()
        if last:
            self._begun, self._last_bucket = False, time.perf_counter()
        try:
            return self._take_delayed(bucket) if self._delayed else super().take(bucket)
        finally:
            if last and not self._delayed:
                self._behind.without_delay()

    def _take_delayed(self, bucket: dist.GradBucket) -> "torch.futures.Future[torch.Tensor]":
        if not self._held:
            self._errors = []
            self._in_backward = cast(Any, torch)._C._current_graph_task_id() >= 0
        try:
            view = self._view(bucket)
        except BaseException:
            self._held, self._begun = [], False
            raise
        future = future_for(view.x.device)
        self._held.append((view, future))
        if bucket.is_last():
            held, self._held = self._held, []
            self._behind.exchange([view for view, _ in held], self._deliver(held))
            if self._in_backward:
                _raise_after_backward(self._errors)
        return future if self._in_backward else future.then(_value)
