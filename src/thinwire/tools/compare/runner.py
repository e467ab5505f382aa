"""Runs every method from the same weights on the same batches, each in its own worker processes."""

from __future__ import annotations

import fcntl
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import asdict, replace

from thinwire.errors import ConfigError
from thinwire.net.launch import WorkerFailedError, run_local
from thinwire.tools.compare.observer import Observer
from thinwire.tools.compare.records import Evaluation, Records, Run, Setting, Step, read, write
from thinwire.tools.compare.scripts import ScriptRun
from thinwire.tools.compare.settings import Comparison, prepare
from thinwire.tools.compare.training import train
from thinwire.tools.lab.hosts import hosts_for
from thinwire.tools.lab.namespaces import Host

FILE = "records.jsonl"
LOCK = ".lock"
DAY = 86_400.0
HOUR = 3600.0
"""For one operation: gradients take minutes on a slow link. A worker that ends is noticed at once."""
MAY_CHANGE = ("command", "seeds", "baseline")
"""Settings that may differ when a comparison is resumed: they do not change a run that has ended."""
FILLED = ("parameters", "layers", "optimizer", "learning_rate", "measure")
"""Settings of a script that its first run fills in; without --steps also their number."""


def run(
    asked: Comparison,
    out: Path,
    observer: Observer | None = None,
    setting: Setting | None = None,
    *,
    resume: bool = False,
) -> Records:
    """Train with every method. `records.jsonl` in `out` always has all runs that have ended.

    Args:
        asked: what to compare.
        out: the folder; no other comparison may write to it at the same time.
        observer: told of the progress.
        setting: of `prepare(asked)`, if the caller has it.
        resume: keep the runs of an earlier comparison with the same settings that is in `out`.
    """
    observer = observer or Observer()
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out), hosts_for(asked.link, asked.workers) as hosts:
        records = Records(setting or prepare(asked))
        filled = () if asked.script is None else FILLED if asked.steps else (*FILLED, "steps")
        earlier = _earlier(out / FILE, records.setting, filled) if resume else {}
        for done in earlier.values():
            records = replace(records, setting=done.setting)
        for method in asked.methods:
            for seed in range(asked.seeds):
                observer.begin(method, seed)
                if (method, seed) in earlier:
                    done = earlier[method, seed]
                    records.steps.extend(done.steps)
                    records.evaluations.extend(done.evaluations)
                    records.values.extend(done.values)
                    records.runs.extend(done.runs)
                elif asked.script is not None:
                    runner = ScriptRun(asked, asked.script, method, seed, out, observer)
                    records = runner.run(records, hosts)
                    write(out / FILE, records)
                else:
                    records.runs.append(_run(records, method, seed, hosts, observer))
                    write(out / FILE, records)
                observer.end(method, records.runs[-1].failed)
        write(out / FILE, records)
    return records


@contextmanager
def _locked(folder: Path) -> Generator[None, None, None]:
    """Keeps other comparisons out of the folder. The kernel releases the lock when this process ends."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another comparison is writing to {folder}: give this one another folder (--out), or wait"
            ) from None
        yield


def _earlier(path: Path, setting: Setting, filled: Sequence[str]) -> dict[tuple[str, int], Records]:
    """The runs in a file that ended well, with their steps and evaluations. None if there is no file."""
    if not path.exists():
        return {}
    found = read(path)
    theirs, ours = asdict(found.setting), asdict(setting)
    for name, value in ours.items():
        if name not in (*MAY_CHANGE, *filled) and theirs[name] != value:
            raise ConfigError(
                f"{path} cannot be resumed: its {name} is {theirs[name]}, now it is {value}. "
                "Give the same options, or another folder (--out)"
            )
    setting = replace(setting, **{name: theirs[name] for name in filled})
    return {
        (one.method, one.seed): Records(
            setting,
            [step for step in found.steps if (step.method, step.seed) == (one.method, one.seed)],
            [test for test in found.evaluations if (test.method, test.seed) == (one.method, one.seed)],
            [one],
            [row for row in found.values if (row.method, row.seed) == (one.method, one.seed)],
        )
        for one in found.runs
        if one.failed is None
    }


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
        outcomes = run_local(
            train,
            setting.workers,
            *arguments,
            timeout=DAY,
            group_timeout=HOUR,
            on_report=on_report,
            hosts=hosts,
        )
        return outcomes[0]
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
