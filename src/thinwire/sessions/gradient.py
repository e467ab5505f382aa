"""A session: one method at work on one set of parameters, with its memory, its meter and its groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from thinwire.core.channel import Beside, Channel, Program, context_of, together
from thinwire.core.exchange import Exchange, State
from thinwire.core.layout import Layout, Slot
from thinwire.core.plan import Group, View, plan
from thinwire.core.router import Router
from thinwire.core.state import Kept, StateStore
from thinwire.drivers.blocking import Blocking
from thinwire.errors import ConfigError, ThinwireError
from thinwire.log import tell, warn
from thinwire.methods.registry import parse
from thinwire.net import frames
from thinwire.net.costs import Link
from thinwire.net.executor import ProcessGroupExecutor, throttle
from thinwire.net.groups import private_groups
from thinwire.net.handshake import agree
from thinwire.net.link import Links
from thinwire.net.meter import Meter, Tally, Worked
from thinwire.net.rank_info import RankInfo
from thinwire.sessions import checkpoint
from thinwire.sessions.histogram import Histogram, measure
from thinwire.sessions.optimizer_checks import check_optimizer
from thinwire.sessions.preparation import prepare_for
from thinwire.sessions.replicas import Replicas
from thinwire.version import __version__


class LossScale(Protocol):
    """What a session needs of `torch.amp.GradScaler`."""

    def get_scale(self) -> float: ...


class Session:
    """Averages tensors over a process group with a method.

    For people with their own training loop:

        session = thinwire.Session(model.named_parameters(), "topk(ratio=0.01)")
        loss.backward()
        session.average({n: p.grad for n, p in model.named_parameters()}, in_place=True)
        optimizer.step()

    Under `DistributedDataParallel` use `thinwire.attach`, which makes a session and plugs it in.

    Args:
        named_parameters: names and tensors, equal on all ranks; the parameters themselves, if the method
            lets replicas drift and averages them from time to time (see `reconcile`).
        method: a method string, JSON, or an Exchange.
        process_group: the ranks to average over; None is the default group.
        seed: of the randomness that the ranks share; part of what they must agree on.
        dense_below: tensors with fewer entries, and short vectors, are sent dense; 0 compresses all.
        scaler: the GradScaler in use, so that what is remembered follows its scale.
        optimizer: the optimizer in use, so that one with momentum is refused where the method has its
            own, and so that `reconcile` averages what the optimizer remembers as well.
        lanes: private process groups to make.
        place: only for ranks run by the Lockstep or Simulated driver: which rank this is; no process
            group is then used, and `program` gives what the driver runs.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        method: str | Mapping[str, Any] | Exchange,
        process_group: dist.ProcessGroup | None = None,
        *,
        seed: int = 0,
        dense_below: int = 1024,
        scaler: LossScale | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lanes: int = 1,
        rank_info: RankInfo | None = None,
        link: Link | None = None,
    ) -> None:
        self.method = parse(method)
        self.route = Router(self.method, dense_below)
        self.seed = seed
        self.step = 0
        self.scale = 1.0
        self.meter = Meter()
        self.states = StateStore()
        self.link = link or Link()
        self._scaler = scaler
        self._stale: Mapping[str, torch.Tensor] | None = None
        self._lock = threading.Lock()
        self._announced = False
        self._lanes = lanes
        self._before_step = Tally()
        self._tensors: dict[str, tuple[Slot, torch.dtype]] = {}
        parameters: dict[str, torch.Tensor] = {}
        for name, tensor in named_parameters:
            if name in self._tensors:
                raise ConfigError(f"two parameters have the name {name!r}")
            parameters[name] = tensor
            self._tensors[name] = (Slot(name, tuple(tensor.shape), 0), tensor.dtype)
        if not self._tensors:
            raise ConfigError("there are no parameters to average")
        self._layouts: dict[tuple[str, torch.device], Layout] = {}
        self._plans: dict[tuple[int, ...], tuple[list[Group], int, list[Layout]]] = {}
        self._position = {name: position for position, name in enumerate(self._tensors)}
        exchanges = {self.route.exchange_for(slot) for slot, _ in self._tensors.values()}
        self.remembers = any(not exchange.traits.memoryless for exchange in exchanges)
        periods = [exchange.traits.reconcile_every for exchange in exchanges]
        self.reconcile_every = min((period for period in periods if period is not None), default=None)
        self._reconciled = 0
        self._parameters, self._optimizer = parameters, optimizer
        self._replicas = Replicas(parameters, optimizer)
        warnings = check_optimizer(exchanges, optimizer)
        warnings += [exchange.caution for exchange in exchanges if exchange.caution is not None]
        self.executors: list[ProcessGroupExecutor] = []
        if rank_info is None:
            on_cpu = all(tensor.device.type == "cpu" for tensor in parameters.values())
            prepare_for(exchanges if on_cpu else (), loud=dist.is_initialized() and dist.get_rank() == 0)
            rank_info = self._open(process_group)
        self.rank_info = rank_info
        for warning in warnings if rank_info.rank == 0 else ():
            warn("%s", warning)

    def _open(self, process_group: dist.ProcessGroup | None) -> RankInfo:
        """Make the private groups; the first one serves to agree on everything else, lanes included."""
        (first,) = private_groups(process_group, 1)
        self.executors = [ProcessGroupExecutor(first, self.meter)]
        try:
            ranks = dist.get_process_group_ranks(first)
            agree(self.describe(), self.executors[0].execute, ranks)
            for group in private_groups(process_group, self._lanes - 1):
                self.executors.append(ProcessGroupExecutor(group, self.meter, first.group_name))
        except BaseException:
            self.detach()
            raise
        self.meter.reset()
        return RankInfo(first.rank(), first.size())

    def describe(self) -> dict[str, Any]:
        """How this rank is set up: what all ranks must agree on."""
        return {
            "thinwire version": __version__,
            "wire format": frames.VERSION,
            "method": str(self.method),
            "seed": self.seed,
            "dense_below": self.route.dense_below,
            "lanes": self._lanes,
            "parameters": [
                [name, list(slot.shape), str(dtype).removeprefix("torch.")]
                for name, (slot, dtype) in self._tensors.items()
            ],
        }

    @property
    def dense_bytes(self) -> int:
        """What an uncompressed step's payload would be."""
        return sum(slot.numel * dtype.itemsize for slot, dtype in self._tensors.values())

    def payload_bytes(self, layouts: Sequence[Layout] | None = None) -> int | None:
        """A step's payload, frame headers apart, if it does not depend on the data.

        For these layouts, or for the model as one bucket: where a method works bucket by bucket, DDP's
        buckets may differ.
        """
        asked = list(layouts or (self._layout(name, torch.device("cpu")) for name in self._tensors))
        groups = plan(asked, self.route, self._position)
        promised = [group.exchange.payload_bytes(group.layout, self.rank_info.size) for group in groups]
        return None if None in promised else sum(cast("list[int]", promised))

    def remember(self, layouts: Sequence[Layout]) -> None:
        """Make the states of these layouts now, instead of at their first exchange."""
        for group in self._plan(list(layouts))[0]:
            if not group.traits.memoryless:
                self._state(group.exchange, group.layout)

    def layout(self, names: Sequence[str], device: torch.device) -> Layout:
        """The layout of these parameters one after the other in one buffer."""
        dtype = self._tensors[names[0]][1]
        return Layout.of(((name, self._tensors[name][0].shape) for name in names), dtype, device)

    def _layout(self, name: str, device: torch.device) -> Layout:
        known = self._layouts.get((name, device))
        if known is None:
            known = self._layouts[name, device] = self.layout([name], device)
        return known

    # -- averaging -------------------------------------------------------------------------------------

    def average(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        *,
        in_place: bool = False,
        stale: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The method's estimate of each tensor's mean over the ranks.

        All parameters of the session must be given, on every rank; None counts as zeros. With `in_place`
        the means are written over the inputs, which saves memory and time.

        Where replicas drift (`reconcile_every`), their parameters are averaged first when that is due. To
        have it done before the gradient is computed, begin the step with `reconcile(when_due=True)`.

        `stale` are second gradients on the same data, at `stale_parameters()`, for methods that compare
        (`lasg`); `thinwire.same_batch` computes and hands them over, under DDP as well.
        """
        if stale is not None:
            self.compare_with(stale)
        self.reconcile(when_due=True)
        if not self.executors:
            raise ThinwireError("this session belongs to a driver: run session.program(...) with it")
        results, views = self.views(tensors, in_place=in_place)
        self.begin_step()
        self.end_step(Blocking(self.executors[0].execute).run(self.program(views)))
        return results

    def views(
        self, tensors: Mapping[str, torch.Tensor | None], *, in_place: bool = False
    ) -> tuple[dict[str, torch.Tensor], list[View]]:
        """Check what is to be averaged and lay out where the results go."""
        missing = [name for name in self._tensors if name not in tensors]
        unknown = [name for name in tensors if name not in self._tensors]
        if missing or unknown:
            what = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} is not one of them"
            raise ConfigError(f"average() takes all {len(self._tensors)} parameters of the session: {what}")
        results: dict[str, torch.Tensor] = {}
        views: list[View] = []
        for name, (slot, dtype) in self._tensors.items():
            given = tensors[name]
            if given is None:
                x = torch.zeros(slot.shape, dtype=dtype)
            elif given.is_sparse or tuple(given.shape) != slot.shape or given.dtype != dtype:
                raise ConfigError(
                    f"{name!r} must be a dense {dtype} tensor of shape {slot.shape}, "
                    f"not {given.dtype} {tuple(given.shape)}{' sparse' if given.is_sparse else ''}"
                )
            else:
                x = given.detach()
            out = x if in_place and x.is_contiguous() else torch.empty(x.shape, dtype=dtype, device=x.device)
            flat = x.contiguous().view(-1)
            views.append(View(self._layout(name, x.device), flat, flat if out is x else out.view(-1)))
            if in_place and given is not None and out is not x:
                raise ConfigError(f"{name!r} is not contiguous: it cannot be averaged in place")
            results[name] = out
        return results, views

    def stale_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters at this rank's last upload, for methods that keep them; the present ones before.

        For the second gradient of `average(..., stale=...)`. Copies, by name.
        """
        layouts = [self._layout(name, tensor.device) for name, tensor in self._parameters.items()]
        groups, _ = self._plan(layouts)
        found = {name: tensor.detach().clone() for name, tensor in self._parameters.items()}
        for group in groups:
            kept = group.exchange.stale(self._state(group.exchange, group.layout))
            if kept is not None:
                for slot, part in zip(group.layout.slots, group.layout.parts(kept), strict=True):
                    found[slot.name].copy_(part.view(slot.shape))
        return found

    def compare_with(self, stale: Mapping[str, torch.Tensor]) -> None:
        """Give the next step its second gradients: see `average`."""
        for name, (slot, _) in self._tensors.items():
            given = stale.get(name)
            if given is None or tuple(given.shape) != slot.shape:
                what = "is missing" if given is None else f"has shape {tuple(given.shape)}, not {slot.shape}"
                raise ConfigError(
                    f"the second gradients are for all parameters of the session: {name!r} {what}"
                )
        self._stale = stale

    def _beside(self, layout: Layout) -> Beside:
        def flat(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
            pieces = [tensors[name].detach().reshape(-1).float() for name in layout.names]
            return torch.cat(pieces).to(layout.device)

        stale = None if self._stale is None else flat(self._stale)
        return Beside(stale, lambda: flat(self._parameters))

    def _rate(self) -> float:
        """The learning rate, if the optimizer is known and has one for all."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        rates = {float(group.get("lr", 1.0)) for group in groups}
        return rates.pop() if len(rates) == 1 else 1.0

    def program(self, views: Sequence[View]) -> Program:
        """What one rank does to average these views: a coroutine for a driver."""
        return Worked(self._program(views), self.meter)

    async def _program(self, views: Sequence[View]) -> None:
        groups, context = self._plan([view.layout for view in views])
        tasks = [self._serve(group, views) for group in groups]
        await together(tasks, self.rank_info, step=self.step, context=context, link=self.link)

    def _plan(self, layouts: list[Layout]) -> tuple[list[Group], int]:
        """What to do for these layouts, and the mark of their payloads; looked up by identity."""
        key = tuple(map(id, layouts))
        known = self._plans.get(key)
        if known is None:
            names = [name for layout in layouts for name in layout.names]
            context = context_of("\n".join([str(self.method), *names]))
            # The layouts are kept with the plan, so that no other one can take their identity.
            known = self._plans[key] = (plan(layouts, self.route, self._position), context, layouts)
        return known[0], known[1]

    async def _serve(self, group: Group, views: Sequence[View]) -> None:
        exchange, traits, layout = group.exchange, group.traits, group.layout
        ch = Channel(
            self.rank_info,
            step=self.step,
            seed=self.seed,
            key=layout.key,
            device=layout.device,
            unit=self.scale,
            rate=self._rate() if traits.plain_steps else 1.0,
            beside=self._beside(layout) if traits.plain_steps else None,
        )
        state = State() if traits.memoryless else self._state(exchange, layout)
        memory = group.memory(views)
        # Methods that code or select work in single precision, as what they remember does.
        narrowed = layout.dtype == torch.float64 and not traits.elementwise
        direct = len(memory) == 1 and not narrowed
        if direct:
            x, out = memory[0]
        else:
            x = out = torch.cat([piece.float() if narrowed else piece for piece, _ in memory])
        await exchange.run(x, out, state, ch)
        if ch.finite is None and self.remembers:
            await ch.settled(bool(torch.isfinite(out.sum())) or bool(out.isfinite().all()))
        if ch.finite is False and not traits.elementwise:
            out.fill_(torch.nan)
        if not direct:
            position = 0
            for _, target in memory:
                target.copy_(out[position : position + target.numel()])
                position += target.numel()

    def _state(self, exchange: Exchange, layout: Layout) -> State:
        with self._lock:
            return self.states.take(exchange, layout)

    # -- replicas --------------------------------------------------------------------------------------

    def reconcile(self, *, when_due: bool = False) -> None:
        """Make all ranks' parameters equal, to the last bit: each becomes its mean over the ranks.

        What the optimizer keeps for each parameter (momentum, second moments) is averaged as well, if the
        session knows the optimizer; otherwise it stays each rank's own. To be called on every rank. With
        `when_due`, only if the method lets replicas drift, and `reconcile_every` steps have been made.
        DDP sessions and `average` do that by themselves; call it without after the last step, and before
        a checkpoint of the model is written.
        """
        if when_due and not self._reconcile_is_due():
            return
        if not self.executors:
            raise ThinwireError("this session belongs to a driver: run session.reconciliation() with it")
        Blocking(self.executors[0].execute).run(self.reconciliation())

    def reconciliation(self) -> Program:
        """What one rank does to reconcile: a coroutine for a driver."""
        self._reconciled = self.step
        return self._replicas.reconcile(self.rank_info, self.step, self.link)

    def _reconcile_is_due(self) -> bool:
        every = self.reconcile_every
        return every is not None and self.step % every == 0 and self.step != self._reconciled

    def spread(self) -> float:
        """How far apart the replicas are: the largest distance from the mean, relative to its norm.

        Costs one dense mean of the parameters. To be called on every rank; the answer is equal on all.
        """
        if not self.executors:
            raise ThinwireError("this session belongs to a driver: it has no process group to ask")
        result: list[float] = []
        program = self._replicas.spread(self.rank_info, self.step, self.link, result)
        Blocking(self.executors[0].execute).run(program)
        return result[0]

    def histogram(
        self, tensors: Mapping[str, torch.Tensor] | None = None, *, ratio: float | None = None
    ) -> Histogram:
        """How the magnitudes of all ranks' gradients are distributed, for 4 KB whatever the model's size.

        To be called on every rank, between `backward()` and `average()` (under DDP gradients are averaged
        already). With `ratio`, also the threshold that top-k has there. `tensors` instead of gradients.
        """
        if not self.executors:
            raise ThinwireError("this session belongs to a driver: run thinwire.histogram.measure with it")
        gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
        given = [tensor for tensor in (tensors or gradients).values() if tensor is not None]
        result: list[Histogram] = []
        Blocking(self.executors[0].execute).run(measure(given, ratio, self.rank_info, result))
        return result[0]

    # -- steps -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Called by the host before the first tensor of a step."""
        # Without a scaler the unit is 1 again, even if the checkpoint comes from a run that had one.
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        if scale != self.scale:
            self.states.rescale(scale / self.scale)
            self.scale = scale
        for each in self.executors:
            each.label = f"step {self.meter.steps}"
        if not self._announced:
            self._before_step = self.meter.total

    def throttle(self, links: str | Links, *, seed: int = 0) -> None:
        """From now on let every operation take as long as on this link; "none" ends it.

        To be called on every rank, between two steps. See `thinwire.net.link` for the words and
        `thinwire.throttle` for the model.

            session = thinwire.attach(model, "topk")
            session.throttle("100mbit,latency=5ms;3:20mbit")
        """
        throttle(self.executors, links, seed=seed)

    def end_step(self, kept: bool) -> None:
        """Called by the host when every tensor of the step has been averaged; `kept` if all were finite."""
        self.meter.count_step()
        self._stale = None
        if (
            kept and self.remembers
        ):  # what remembers nothing has no use for a count, nor the data to settle it
            self.step += 1
        if self.executors and not self._announced:
            self._announced = True
            self._announce(self.meter.total.minus(self._before_step))

    def _announce(self, first: Tally) -> None:
        if self.rank_info.rank == 0:
            payload = first.payload_bytes + first.overhead_bytes
            tell(
                "%s on %d ranks: %s payload a step against %s dense (%.3g %%), %d rounds",
                self.method,
                self.rank_info.size,
                f"{payload:,} bytes",
                f"{self.dense_bytes:,}",
                100 * payload / max(self.dense_bytes, 1),
                first.operations,
            )
            if self.reconcile_every is not None:
                every = self.reconcile_every
                tell("replicas drift; their parameters are averaged, dense, every %d steps", every)

    # -- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank must remember to go on bit for bit: tensors, numbers and strings only.

        One per rank: residuals differ. Loads with `torch.load(..., weights_only=True)`.
        """
        return checkpoint.save(self)

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        on_resize: checkpoint.OnResize | None = None,
    ) -> None:
        """Go on from a `state_dict` of this rank; the model, method and rank must be the same.

        With another world size say what becomes of the residuals:

        - `on_resize="sum"`: this rank takes over the sum of the given states' residuals. Give each old
          rank's state to exactly one new rank (a list, if a rank gets several) and nothing is lost.
        - `on_resize="drop"`: residuals start at zero; what is equal on all ranks is kept. Any old rank's
          state will do.
        """
        checkpoint.load(self, state, on_resize)

    def replace_state(self, kept: Kept, step: int, scale: float) -> None:
        self.states.load(kept)
        self.step = step
        self.scale = scale

    def checkpoint_layouts(self) -> dict[str, Layout]:
        """One layout for each parameter, without memory behind it."""
        return {name: self.layout([name], torch.device("meta")) for name in self._tensors}

    def pending(self) -> dict[str, torch.Tensor]:
        """What this rank still owes the mean, by parameter: the part of past gradients not sent yet."""
        return self.states.pending()

    # -- the end ---------------------------------------------------------------------------------------

    _on_detach: Callable[[], None] | None = None

    def detach(self) -> None:
        """Stop: the model goes back to plain all-reduce, threads end, private groups are closed.

        To be called on every rank. Afterwards the session can still be read and saved.
        """
        hook, self._on_detach = self._on_detach, None
        if hook is not None:
            hook()
        executors, self.executors = self.executors, []
        for each in executors:
            each.close()

    def on_detach(self, hook: Callable[[], None]) -> None:
        self._on_detach = hook
