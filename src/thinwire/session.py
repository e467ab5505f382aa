"""A session: one method at work on one set of parameters, with its memory, its meter and its groups."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from thinwire import __version__, checkpoint, wire
from thinwire.channel import Channel, Place, Program, context_of, together
from thinwire.costs import Link
from thinwire.drivers.blocking import Blocking
from thinwire.drivers.process_group import ProcessGroupWire
from thinwire.errors import ConfigError, ThinwireError
from thinwire.exchange import Exchange, State
from thinwire.groups import private_groups
from thinwire.handshake import agree
from thinwire.layout import Layout, Slot
from thinwire.meter import Meter, Tally
from thinwire.registry import parse
from thinwire.route import Route
from thinwire.states import StateStore

log = logging.getLogger("thinwire")


class LossScale(Protocol):
    """What a session needs of `torch.amp.GradScaler`."""

    def get_scale(self) -> float: ...


@dataclass(frozen=True)
class View:
    """One parameter's gradient: where it lies, and where its mean is to be written (may be the same)."""

    slot: Slot
    x: torch.Tensor
    out: torch.Tensor


@dataclass
class _Group:
    """Tensors that one run of one exchange serves."""

    exchange: Exchange
    layout: Layout
    views: list[View]


class Session:
    """Averages tensors over a process group with a method.

    For people with their own training loop:

        session = thinwire.Session(model.named_parameters(), "topk(ratio=0.01)")
        loss.backward()
        session.average({n: p.grad for n, p in model.named_parameters()}, in_place=True)
        optimizer.step()

    Under `DistributedDataParallel` use `thinwire.attach`, which makes a session and plugs it in.

    Args:
        named_parameters: names and tensors (or anything with `shape` and `dtype`), equal on all ranks.
        method: a method string, JSON, or an Exchange.
        process_group: the ranks to average over; None is the default group.
        seed: of the randomness that the ranks share; part of what they must agree on.
        dense_below: tensors with fewer entries, and short vectors, are sent dense; 0 compresses all.
        scaler: the GradScaler in use, so that what is remembered follows its scale.
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
        lanes: int = 1,
        place: Place | None = None,
        link: Link | None = None,
    ) -> None:
        self.method = parse(method)
        self.route = Route(self.method, dense_below)
        self.seed = seed
        self.step = 0
        self.scale = 1.0
        self.meter = Meter()
        self.states = StateStore()
        self.link = link or Link()
        self._scaler = scaler
        self._lock = threading.Lock()
        self._announced = False
        self._before_step = Tally()
        self._tensors: dict[str, tuple[Slot, torch.dtype]] = {}
        for name, tensor in named_parameters:
            if name in self._tensors:
                raise ConfigError(f"two parameters have the name {name!r}")
            self._tensors[name] = (Slot(name, tuple(tensor.shape), 0), tensor.dtype)
        if not self._tensors:
            raise ConfigError("there are no parameters to average")
        self.remembers = any(
            not self.route.exchange_for(slot).traits.memoryless for slot, _ in self._tensors.values()
        )
        self.wires: list[ProcessGroupWire] = []
        if place is None:
            groups = private_groups(process_group, lanes)
            self.wires = [ProcessGroupWire(group, self.meter) for group in groups]
            place = self.wires[0].place
        self.place = place
        if self.wires:
            agree(self.describe(), self.wires[0].execute)
            self.meter.reset()

    def describe(self) -> dict[str, Any]:
        """How this rank is set up: what all ranks must agree on."""
        return {
            "thinwire version": __version__,
            "wire format": wire.VERSION,
            "method": str(self.method),
            "seed": self.seed,
            "dense_below": self.route.dense_below,
            "lanes": len(self.wires),
            "parameters": [
                [name, list(slot.shape), str(dtype).removeprefix("torch.")]
                for name, (slot, dtype) in self._tensors.items()
            ],
        }

    @property
    def dense_bytes(self) -> int:
        """What an uncompressed step's payload would be."""
        return sum(slot.numel * dtype.itemsize for slot, dtype in self._tensors.values())

    def slot(self, name: str) -> Slot:
        return self._tensors[name][0]

    # -- averaging -------------------------------------------------------------------------------------

    def average(
        self, tensors: Mapping[str, torch.Tensor | None], *, in_place: bool = False
    ) -> dict[str, torch.Tensor]:
        """The method's estimate of each tensor's mean over the ranks.

        All parameters of the session must be given, on every rank; None counts as zeros. With `in_place`
        the means are written over the inputs, which saves memory and time.
        """
        if not self.wires:
            raise ThinwireError("this session belongs to a driver: run session.program(...) with it")
        results, views = self.views(tensors, in_place=in_place)
        self.begin_step()
        self.end_step(Blocking(self.wires[0].execute).run(self.program(views)))
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
            views.append(View(slot, x.contiguous().view(-1), out.view(-1)))
            if in_place and given is not None and out is not x:
                raise ConfigError(f"{name!r} is not contiguous: it cannot be averaged in place")
            results[name] = out
        return results, views

    def program(self, views: Sequence[View]) -> Program:
        """What one rank does to average these views: a coroutine for a driver."""
        groups = self._grouped(views)
        context = context_of(str(self.method) + "\n" + "\n".join(view.slot.name for view in views))
        tasks = [self._serve(group) for group in groups]
        return together(tasks, self.place, step=self.step, context=context, link=self.link)

    def _grouped(self, views: Sequence[View]) -> list[_Group]:
        """One group per tensor, or per exchange where the exchange may or must see tensors together."""
        groups: list[_Group] = []
        shared: dict[tuple[Exchange, torch.dtype, torch.device], list[View]] = {}
        for view in views:
            exchange = self.route.exchange_for(view.slot)
            if exchange.traits.elementwise or exchange.traits.scope != "tensor":
                shared.setdefault((exchange, view.x.dtype, view.x.device), []).append(view)
            elif view.x.numel():
                layout = Layout.of([(view.slot.name, view.slot.shape)], view.x.dtype, view.x.device)
                groups.append(_Group(exchange, layout, [view]))
        for (exchange, dtype, device), members in shared.items():
            layout = Layout.of(((v.slot.name, v.slot.shape) for v in members), dtype, device)
            groups.append(_Group(exchange, layout, members))
        return groups

    async def _serve(self, group: _Group) -> None:
        exchange, layout, views = group.exchange, group.layout, group.views
        device = layout.device
        ch = Channel(self.place, step=self.step, seed=self.seed, key=layout.key, device=device)
        state = State() if exchange.traits.memoryless else self._state(exchange, layout)
        whole = _one_run(views)
        if whole is not None:
            x, out = whole
        else:
            x = out = torch.cat([view.x for view in views])
        await exchange.run(x, out, state, ch)
        if ch.finite is None and self.remembers:
            await ch.settled(bool(torch.isfinite(out.sum())) or bool(out.isfinite().all()))
        if ch.finite is False and not exchange.traits.elementwise:
            out.fill_(torch.nan)
        if whole is None:
            for view, piece in zip(views, layout.parts(out), strict=True):
                view.out.copy_(piece)

    def _state(self, exchange: Exchange, layout: Layout) -> State:
        with self._lock:
            return self.states.take(exchange, layout)

    # -- steps -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Called by the host before the first tensor of a step."""
        if self._scaler is not None:
            scale = float(self._scaler.get_scale())
            if scale != self.scale:
                self.states.rescale(scale / self.scale)
                self.scale = scale
        for each in self.wires:
            each.label = f"step {self.step}"
        if not self._announced:
            self._before_step = self.meter.total

    def end_step(self, kept: bool) -> None:
        """Called by the host when every tensor of the step has been averaged; `kept` if all were finite."""
        self.meter.count_step()
        if kept:
            self.step += 1
        if not self._announced:
            self._announced = True
            self._announce(self.meter.total - self._before_step)

    def _announce(self, first: Tally) -> None:
        if self.place.rank == 0:
            if not log.hasHandlers():  # a program without logging of its own must see this line too
                log.addHandler(logging.StreamHandler())
                log.setLevel(logging.INFO)
            payload = first.payload_bytes + first.overhead_bytes
            log.info(
                "thinwire: %s on %d ranks: %s payload a step against %s dense (%.3g %%), %d rounds",
                self.method,
                self.place.size,
                f"{payload:,} bytes",
                f"{self.dense_bytes:,}",
                100 * payload / max(self.dense_bytes, 1),
                first.operations,
            )

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

    def replace_state(
        self, entries: Mapping[str, Mapping[str, torch.Tensor]], step: int, scale: float
    ) -> None:
        self.states.load(entries)
        self.step = step
        self.scale = scale

    def checkpoint_slots(self) -> dict[str, Slot]:
        return {name: slot for name, (slot, _) in self._tensors.items()}

    # -- the end ---------------------------------------------------------------------------------------

    _on_detach: Callable[[], None] | None = None

    def detach(self) -> None:
        """Stop: the model goes back to plain all-reduce, threads end, private groups are closed.

        To be called on every rank. Afterwards the session can still be read and saved.
        """
        hook, self._on_detach = self._on_detach, None
        if hook is not None:
            hook()
        wires, self.wires = self.wires, []
        for each in wires:
            each.close()

    def on_detach(self, hook: Callable[[], None]) -> None:
        self._on_detach = hook


def _one_run(views: Sequence[View]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The views as one flat tensor each for input and output, if they lie in memory one after the other."""
    if len(views) == 1:
        return views[0].x, views[0].out
    total = sum(view.x.numel() for view in views)
    flat: list[torch.Tensor] = []
    for tensors in ([v.x for v in views], [v.out for v in views]):
        first, expected = tensors[0], tensors[0].data_ptr()
        for tensor in tensors:
            same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            if not same or tensor.data_ptr() != expected:
                return None
            expected += tensor.numel() * tensor.element_size()
        flat.append(torch.as_strided(first, (total,), (1,), cast(int, first.storage_offset())))
    return flat[0], flat[1]
