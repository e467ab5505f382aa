"""One worker's part of a comparison: the training loop, with a clock that stops during evaluations."""

from __future__ import annotations

import copy
import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.net.launch import Worker
from thinwire.sessions.base import BaseSession
from thinwire.tools.compare.layers import payload_by_parameter
from thinwire.tools.compare.records import Evaluation, Step
from thinwire.tools.compare.task import PYTORCH, Task
from thinwire.tools.workloads import Dataset, build, load
from thinwire.tools.workloads.models import evaluate, loss

CALIBRATION_STEPS = 8
ONE_BUCKET_MB = 4096


@dataclass
class Entrant:
    """A model ready to train with one method."""

    model: nn.Module
    bare: nn.Module
    optimizer: torch.optim.Optimizer
    session: BaseSession | None
    base: tuple[int, int] = (0, 0)

    def bytes(self) -> tuple[int, int]:
        """Sent and received so far: metered, or by the interface for what does not meter itself."""
        if self.session is not None:
            return self.session.meter.sent_bytes, self.session.meter.received_bytes
        sent, received = interface_bytes() or (0, 0)
        return sent - self.base[0], received - self.base[1]


@dataclass
class Watch:
    """Time that counts, and every step's part of it."""

    steps: list[float] = field(default_factory=list[float])
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.steps.append(seconds)
        self.total += seconds


def train(worker: Worker, task: Task) -> dict[str, Any]:
    """Train, report every step and evaluation to the parent, and return what the run was like."""
    data = load(task.data)
    model = build(task.model, data, task.seed, task.hidden)
    compute = calibrate(model, data, task)
    entrant = enter(model, task)
    before = interface_bytes()
    entrant.base = before or (0, 0)
    watch = Watch()
    reached: tuple[int, float, int] | None = None
    failed: str | None = None
    order = torch.Generator().manual_seed(1 + task.seed)
    step = 0
    while step < task.steps:
        step += 1
        rows = torch.randint(len(data.inputs), (worker.size, task.batch), generator=order)[worker.rank]
        inputs, targets = data.batch(rows)
        begin = time.perf_counter()
        entrant.optimizer.zero_grad()
        value = loss(data, entrant.model(inputs), targets)
        value.backward()
        entrant.optimizer.step()
        watch.add(time.perf_counter() - begin)
        now = float(value.detach())
        if worker.rank == 0:
            worker.report(Step(task.method, task.seed, step, now, watch.total, *entrant.bytes()))
        if step % task.evaluate_every == 0 or step == task.steps:
            if step == task.steps:
                _bring_together(entrant, watch)
            verdict = _look(worker, entrant, data, task, step, watch)
            if verdict == "reached":
                reached = (step, watch.total, entrant.bytes()[0])
                break
            if verdict == "diverged":
                failed = f"diverged: the loss is not a finite number at step {step}"
                break
    after = interface_bytes()
    result = _result(entrant, watch, step, compute)
    result["target_step"], result["target_seconds"], result["target_sent"] = reached or (None,) * 3
    result["interface_sent"] = None if before is None or after is None else after[0] - before[0]
    result["failed"] = failed
    if entrant.session is not None:
        entrant.session.detach()
    return result


def _bring_together(entrant: Entrant, watch: Watch) -> None:
    """Replicas that may differ are averaged once more before the last look, on the clock."""
    session = entrant.session
    if session is not None and session.reconcile_every is not None:
        begin = time.perf_counter()
        session.reconcile()
        watch.total += time.perf_counter() - begin


def _look(worker: Worker, entrant: Entrant, data: Dataset, task: Task, step: int, watch: Watch) -> str | None:
    """Rank 0 looks at the test data and tells the others whether to go on; the clock stands still."""
    verdict = torch.zeros(1, dtype=torch.uint8)
    if worker.rank == 0:
        test_loss, accuracy = evaluate(entrant.bare, data)
        # More would not fit in JSON, and says no more.
        perplexity = math.exp(min(test_loss, 700.0)) if math.isfinite(test_loss) else math.inf
        sent = entrant.bytes()[0]
        worker.report(
            Evaluation(
                task.method, task.seed, step, watch.total, sent, test_loss, accuracy, min(perplexity, 1e300)
            )
        )
        if task.target is not None and accuracy >= task.target:
            verdict[0] = 1
        if not math.isfinite(test_loss):
            verdict[0] = 2
    dist.broadcast(verdict, 0)
    return {0: None, 1: "reached", 2: "diverged"}[int(verdict)]


def _result(entrant: Entrant, watch: Watch, steps: int, compute: float) -> dict[str, Any]:
    result: dict[str, Any] = {
        "steps": steps,
        "seconds": watch.total,
        "step_seconds": statistics.median(watch.steps),
        "compute_seconds": compute,
    }
    sent, received = entrant.bytes()
    result |= {"sent": sent, "received": received}
    session = entrant.session
    if session is None:
        waited = max(0.0, result["step_seconds"] - compute)
        return result | {
            "compress_seconds": 0.0,
            "wait_seconds": waited,
            "rounds": 0.0,
            "payload": 0.0,
            "layers": {},
        }
    total = session.meter.total
    payload = (total.payload_bytes + total.overhead_bytes) / steps
    return result | {
        "compress_seconds": session.meter.work_seconds / steps,
        "wait_seconds": session.meter.network_seconds / steps,
        "rounds": total.operations / steps,
        "payload": payload,
        "layers": payload_by_parameter(session.engine, payload),
    }


def calibrate(model: nn.Module, data: Dataset, task: Task) -> float:
    """Seconds of a step that nobody communicates in, measured while all workers are at it."""
    alone = copy.deepcopy(model)
    optimizer = _optimizer(alone, task)
    inputs, targets = data.batch(torch.arange(task.batch) % len(data.inputs))
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


def _optimizer(model: nn.Module, task: Task) -> torch.optim.Optimizer:
    # Without momentum: some methods bring their own, and what others hold back comes in bursts.
    if task.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=task.learning_rate)
    return torch.optim.SGD(model.parameters(), lr=task.learning_rate)


def enter(model: nn.Module, task: Task) -> Entrant:
    """Wrap the model for one method: thinwire's, or PyTorch's own."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    from thinwire.hosts.attach import attach
    from thinwire.net.link import throttle

    if task.method in PYTORCH:
        # PyTorch's PowerSGD hook fails on gloo with two buckets or more.
        bucket = ONE_BUCKET_MB if task.method == "pytorch-powersgd" else None
        wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket)
        if task.method == "pytorch-fp16":
            wrapped.register_comm_hook(None, cast(Any, default_hooks).fp16_compress_hook)
        elif task.method == "pytorch-powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return Entrant(wrapped, model, _optimizer(model, task), None)
    wrapped = DistributedDataParallel(model)
    optimizer = _optimizer(model, task)
    session = attach(wrapped, task.method, optimizer=optimizer)
    throttle(session, task.link)
    return Entrant(wrapped, model, optimizer, session)


def interface_bytes() -> tuple[int, int] | None:
    """What the kernel has counted on this host's interface, sent and received; None outside of a lab."""
    from thinwire.tools.lab.inside import counters

    found = counters()
    return None if found is None else (found.sent, found.received)
