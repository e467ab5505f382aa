"""Methods on a language model trained with AdamW: validation loss against bytes, with two controls.

Workers train in lock-step in one process, so that a run needs no network; PyTorch's own PowerSGD hook needs
processes. The controls are `dense` and a lone worker that never communicates. What a method recovers is the
part of the gap between the two that it closes.

The learning rates are chosen first, on other data and with other seeds, for `dense` and for every method
alike.
"""

from __future__ import annotations

import hashlib
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer

from benchmarks.common import chosen_methods, measuring, show
from benchmarks.language_runs import ALONE, PYTORCH, Run, Setting, train
from benchmarks.language_times import LINKS, by_link, compute_seconds, shapes_of
from thinwire.core.measured_link import VARIABLE
from thinwire.errors import ConfigError
from thinwire.methods.registry import parse
from thinwire.net.link import slowest_link
from thinwire.predict.recommend import duration, seconds_of
from thinwire.tools.cli.show import JsonFile, Methods, errors, save
from thinwire.tools.workloads import load

METHODS = (
    "dense",
    ALONE,
    "pytorch-powersgd",
    "qsgd(bits=4)",
    "topk(ratio=0.01)",
    "dgc(ratio=0.01, momentum=0.0)",
    "powersgd(rank=4)",
    "scalecom(ratio=0.01)",
    "pqasgd(every=8, bits=4)",
    "diloco(every=16, bits=4)",
    "diloco(every=32, bits=4)",
    "sparseloco(every=5, ratio=0.05)",
    "adam(exchange=efsign(bucket=4096))",
    "demo(ratio=0.01)",
    "hierarchical(outer=qsgd(bits=4), local=2)",
)
SIZES = {"0.4m": (128,) * 2, "2m": (192,) * 4, "10m": (384,) * 6}


@dataclass(frozen=True)
class Row:
    """One method: means over its seeds. The controls count with the same seeds."""

    method: str
    rate: float
    seeds: int
    loss: float
    spread: float
    """Between the smallest and the largest of the seeds."""
    behind: float
    """How much larger the loss is than that of `dense` with the same seeds."""
    recovered: float
    """The part of the gap between the lone worker and `dense`, with the same seeds."""
    sent: float
    """Of the bytes of `dense`, in the second half of the steps."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Of a step, predicted, by link."""


def command(
    data: Annotated[str, typer.Option(help="What is learned and judged, such as text:FILE.")] = "synthetic",
    tune_data: Annotated[
        str | None, typer.Option(help="Where the learning rates are chosen; none takes the first rate.")
    ] = None,
    rates: Annotated[str, typer.Option(help="Learning rates to choose from.")] = "2e-3",
    size: Annotated[str, typer.Option(help=f"Of the transformer: {' or '.join(SIZES)}.")] = "2m",
    workers: Annotated[int, typer.Option(min=2, help="In lock-step.")] = 4,
    steps: Annotated[int, typer.Option(min=10, help="Steps that are judged.")] = 1000,
    tune_steps: Annotated[int, typer.Option(min=10, help="Steps of a run that chooses the rate.")] = 300,
    tune_size: Annotated[
        str, typer.Option(help="Of the transformer that chooses the rate; none: --size.")
    ] = "",
    tune_workers: Annotated[
        int, typer.Option(min=0, help="Workers of the runs that choose the rate; 0: --workers.")
    ] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Rows of 64 characters for each worker and step.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Other weights and batches.")] = 3,
    at_once: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 2,
    link: Annotated[
        str,
        typer.Option(envvar=VARIABLE, help="By which sessions choose operations; none: 1 Gbit/s."),
    ] = "",
    step_time: Annotated[
        str, typer.Option(help="Computation of a step, such as 170ms, for predicted times; none: measured.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Finished runs are kept here, and not run again.")] = Path(
        "out/language"
    ),
    method: Methods = None,
    json_file: JsonFile = None,
) -> None:
    """A transformer and AdamW: the validation loss of every method, beside `dense` and a lone worker."""
    with errors():
        asked = chosen_methods(method) or METHODS
        chosen = list(dict.fromkeys(("dense", ALONE, *asked)))
        tried = _numbers(rates)
        judged = Setting(data, _widths("--size", size), workers, steps, batch)
        compute = seconds_of(step_time) if step_time else None
        if link:
            slowest_link(link)
            os.environ[VARIABLE] = link  # for the processes that train
        small = _widths("--tune-size", tune_size or size)
        tuning = None
        if tune_data is not None:
            tuning = Setting(tune_data, small, tune_workers or workers, tune_steps, batch)
    best = dict.fromkeys(chosen, tried[0])
    if tuning is not None and len(tried) > 1:
        shorter = {name: with_warmup_of(name, tuning.steps / steps) for name in chosen}
        found = _all([(tuning, shorter[name], rate, 1000) for name in chosen for rate in tried], out, at_once)
        for name in chosen:
            best[name] = min(tried, key=lambda rate: found[tuning, shorter[name], rate, 1000].loss)
    jobs = [(judged, name, best[name], seed) for seed in range(seeds) for name in chosen]
    found = _all(jobs, out, at_once)
    runs = {name: [found[job] for job in jobs if job[1] == name] for name in chosen}
    learned = load(data)
    compute = compute_seconds(judged, learned) if compute is None else compute
    shapes = shapes_of(judged, learned)
    rows = summary(runs, by_link(runs, shapes, workers, compute))
    show(
        f"{data}, transformer of {size}, {workers} workers, {steps:,} steps, {seeds} seeds",
        rows,
        {
            "method": lambda r: r.method,
            "rate": lambda r: f"{r.rate:g}",
            "seeds": lambda r: str(r.seeds),
            "loss": lambda r: f"{r.loss:.3f}",
            "spread": lambda r: f"{r.spread:.3f}",
            "behind dense": lambda r: f"{r.behind:+.3f}",
            "recovered": lambda r: f"{100 * r.recovered:.0f} %",
            "sent": lambda r: f"{100 * r.sent:.2f} %",
            **{link: lambda r, link=link: duration(r.seconds[link]) for link in LINKS},
        },
    )
    study = Study(
        setting=judged.public(),
        tuning=None if tuning is None else tuning.public(),
        rates=tried,
        seeds=seeds,
        runs=runs,
        compute=compute,
        shapes=shapes,
        link=link,
    )
    save(json_file, msgspec.to_builtins(study))


