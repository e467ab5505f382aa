"""The table at the end of a comparison, and its CSV file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinwire.tools.compare.records import Records, Run
from thinwire.tools.report import numbers
from thinwire.tools.report.summary import Spread, Summary, duration, summarise


def header(records: Records) -> tuple[str, ...]:
    target = () if records.setting.target is None else ("steps to target", "time to target")
    figures = ("sent", "received", "rounds", "compute", "compress", "wait", "step", "speed-up")
    return ("method", records.setting.measure, *target, *figures)


def rows(records: Records) -> list[tuple[str, ...]]:
    """What the terminal shows: means over the seeds; bytes and times are per step and worker."""
    summaries = summarise(records)
    return [_cells(one, summaries[0], records) for one in summaries]


def _cells(one: Summary, base: Summary, records: Records) -> tuple[str, ...]:
    setting = records.setting
    name = f"{one.method} (failed)" if one.failures else one.method
    score = numbers.percent if setting.measure == "accuracy" else numbers.digits
    target: tuple[str, ...] = ()
    if setting.target is not None:
        target = (_shown(one.target_step, "{:.0f}".format), _shown(one.target_seconds, numbers.seconds))
    steps = one.steps.mean if one.steps is not None else 1.0

    def per_step(count: float) -> str:
        return numbers.data(count / max(steps, 1.0))

    return (
        name,
        _shown(one.measure, score),
        *target,
        _shown(one.sent, per_step),
        _shown(one.received, per_step),
        _shown(one.rounds, "{:.2g}".format),
        *(
            _shown(value, numbers.seconds)
            for value in (one.compute_seconds, one.compress_seconds, one.wait_seconds, one.step_seconds)
        ),
        _speed_up(one, base, records),
    )


def _shown(value: Spread | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value.mean)


def _speed_up(one: Summary, base: Summary, records: Records) -> str:
    """Over the first method: by the time to the target, or of all steps if there is no target."""
    own, theirs = duration(one, records.setting), duration(base, records.setting)
    if own is None or theirs is None or not own.mean:
        return "-"
    return f"{theirs.mean / own.mean:.2f} x"


def as_json(records: Records) -> list[dict[str, Any]]:
    return [asdict(one) for one in summarise(records)]


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """One row a run, every figure of it but the bytes by layer."""
    with path.open("w", newline="") as file:
        records = [{key: value for key, value in asdict(run).items() if key != "layers"} for run in runs]
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
