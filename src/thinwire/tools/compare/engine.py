"""Runs every method from the same weights on the same batches, each in worker processes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from thinwire.errors import ConfigError
from thinwire.net import link as links
from thinwire.net.launch import WorkerFailedError, run_local
from thinwire.tools.compare.records import Evaluation, Record, Records, Run, Setting, Step, write
from thinwire.tools.compare.task import PYTORCH, RECIPES, Optimizer, Task
from thinwire.tools.compare.training import train
from thinwire.tools.lab.hosts import hosts_for
from thinwire.tools.lab.namespaces import Host
from thinwire.tools.workloads import build, load
from thinwire.version import __version__

EVALUATIONS = 20
DAY = 86_400.0


class Watcher(Protocol):
    """Whoever wants to see how it goes."""

    def begin(self, method: str, seed: int, seeds: int) -> None: ...
    def step(self, record: Step) -> None: ...
    def evaluation(self, record: Evaluation) -> None: ...
    def end(self, method: str, failed: str | None) -> None: ...


@dataclass(frozen=True)
class Comparison:
    """What a user asked for. None means: what suits the model.

    Args:
        methods: full method strings, the one to compare against first (see `task.line_up`).
        workers: local worker processes.
        link: how they are joined, see `thinwire.net.link`.
        model: one of `workloads.MODELS`.
        data: a dataset's specification, see `workloads.load`.
        steps: of training; or `epochs` over the training data.
        target: stop where the test accuracy reaches this, a number between 0 and 1.
        evaluate_every: steps between two looks at the test data.
        seeds: runs of every method, with other weights and batches.
    """

    methods: Sequence[str]
    workers: int = 4
    link: str = "100mbit"
    model: str = "mlp"
    data: str = "digits"
    hidden: tuple[int, ...] = ()
    steps: int | None = None
    epochs: float | None = None
    target: float | None = None
    evaluate_every: int | None = None
    batch: int | None = None
    learning_rate: float | None = None
    optimizer: Optimizer | None = None
    seeds: int = 1
    command: str = "thinwire.compare"


def prepare(wanted: Comparison) -> tuple[Setting, Task]:
    """Check everything that can be wrong before a process starts."""
    data = load(wanted.data)
    model = build(wanted.model, data, 0, wanted.hidden)
    recipe = RECIPES[wanted.model]
    batch = wanted.batch or recipe.batch
    steps = wanted.steps or recipe.steps
    if wanted.epochs is not None:
        if wanted.steps is not None:
            raise ConfigError("give steps or epochs, not both")
        steps = max(1, round(wanted.epochs * len(data.inputs) / (batch * wanted.workers)))
    if wanted.target is not None and not 0 < wanted.target < 1:
        raise ConfigError(f"the target accuracy is a number between 0 and 1, not {wanted.target}")
    link = links.parse(wanted.link)
    peers = [method for method in wanted.methods if method in PYTORCH]
    if peers and not link.lab:
        raise ConfigError(
            f"{peers[0]} does not go through thinwire's channel, so only a real link slows it down: "
            "use --link lab:RATE (needs root), or leave it out"
        )
    task = Task(
        method=wanted.methods[0],
        seed=0,
        model=wanted.model,
        hidden=wanted.hidden,
        data=wanted.data,
        batch=batch,
        learning_rate=wanted.learning_rate or recipe.learning_rate,
        optimizer=wanted.optimizer or recipe.optimizer,
        steps=steps,
        evaluate_every=wanted.evaluate_every or max(1, steps // EVALUATIONS),
        target=wanted.target,
        link=wanted.link,
    )
    setting = Setting(
        command=wanted.command,
        thinwire=__version__,
        model=wanted.model,
        data=data.name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=[(name, list(parameter.shape)) for name, parameter in model.named_parameters()],
        workers=wanted.workers,
        link=wanted.link,
        bandwidth=None if link.unlimited else link.link.bandwidth,
        latency=link.link.latency,
        batch=batch,
        learning_rate=task.learning_rate,
        optimizer=task.optimizer,
        steps=steps,
        seeds=wanted.seeds,
        measure="accuracy" if data.kind == "images" else "perplexity",
        target=wanted.target,
        compute=0.0,
    )
    return setting, task


def run(
    wanted: Comparison,
    out: Path,
    watcher: Watcher | None = None,
    prepared: tuple[Setting, Task] | None = None,
) -> Records:
    """Train with every method; `records.jsonl` in `out` has every run that has ended, should this one not."""
    setting, task = prepared or prepare(wanted)
    out.mkdir(parents=True, exist_ok=True)
    records = Records(setting, [], [], [])
    with hosts_for(wanted.link, wanted.workers) as hosts:
        for method in wanted.methods:
            for seed in range(wanted.seeds):
                if watcher is not None:
                    watcher.begin(method, seed, wanted.seeds)
                one = _one(replace(task, method=method, seed=seed), wanted.workers, hosts, records, watcher)
                records.runs.append(one)
                # The time of a step without communication is known from the first run on.
                compute = records.runs[0].compute_seconds
                records = replace(records, setting=replace(setting, compute=compute))
                _write(records, out)
                if watcher is not None:
                    watcher.end(method, one.failed)
    return records


def _write(records: Records, out: Path) -> None:
    everything: list[Record] = [records.setting, *records.steps, *records.evaluations, *records.runs]
    write(out / "records.jsonl", everything)


def _one(
    task: Task, workers: int, hosts: Sequence[Host] | None, records: Records, watcher: Watcher | None
) -> Run:
    """One run. What it reports is kept even if it fails."""
    steps: list[Step] = []
    looks: list[Evaluation] = []

    def on_report(rank: int, record: Step | Evaluation) -> None:
        del rank
        if isinstance(record, Step):
            steps.append(record)
            if watcher is not None:
                watcher.step(record)
        else:
            looks.append(record)
            if watcher is not None:
                watcher.evaluation(record)

    try:
        result = run_local(train, workers, task, timeout=DAY, on_report=on_report, hosts=hosts)[0]
    except WorkerFailedError as error:
        result = _failed(error, steps)
    records.steps.extend(steps)
    records.evaluations.extend(looks)
    last = looks[-1] if looks else None
    score = (last.loss, last.accuracy, last.perplexity) if last is not None else (float("inf"), 0.0, 1e300)
    return Run(task.method, task.seed, loss=score[0], accuracy=score[1], perplexity=score[2], **result)


def _failed(error: WorkerFailedError, steps: Sequence[Step]) -> dict[str, Any]:
    """What is known of a run that ended with an error: its last line says what was wrong."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    last = steps[-1] if steps else None
    return {
        "steps": last.step if last is not None else 0,
        "seconds": last.seconds if last is not None else 0.0,
        "step_seconds": last.seconds / last.step if last is not None else 0.0,
        "compute_seconds": 0.0,
        "compress_seconds": 0.0,
        "wait_seconds": 0.0,
        "sent": last.sent if last is not None else 0,
        "received": last.received if last is not None else 0,
        "rounds": 0.0,
        "payload": 0.0,
        "target_step": None,
        "target_seconds": None,
        "target_sent": None,
        "failed": lines[-1].strip() if lines else "ended without a word",
    }