class Study(msgspec.Struct, kw_only=True):
    """The file that `--json` writes; `language-page` reads it. It names no folder of this machine."""

    setting: Setting
    tuning: Setting | None = None
    rates: list[float]
    seeds: int
    runs: dict[str, list[Run]]
    compute: float
    """Seconds of a step without communication."""
    shapes: dict[str, tuple[int, ...]]
    link: str = ""
    """By which sessions chose operations."""


def with_warmup_of(method: str, part: float) -> str:
    """The method with this part of its warm-up, for a run with fewer steps."""
    chosen = None if method in (ALONE, PYTORCH) else parse(method)
    steps = getattr(chosen, "warmup", None)
    return str(replace(chosen, warmup=max(1, round(part * steps)))) if chosen and steps else method


def _widths(option: str, size: str) -> tuple[int, ...]:
    if size not in SIZES:
        raise ConfigError(f"{option} is {' or '.join(SIZES)}, not {size!r}")
    return SIZES[size]


def _numbers(text: str) -> list[float]:
    try:
        return [float(rate) for rate in text.split(",")]
    except ValueError:
        raise ConfigError(f"--rates takes numbers with commas, like 1e-3,2e-3, not {text!r}") from None


def summary(
    runs: Mapping[str, list[Run]], seconds: Mapping[str, dict[str, float]] | None = None
) -> list[Row]:
    """A row for each method, the smallest loss first; `seconds` are those of a step by method and link."""

    def mean(values: Iterable[float]) -> float:
        return statistics.fmean(values)

    controls = {name: {run.seed: run.loss for run in runs[name]} for name in ("dense", ALONE)}
    bytes_of_dense = mean(run.sent for run in runs["dense"])
    rows: list[Row] = []
    for name, own in runs.items():
        loss = mean(run.loss for run in own)
        dense, alone = (mean(losses[run.seed] for run in own) for losses in controls.values())
        rows.append(
            Row(
                method=name,
                rate=own[0].rate,
                seeds=len(own),
                loss=loss,
                spread=max(run.loss for run in own) - min(run.loss for run in own),
                behind=loss - dense,
                recovered=(alone - loss) / (alone - dense),
                sent=mean(run.sent for run in own) / bytes_of_dense,
                seconds=(seconds or {}).get(name, {}),
            )
        )
    return sorted(rows, key=lambda row: row.loss)


Job = tuple[Setting, str, float, int]


def _all(jobs: Sequence[Job], out: Path, at_once: int) -> dict[Job, Run]:
    """All runs: those that `out` has, and the others, some at a time."""
    files = {job: out / file_of(job) for job in jobs}
    found = {job: msgspec.json.decode(f.read_bytes(), type=Run) for job, f in files.items() if f.exists()}
    missing = [job for job in jobs if job not in found]
    out.mkdir(parents=True, exist_ok=True)
    spawn = get_context("spawn")
    with (
        measuring(len(missing)) as progress,
        ProcessPoolExecutor(at_once, mp_context=spawn, initializer=_with_one_thread) as pool,
    ):
        begun = {pool.submit(train, *job): job for job in missing}
        for future in as_completed(begun):
            job = begun[future]
            found[job] = future.result()
            files[job].write_bytes(msgspec.json.encode(found[job]))
            progress(job[1])
    return found


def file_of(job: Job) -> str:
    """The same on every machine, so that runs can be kept and continued elsewhere."""
    setting, *rest = job
    return f"{hashlib.sha256(repr((setting.public(), *rest)).encode()).hexdigest()[:16]}.json"


def _with_one_thread() -> None:
    torch.set_num_threads(1)
