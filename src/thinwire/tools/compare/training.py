"""One worker's part of a comparison: the training loop, with a clock that stops during evaluations."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import log
from thinwire.core.engine import Engine
from thinwire.core.optimizers import Optimizers
from thinwire.hosts.attach import attach
from thinwire.hosts.auto import AutoSession
from thinwire.hosts.scripts import ALONE, ONE_BUCKET_MB, PYTORCH, add_pytorch_hook
from thinwire.hosts.watch import Watch
from thinwire.net.launch import Worker
from thinwire.net.link import parse, throttle
from thinwire.net.meter import Meter
from thinwire.net.metered_group import MeteredGroup
from thinwire.sessions.base import BaseSession
from thinwire.tools import devices
from thinwire.tools.compare.records import Evaluation, Run, Setting, Step, finite
from thinwire.tools.lab.inside import counters
from thinwire.tools.workloads import Dataset, build, load
from thinwire.tools.workloads.models import evaluate, loss

GO_ON, REACHED, DIVERGED = range(3)
TEST_ROWS_OF_TEXT = 512
"""Of a text as long as a book all rows would take longer than the training between two tests."""


@dataclass
class Trainer:
    """A model ready to train with one method."""

    model: nn.Module
    bare: nn.Module
    optimizer: torch.optim.Optimizer
    session: BaseSession | None
    watch: Watch
    """Times the computing."""
    group: MeteredGroup | None = None
    """Of PyTorch's own methods, outside of a lab."""
    interface: tuple[int, int] | None = field(default_factory=counters)
    """What the kernel had counted at the start, see `interface_bytes`."""

    @property
    def meter(self) -> Meter | None:
        metered = self.session or self.group
        return None if metered is None else metered.meter

    def bytes(self) -> tuple[int, int]:
        """Sent and received so far: metered, or by the interface if the method has no meter."""
        meter = self.meter
        return (
            (self.interface_bytes() or (0, 0)) if meter is None else (meter.sent_bytes, meter.received_bytes)
        )

    def interface_bytes(self) -> tuple[int, int] | None:
        """What the kernel has counted on this host's interface since the start; None outside of a lab."""
        now = counters()
        if now is None or self.interface is None:
            return None
        return now.sent - self.interface[0], now.received - self.interface[1]

    def evaluate(self, data: Dataset) -> tuple[float, float]:
        """Loss and accuracy on the test data (of text: its first rows); of the last common model."""
        with nullcontext() if self.session is None else self.session.common_model():
            return evaluate(self.bare, data, 0 if data.kind == "images" else TEST_ROWS_OF_TEXT)

    def close(self) -> None:
        """Leave the private groups, on all ranks."""
        for each in (self.session and self.session.detach, self.group and self.group.close):
            if each is not None:
                each()


def train(worker: Worker, setting: Setting, method: str, seed: int) -> Run:
    """Train, report every step and evaluation to the parent, and return the run as a whole."""
    log.quiet()  # lines of workers would tear the progress bars apart
    device = devices.of_rank(setting.device, worker.rank)
    data = load(setting.data).to(device)
    model = build(setting.model, data, seed, setting.hidden).to(device)
    trainer = prepare_method(model, method, setting)
    order = torch.Generator().manual_seed(1 + seed)
    durations: list[float] = []
    total = 0.0
    tests: list[Evaluation] = []
    outcome, step = GO_ON, 0
    while step < setting.steps and outcome == GO_ON:
        step += 1
        rows = torch.randint(len(data.inputs), (worker.size, setting.batch), generator=order)[worker.rank]
        inputs, targets = data.batch(rows.to(device))
        devices.finish(device)
        begin = time.perf_counter()
        trainer.optimizer.zero_grad()
        value = loss(data, trainer.model(inputs), targets)
        value.backward()
        trainer.optimizer.step()
        devices.finish(device)
        durations.append(time.perf_counter() - begin)
        total += durations[-1]
        if worker.rank == 0:
            # No more digits than they have: records are long, and reports carry them.
            seen, taken = finite(float(f"{float(value.detach()):.7g}")), round(total, 6)
            worker.report(Step(method, seed, step, seen, taken, *trainer.bytes()))
        if step == setting.steps:
            total += _reconcile(trainer)
        if step % setting.evaluate_every == 0 or step == setting.steps:
            if worker.rank == 0:
                test_loss, accuracy = trainer.evaluate(data)
                # A larger exponent would not fit in a float, and says no more.
                perplexity = math.exp(min(test_loss, 690.0)) if math.isfinite(test_loss) else 1e300
                sent = trainer.bytes()[0]
                record = Evaluation(method, seed, step, total, sent, finite(test_loss), accuracy, perplexity)
                tests.append(record)
                worker.report(record)
            outcome = _agree(tests, setting)
    compute = trainer.watch.compute().seconds
    sent, received = trainer.bytes()
    interface = trainer.interface_bytes()
    reached = outcome == REACHED
    run = Run(
        method=method,
        seed=seed,
        steps=step,
        seconds=total,
        step_seconds=statistics.median(durations),
        compute_seconds=compute,
        sent=sent,
        received=received,
        target_step=step if reached else None,
        target_seconds=total if reached else None,
        target_sent=sent if reached else None,
        chosen=str(trainer.session.method) if isinstance(trainer.session, AutoSession) else None,
        interface_sent=None if interface is None else interface[0],
        failed=f"diverged: the loss is not a finite number at step {step}" if outcome == DIVERGED else None,
        **_method_costs(trainer, step, max(0.0, statistics.median(durations) - compute)),
    )
    trainer.close()
    return run.scored(tests)


