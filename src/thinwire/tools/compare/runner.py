"""Runs every method from the same weights on the same batches, each in its own worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.net.launch import WorkerFailedError, run_local
from thinwire.tools.compare.records import Evaluation, Records, Run, Setting, Step, write
from thinwire.tools.compare.settings import Comparison, prepare
from thinwire.tools.compare.training import train
from thinwire.tools.lab.hosts import hosts_for
from thinwire.tools.lab.namespaces import Host

FILE = "records.jsonl"
DAY = 86_400.0


class Observer:
    """Told of the progress of a comparison. This one ignores it."""

    def begin(self, method: str, seed: int) -> None: ...
    def step(self, record: Step) -> None: ...
    def evaluation(self, record: Evaluation) -> None: ...
    def end(self, method: str, failed: str | None) -> None: ...


def run(
    asked: Comparison, out: Path, observer: Observer | None = None, setting: Setting | None = None
) -> Records:
    """Train with every method. `records.jsonl` in `out` always has all runs that have ended.

    Args:
        setting: of `prepare(asked)`, if the caller has it.
    """
    observer = observer or Observer()
    records = Records(setting or prepare(asked))
    out.mkdir(parents=True, exist_ok=True)
    with hosts_for(asked.link, asked.workers) as hosts:
        for method in asked.methods:
            for seed in range(asked.seeds):
                observer.begin(method, seed)
                one = _run(records, method, seed, hosts, observer)
                records.runs.append(one)
                write(out / FILE, records)
                observer.end(method, one.failed)
    return records


def _run(records: Records, method: str, seed: int, hosts: Sequence[Host] | None, observer: Observer) -> Run:
    """One run. Its steps and evaluations are kept even if it fails."""
    steps: list[Step] = []
    tests: list[Evaluation] = []

    def on_report(rank: int, record: Step | Evaluation) -> None:
        del rank
        if isinstance(record, Step):
            steps.append(record)
            observer.step(record)
        else:
            tests.append(record)
            observer.evaluation(record)

    setting = records.setting
    arguments = (setting, method, seed)
    try:
        return run_local(train, setting.workers, *arguments, timeout=DAY, on_report=on_report, hosts=hosts)[0]
    except WorkerFailedError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        # The last line of a traceback says what was wrong.
        why = lines[-1].strip() if lines else "ended without a message"
        last = steps[-1] if steps else Step(method, seed, 0, None, 0.0, 0, 0)
        return Run(
            method=method,
            seed=seed,
            steps=last.step,
            seconds=last.seconds,
            step_seconds=last.seconds / max(last.step, 1),
            sent=last.sent,
            received=last.received,
            failed=why,
        ).scored(tests)
    finally:
        records.steps.extend(steps)
        records.evaluations.extend(tests)
