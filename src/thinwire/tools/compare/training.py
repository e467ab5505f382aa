"""One worker's part of a comparison: the training loop, with a clock that stops during evaluations."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import log
from thinwire.core.engine import Engine
from thinwire.hosts.attach import attach
from thinwire.hosts.auto import AutoSession
from thinwire.net.launch import Worker
from thinwire.net.link import throttle
from thinwire.sessions.base import BaseSession
from thinwire.tools.compare.records import Evaluation, Run, Setting, Step, finite
from thinwire.tools.compare.settings import ALONE, PYTORCH
from thinwire.tools.lab.inside import counters
from thinwire.tools.workloads import Dataset, build, load
from thinwire.tools.workloads.models import evaluate, loss

CALIBRATION_STEPS = 8
ONE_BUCKET_MB = 4096
GO_ON, REACHED, DIVERGED = range(3)


@dataclass
class Trainer:
    """A model ready to train with one method."""

    model: nn.Module
    bare: nn.Module
    optimizer: torch.optim.Optimizer
    session: BaseSession | None
    interface: tuple[int, int] | None
    """What the kernel had counted at the start, see `interface_bytes`."""

    def bytes(self) -> tuple[int, int]:
        """Sent and received so far: metered, or by the interface if the method has no meter."""
        if self.session is not None:
            return self.session.meter.sent_bytes, self.session.meter.received_bytes
        return self.interface_bytes() or (0, 0)

    def interface_bytes(self) -> tuple[int, int] | None:
        """What the kernel has counted on this host's interface since the start; None outside of a lab."""
        now = counters()
        if now is None or self.interface is None:
            return None
        return now.sent - self.interface[0], now.received - self.interface[1]


def train(worker: Worker, setting: Setting, method: str, seed: int) -> Run:
    """Train, report every step and evaluation to the parent, and return the run as a whole."""
    log.quiet()  # lines of workers would tear the progress bars apart
    data = load(setting.data)
    model = build(setting.model, data, seed, setting.hidden)
    compute = calibrate(model, data, setting)
    trainer = prepare_method(model, method, setting)
    order = torch.Generator().manual_seed(1 + seed)
    durations: list[float] = []
    total = 0.0
    tests: list[Evaluation] = []
    outcome, step = GO_ON, 0
    while step < setting.steps and outcome == GO_ON:
        step += 1
        rows = torch.randint(len(data.inputs), (worker.size, setting.batch), generator=order)[worker.rank]
        inputs, targets = data.batch(rows)
        begin = time.perf_counter()
        trainer.optimizer.zero_grad()
        value = loss(data, trainer.model(inputs), targets)
        value.backward()
        trainer.optimizer.step()
        durations.append(time.perf_counter() - begin)
        total += durations[-1]
        if worker.rank == 0:
            worker.report(Step(method, seed, step, finite(float(value.detach())), total, *trainer.bytes()))
        if step == setting.steps:
            total += _reconcile(trainer)
        if step % setting.evaluate_every == 0 or step == setting.steps:
            if worker.rank == 0:
                test_loss, accuracy = evaluate(trainer.bare, data)
                # A larger exponent would not fit in a float, and says no more.
                perplexity = math.exp(min(test_loss, 690.0)) if math.isfinite(test_loss) else 1e300
                sent = trainer.bytes()[0]
                record = Evaluation(method, seed, step, total, sent, finite(test_loss), accuracy, perplexity)
                tests.append(record)
                worker.report(record)
            outcome = _agree(tests, setting)
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
    if trainer.session is not None:
        trainer.session.detach()
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
    elif tests and setting.target is not None and tests[-1].accuracy >= setting.target:
        outcome[0] = REACHED
    dist.broadcast(outcome, 0)
    return int(outcome)


def _method_costs(trainer: Trainer, steps: int, waited: float) -> dict[str, Any]:
    """What the meter knows per step; of PyTorch's own methods only the time beyond compute is known."""
    session = trainer.session
    if session is None:
        return {"wait_seconds": waited}
    total = session.meter.total
    payload = (total.payload_bytes + total.overhead_bytes) / steps
    return {
        "compress_seconds": session.meter.work_seconds / steps,
        "wait_seconds": session.meter.network_seconds / steps,
        "rounds": total.operations / steps,
        "payload": payload,
        "layers": payload_by_parameter(session.engine, payload),
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


def calibrate(model: nn.Module, data: Dataset, setting: Setting) -> float:
    """Seconds of a step without communication, measured while all workers compute."""
    alone = copy.deepcopy(model)
    optimizer = _optimizer(alone, setting)
    inputs, targets = data.batch(torch.arange(setting.batch) % len(data.inputs))
    seconds: list[float] = []
    dist.barrier()
    for _ in range(CALIBRATION_STEPS + 2):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss(data, alone(inputs), targets).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    dist.barrier()
    return statistics.median(seconds[2:])


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
    """Wrap the model for one method: thinwire's, or PyTorch's own."""
    if setting.momentum_before:
        add_momentum_before(model, setting.momentum_before)
    optimizer = _optimizer(model, setting)
    session = None
    if method == ALONE:
        return Trainer(model, model, optimizer, session, counters())
    # PyTorch's PowerSGD hook fails on gloo with two buckets or more.
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=ONE_BUCKET_MB if method == "pytorch-powersgd" else None
    )
    if method not in PYTORCH:
        session = attach(wrapped, method, optimizer=optimizer)
        throttle(session, setting.link)
    elif method != "pytorch":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if method == "pytorch-fp16":
            wrapped.register_comm_hook(None, cast(Any, default_hooks).fp16_compress_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Trainer(wrapped, model, optimizer, session, counters())