def _reconcile(trainer: Trainer) -> float:
    """Replicas that may differ are averaged before the last evaluation. Returns the seconds it took."""
    begin = time.perf_counter()
    if trainer.session is not None and trainer.session.reconcile_every is not None:
        trainer.session.reconcile()
    return time.perf_counter() - begin


def _agree(tests: Sequence[Evaluation], setting: Setting) -> int:
    """Rank 0 decides by its last evaluation whether all ranks go on."""
    outcome = torch.zeros(1, dtype=torch.uint8)
    if tests and tests[-1].loss is None:
        outcome[0] = DIVERGED
    elif tests and setting.reached(tests[-1]):
        outcome[0] = REACHED
    dist.broadcast(outcome, 0)
    return int(outcome)


def _method_costs(trainer: Trainer, steps: int, waited: float) -> dict[str, Any]:
    """What the meter knows per step; without one only the time beyond compute is known."""
    meter, session = trainer.meter, trainer.session
    if meter is None:
        return {"wait_seconds": waited}
    total = meter.total
    payload = (total.payload_bytes + total.overhead_bytes) / steps
    return {
        "compress_seconds": meter.work_seconds / steps,
        "wait_seconds": meter.network_seconds / steps,
        "rounds": total.operations / steps,
        "sent_inside": meter.inside.sent_bytes,
        "payload": payload,
        "layers": {} if session is None else payload_by_parameter(session.engine, payload),
    }


def payload_by_parameter(engine: Engine, payload: float) -> dict[str, float]:
    """A step's measured payload, shared out by what the method promises for each parameter alone.

    If a payload depends on the data, shares go by the number of entries. A parameter that periodic averaging
    cuts in pieces gets the sum of theirs.
    """
    layouts = {name: engine.layout([name], torch.device("cpu")) for name in engine.parameters}
    promised = {name: engine.payload_bytes([layout]) for name, layout in layouts.items()}
    if None in promised.values():
        promised = {name: layout.numel for name, layout in layouts.items()}
    shares: dict[str, float] = {}
    for name, share in promised.items():
        parameter = name.partition("[")[0]
        shares[parameter] = shares.get(parameter, 0.0) + (share or 0)
    total = sum(shares.values())
    return {name: payload * share / total for name, share in shares.items()} if total else {}


def _optimizer(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    # Without momentum by default: some methods have their own, and residuals of others arrive in bursts.
    if setting.momentum:
        return torch.optim.SGD(model.parameters(), lr=setting.learning_rate, momentum=setting.momentum)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return kinds[setting.optimizer](model.parameters(), lr=setting.learning_rate)


def add_momentum_before(model: nn.Module, factor: float) -> None:
    """From now on a backward pass leaves v = factor v + g in place of g, before DDP sees it."""
    for parameter in model.parameters():
        velocity = torch.zeros_like(parameter)

        def next_velocity(gradient: torch.Tensor, v: torch.Tensor = velocity) -> torch.Tensor:
            return v.mul_(factor).add_(gradient).clone()

        parameter.register_hook(next_velocity)


def prepare_method(model: nn.Module, method: str, setting: Setting) -> Trainer:
    """Wrap the model for one method: thinwire's, or PyTorch's own.

    All ranks have built the same model, so DDP need not send it, which takes minutes on a slow link. For all
    methods alike gradients live in DDP's buckets, which saves two copies of the model in every step.
    """
    if setting.momentum_before:
        add_momentum_before(model, setting.momentum_before)
    optimizer = _optimizer(model, setting)
    watch = Watch()
    watch.start(model, Optimizers(optimizer))
    if method == ALONE:
        return Trainer(model, model, optimizer, None, watch)
    if method in PYTORCH:
        wrapped, group = _pytorch(model, method, setting)
        return Trainer(wrapped, model, optimizer, None, watch, group)
    wrapped = DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True)
    session = attach(wrapped, method, optimizer=optimizer)
    throttle(session, setting.link)
    return Trainer(wrapped, model, optimizer, session, watch)


def _pytorch(
    model: nn.Module, method: str, setting: Setting
) -> tuple[DistributedDataParallel, MeteredGroup | None]:
    """One of PyTorch's own methods as it is: on the default group in a lab, otherwise on one that is slow."""
    group = None if parse(setting.link).lab else MeteredGroup()
    if group is not None:
        group.throttle(setting.link)
    cap = ONE_BUCKET_MB if method == "pytorch-powersgd" else None
    wrapped = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=cap, init_sync=False, gradient_as_bucket_view=True
    )
    add_pytorch_hook(wrapped, method, group)
    return wrapped, group
