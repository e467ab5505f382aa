"""One rank's part of a scenario: train, meet the fault, and report what is left."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from tests.chaos.scenarios import RESIZES, STEPS, Scenario
from tests.hosts.common import mlp, square_loss, wrap
from thinwire.net import frames
from thinwire.net.launch import Worker
from thinwire.net.store import default_store
from thinwire.sessions.base import BaseSession
from thinwire.sessions.periodic import PeriodicSession

TIMEOUT = 12.0  # torch may look a name up for five seconds, in vain
BARRIER_SECONDS = 90.0
OF_CHECKPOINTS = ("torn file", "full disk")
SAVE_EVERY = 2
FSYNC = os.fsync


@dataclass
class Report:
    """What a rank has to say after a scenario."""

    rank: int
    fired: bool = True
    """Whether the fault really happened: a hostile payload needs a method that sends frames."""
    error: str = ""
    kind: str = ""
    seconds: float = 0.0
    """From the step of the fault to the error."""
    step: int = 0
    """Committed steps."""
    model: str = ""
    """A digest of the parameters that all ranks share."""
    residuals_kept: bool = True
    """The residuals are those of the last committed step."""
    resumed: int | None = None
    """The step from which a new session continued, where the fault was one of checkpoints."""
    readable: str = ""
    """Why the state could not be saved and loaded again; empty if it could."""
    threads: list[str] = field(default_factory=list)


def soak(worker: Worker, scenarios: list[Scenario], folder: str) -> list[Report]:
    """Run the scenarios one after the other and report each to the parent."""
    torch.set_num_threads(1)
    reports: list[Report] = []
    for scenario in scenarios:
        wait_for_all(worker, f"chaos/{scenario.number}")
        report = Rank(worker, scenario, folder).run()
        worker.report((scenario.number, report))
        reports.append(report)
    return reports


def wait_for_all(worker: Worker, key: str) -> None:
    """A barrier that does not use the process group, which a fault may have left in a sorry state."""
    store = default_store()
    store.add(key, 1)
    deadline = time.monotonic() + BARRIER_SECONDS
    while store.add(key, 0) < worker.size:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{key}: a rank did not come back")
        time.sleep(0.01)


class Rank:
    """A model in training."""

    def __init__(self, worker: Worker, scenario: Scenario, folder: str) -> None:
        self.worker = worker
        self.scenario = scenario
        self.folder = folder
        self.guilty = worker.rank == scenario.culprit
        self.report = Report(worker.rank)
        self.group: dist.ProcessGroup | None = None  # all ranks
        self._new_model()
        self.taken = 0  # steps

    def _new_model(self) -> None:
        self.module = mlp(depth=2) if self.scenario.model == "mlp" else transformer()
        self.optimizers = self._optimizers()
        self.model: nn.Module = self.module

    def run(self) -> Report:
        if self.scenario.fault in RESIZES:
            return self._resize()
        try:
            session = self._attach()
        except thinwire.ThinwireError as error:
            return self._failed(error, 0.0)
        try:
            self._train(session)
            if self.scenario.fault in OF_CHECKPOINTS:
                session = self._resume(session)
            return self._end(session)
        finally:
            session.detach()
            self.report.threads = [t.name for t in threading.enumerate() if t.name.startswith("thinwire")]

    def _resize(self) -> Report:
        """Some steps with a rank less, then all; or the other way round. A checkpoint is between them."""
        scenario = self.scenario
        others = dist.new_group([rank for rank in range(self.worker.size) if rank != scenario.culprit])
        groups = [None, others] if scenario.fault == "shrinkage" else [others, None]
        for phase, self.group in enumerate(groups):
            steps = range(scenario.step) if phase == 0 else range(scenario.step, STEPS)
            if self.group is None or not self.guilty:
                session = self._attach()
                try:
                    checkpointer = self._checkpointer(session, every=None)
                    if phase:
                        self.report.resumed = checkpointer.load_latest()
                    for step in steps:
                        self._step(session, step, poisoned=False)
                        checkpointer.step()
                    if isinstance(session, PeriodicSession):
                        session.sync()
                    self._end(session)
                    if not phase:
                        checkpointer.save()
                        checkpointer.wait()
                finally:
                    session.detach()
                self._new_model()
            wait_for_all(self.worker, f"chaos/{scenario.number}/{phase}")
        self.report.threads = [t.name for t in threading.enumerate() if t.name.startswith("thinwire")]
        return self.report

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        parameters = list(self.module.parameters())
        if self.scenario.optimizers == "sgd":
            return [torch.optim.SGD(parameters, lr=0.05)]
        if self.scenario.optimizers == "adamw":
            return [torch.optim.AdamW(parameters, lr=0.01)]
        matrices, rest = ([p for p in parameters if (p.dim() == 2) is two] for two in (True, False))
        return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]

    def _attach(self) -> BaseSession:
        scenario = self.scenario
        # A fault that the others cannot see by themselves: another seed changes every random selection.
        seed = 1 if scenario.fault == "mismatch" and self.guilty else 0
        common = {"seed": seed, "optimizer": self.optimizers}
        if scenario.host == "periodic":
            return thinwire.attach(self.module, scenario.method, process_group=self.group, **common)
        if scenario.host == "session":
            named = self.module.named_parameters()
            return thinwire.Session(named, scenario.method, self.group, **common)
        self.model = wrap(self.module, process_group=self.group)
        without = {"overlap": False} if scenario.host == "ddp without overlap" else {}
        return thinwire.attach(self.model, scenario.method, **without, **common)

    def _train(self, session: BaseSession) -> None:
        scenario = self.scenario
        saving = self._checkpointer(session) if scenario.fault in OF_CHECKPOINTS else None
        begin = time.monotonic()
        for step in range(STEPS):
            at_fault = step == scenario.step
            if at_fault:
                begin = time.monotonic()
            committed, before = session.step, digest(session.residuals())
            try:
                if at_fault and saving is not None:
                    saving.wait()  # the fault comes after the last checkpoint, not in the middle of it
                if at_fault and self.guilty and self._misbehave(session):
                    return
                self._step(session, step, poisoned=at_fault and self.guilty and scenario.fault == "nan")
            except Exception as error:
                if session.step == committed:
                    self.report.residuals_kept = digest(session.residuals()) == before
                self._failed(error, time.monotonic() - begin)
                return
            self.taken += 1
            if saving is not None:
                saving.step()
        if isinstance(session, PeriodicSession):
            session.finish()
        if saving is not None:
            saving.wait()

    def _checkpointer(self, session: BaseSession, *, every: int | None = SAVE_EVERY) -> thinwire.Checkpointer:
        folder = Path(self.folder) / str(self.scenario.number)
        return thinwire.Checkpointer(folder, session, self.model, self.optimizers, every=every)

    def _resume(self, session: BaseSession) -> BaseSession:
        """As after a restart: a new model continues from what is left of the checkpoints."""
        session.detach()
        if self.guilty and self.scenario.fault == "torn file":
            newest = sorted((Path(self.folder) / str(self.scenario.number)).glob("step-*"))[-1]
            path = newest / f"rank-{self.worker.rank}.pt"
            os.truncate(path, path.stat().st_size // 2)
        os.fsync = FSYNC
        wait_for_all(self.worker, f"chaos/{self.scenario.number}/resume")
        self._new_model()
        session = self._attach()
        self.report.resumed = self._checkpointer(session).load_latest()
        self._step(session, STEPS, poisoned=False)
        if isinstance(session, PeriodicSession):
            session.finish()
        return session

    def _step(self, session: BaseSession, step: int, *, poisoned: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = square_loss(self.model, self.worker.rank, step)
        (loss * torch.nan if poisoned else loss).backward()
        if isinstance(session, thinwire.Session) and self.scenario.host == "session":
            session.average({name: p.grad for name, p in self.module.named_parameters()}, in_place=True)
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        # Averaged gradients are finite on all ranks or on none; with a schedule each rank steps all the same.
        if finite or self.scenario.host == "periodic":
            for optimizer in self.optimizers:
                optimizer.step()

    def _misbehave(self, session: BaseSession) -> bool:
        """Do what the scenario says; True if this rank takes no further part."""
        scenario, pid = self.scenario, os.getpid()
        match scenario.fault:
            case "kill" if scenario.seconds:
                threading.Timer(scenario.seconds, os.kill, (pid, signal.SIGKILL)).start()
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                # Long enough for all to notice; somebody else must wake this process up.
                wake = f"sleep {TIMEOUT + 5}; kill -CONT {pid}"
                subprocess.Popen(["sh", "-c", wake], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                os.kill(pid, signal.SIGSTOP)
            case "delay":
                time.sleep(scenario.seconds)
            case "exception":
                raise ZeroDivisionError("a bug of the user's")
            case "early end":
                return True
            case "hostile payload":
                self.report.fired = False
                for executor in session.engine.executors:
                    executor.execute = self._corrupting(executor.execute)
            case "full disk":
                os.fsync = _no_space
            case _:
                pass
        return False

    def _corrupting(
        self, execute: Callable[[frames.Primitive], object]
    ) -> Callable[[frames.Primitive], object]:
        """Changes one byte of every frame that this rank sends."""

        def corrupted(op: frames.Primitive) -> object:
            match op:
                case frames.AllGather() if op.payload_bytes:
                    op = replace(op, block=self._changed(op.block))
                case frames.AllToAll():
                    mine = self.worker.rank
                    blocks = [b if r == mine else self._changed(b) for r, b in enumerate(op.blocks)]
                    op = replace(op, blocks=tuple(blocks))
                case frames.Broadcast() if op.src == self.worker.rank:
                    op.block.copy_(self._changed(op.block))
                case _:
                    pass
            return execute(op)

        return corrupted

    def _changed(self, block: torch.Tensor) -> torch.Tensor:
        if block.numel() == 0 or block.dtype != torch.uint8:
            return block
        self.report.fired = True
        changed = block.clone()
        changed[int(self.scenario.seconds * 1e6) % block.numel()] ^= 1 << (self.scenario.number % 8)
        return changed

    def _failed(self, error: Exception, seconds: float) -> Report:
        self.report.kind, self.report.error = type(error).__name__, str(error)
        self.report.seconds = seconds
        return self.report

    def _end(self, session: BaseSession) -> Report:
        # A session whose method remembers nothing does not count.
        self.report.step = session.step or self.taken
        if isinstance(session, PeriodicSession):
            self.report.model = digest(session.common_parameters())
        else:
            self.report.model = digest(dict(self.module.named_parameters()))
        self.report.readable = self._unreadable(session)
        return self.report

    def _unreadable(self, session: BaseSession) -> str:
        try:
            state = session.sealed()
        except Exception as error:
            return f"state_dict raises {type(error).__name__}: {error}"
        bad = [name for name, value in flattened(state) if not bool(value.isfinite().all())]
        return f"{bad[0]} is not finite" if bad else ""


def transformer() -> nn.Module:
    """The same weights wherever it is called. A batch of `mlp` is a sequence of four tokens here."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Linear(40, 32), nn.Unflatten(0, (1, -1)), block, nn.Linear(32, 40))


def _no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def flattened(value: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """All floating-point tensors in a state."""
    if isinstance(value, torch.Tensor):
        return [(name, value)] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [pair for key, each in value.items() for pair in flattened(each, f"{name}/{key}")]
    if isinstance(value, list | tuple):
        return [pair for key, each in enumerate(value) for pair in flattened(each, f"{name}/{key}")]
    return []


def digest(tensors: dict[str, Any]) -> str:
    """Equal for equal bits."""
    total = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(flattened(tensors)):
        total.update(name.encode())
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return total.hexdigest()
