"""One worker: runs the script in this process, as `python script` would, with its models attached.

`python -m thinwire.tools.script.worker JOB` is what `thinwire run` starts; under torchrun `run` calls `work`.
"""

from __future__ import annotations

import ctypes
import math
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.parallel import DistributedDataParallel

from thinwire import log
from thinwire.core.optimizers import Optimizers
from thinwire.hosts.auto import AutoSession
from thinwire.hosts.scripts import Attached, ScriptError, ScriptHost, summary_order
from thinwire.hosts.watch import Watch
from thinwire.net.meter import Meter
from thinwire.sessions.optimizer_checks import kind_of
from thinwire.sessions.replicas import bare
from thinwire.tools.compare.records import finite
from thinwire.tools.compare.training import payload_by_parameter
from thinwire.tools.lab.inside import counters
from thinwire.tools.script.clock import Clock
from thinwire.tools.script.messages import Ended, Failure, Job, ModelReport, Sender, Stepped, Valued
from thinwire.tools.script.output import watched_output

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_OURS = {__file__, runpy.__file__, "<frozen runpy>"}


class Worker:
    """This process's part of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.sender = Sender(job.folder, self.rank)
        self.values: dict[str, float | None] = {}
        self._follows = job.follow and self.rank == 0
        self._clock = Clock(job.steps, self._on_step if self._follows else None)
        self._watches: list[Watch] = []
        self._host = ScriptHost(
            job.method, link=job.link, on_model=self._on_model, on_attached=self._clock.attached
        )
        self._interface = counters()

    def run(self) -> Ended:
        """Run the script to its end. What it raises is raised."""
        if self.rank == 0:
            log.use_recorder(self._record)
        try:
            with self._host, watched_output(self.job.patterns if self.rank == 0 else {}, self._record):
                run_script(self.job)
        finally:
            log.use_recorder(None)
            self._clock.close()
        return self._ended()

    def _on_model(self, model: nn.Module, optimizers: Optimizers) -> None:
        if self.job.follow:
            self._watches.append(Watch())
            self._watches[-1].start(model, optimizers)

    def _on_step(self) -> None:
        self.sender.send(Stepped(self._clock.steps, self._clock.seconds, *self._bytes()))

    def _record(self, values: Mapping[str, float], step: int | None = None) -> None:
        known = {name: finite(value) for name, value in values.items()}
        self.values.update(known)
        if self._follows:
            at = self._clock.steps if step is None else step
            self.sender.send(Valued(at, self._clock.running, self._bytes()[0], known))

    def _bytes(self) -> tuple[int, int]:
        """Sent and received so far: metered, or by the interface if the method has no meter."""
        meters = [one.meter for one in self._host.attached if one.meter is not None]
        if not meters:
            return self._interface_bytes() or (0, 0)
        return sum(each.sent_bytes for each in meters), sum(each.received_bytes for each in meters)

    def _interface_bytes(self) -> tuple[int, int] | None:
        now = counters()
        if now is None or self._interface is None:
            return None
        return now.sent - self._interface.sent, now.received - self._interface.received

    def _compute(self) -> tuple[float, float, float]:
        found = [watch.compute() for watch in self._watches]
        return (
            sum(each.forward for each in found),
            sum(each.backward for each in found),
            sum(each.rest for each in found),
        )

    def _ended(self) -> Ended:
        interface = self._interface_bytes()
        named = summary_order(self._host.attached)
        return Ended(
            workers=self.size,
            steps=self._clock.steps,
            seconds=self._clock.seconds,
            step_seconds=self._clock.step_seconds,
            models=[_report(name, one, self._clock.steps, len(named) > 1) for name, one in named],
            values=self.values,
            compute=self._compute(),
            interface_sent=None if interface is None else interface[0],
        )


def run_script(job: Job) -> None:
    """As `python script ARGS` or `python -m module ARGS`; a script that leaves with code 0 ends well."""
    sys.argv = [job.script, *job.arguments]
    try:
        if job.module:
            sys.path[0] = os.getcwd()
            runpy.run_module(job.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(job.script).resolve().parent)
            runpy.run_path(job.script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


def work(job: Job) -> Ended:
    """Run the job and report. Whatever the script raises ends this process, with the same exit code."""
    worker = Worker(job)
    try:
        ended = worker.run()
    except BaseException as error:
        failure = _failure(error)
        worker.sender.send(failure)
        if job.folder is None:
            _tell_torchrun(error)
        if job.folder is None or job.to_log:
            print(failure.text, file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(failure.code)
    worker.sender.send(ended)
    return ended


def _tell_torchrun(error: BaseException) -> None:
    """It shows the traceback of the worker that failed first, if it knows it."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ and not isinstance(error, SystemExit):
        handler = get_error_handler()
        handler.initialize()
        handler.record_exception(error)


def _failure(error: BaseException) -> Failure:
    at = time.monotonic()
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return Failure(at, code, "" if isinstance(error.code, int) else str(error.code))
    if isinstance(error, ScriptError):
        return Failure(at, 2, f"thinwire: {error}")
    text = "".join(traceback.format_exception(type(error), error, _of_script(error.__traceback__)))
    interrupted = isinstance(error, KeyboardInterrupt)
    return Failure(at, 128 + signal.SIGINT if interrupted else 1, text.rstrip("\n"))


def _of_script(frames: TracebackType | None) -> TracebackType | None:
    """Without the frames that lead to the script."""
    while frames is not None and frames.tb_frame.f_code.co_filename in _OURS:
        frames = frames.tb_next
    return frames


def _report(name: str, one: Attached, steps: int, several: bool) -> ModelReport:
    """`steps` are the script's; a session counts those in which it took part."""
    shapes = {key: tuple(p.shape) for key, p in bare(one.model).named_parameters() if p.requires_grad}
    parameters = sum(map(math.prod, shapes.values()))
    session, meter = one.session, one.meter or Meter()
    total, steps = meter.total, session.meter.steps if session else steps
    method = "" if session is None else str(session.method)
    dense = 4 * parameters if session is None else session.dense_bytes
    payload = (total.payload_bytes + total.overhead_bytes) / max(steps, 1)
    layers = {} if session is None else payload_by_parameter(session.engine, payload)
    rates = [float(group.get("lr", 0.0)) for group in one.optimizers.groups]

    def named(by_parameter: dict[str, Any]) -> dict[str, Any]:
        return {f"{name}.{key}" if several else key: value for key, value in by_parameter.items()}

    return ModelReport(
        model=name,
        method=f"auto: {method}" if isinstance(session, AutoSession) else method,
        parameters=parameters,
        steps=steps,
        rounds=total.operations,
        payload_bytes=total.payload_bytes,
        overhead_bytes=total.overhead_bytes,
        sent_bytes=total.sent_bytes,
        received_bytes=total.received_bytes,
        sent_inside_bytes=meter.inside.sent_bytes,
        ratio_to_dense=total.payload_bytes / max(steps * dense, 1),
        wait_seconds_per_step=meter.network_seconds / max(steps, 1),
        compress_seconds_per_step=meter.work_seconds / max(steps, 1),
        layers=named(layers),
        shapes=named(shapes),
        optimizer=str(one.optimizers),
        learning_rate=rates[0] if rates else 0.0,
        kind=kind_of(one.optimizers),
        bucket_bytes=_bucket_bytes(one.model),
    )


def _bucket_bytes(model: nn.Module) -> int | None:
    ddp = cast(Any, model)
    default = not isinstance(model, DistributedDataParallel) or ddp.bucket_bytes_cap_default
    return None if default else int(ddp.bucket_bytes_cap)


def _main() -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)  # a launcher that is killed cannot end us
    job = msgspec.json.decode(sys.argv[1], type=Job)
    if os.getppid() != job.launcher:  # it has ended before that
        sys.exit(1)
    work(job)


if __name__ == "__main__":
    _main()
