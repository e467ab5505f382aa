"""The records of a comparison: one JSON object per line.

Workers report them, `compare` writes them as they are, and `report` needs nothing else.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from thinwire.errors import ConfigError
from thinwire.hosts.scripts import ALONE

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Factor = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=str.lower):
    """Base of the records; the class's name is the line's "kind"."""


HIGHER = re.compile(r"acc|auc|bleu|rouge|f1|precision|recall|score|reward|iou|psnr|top.?\d")
"""Names of results that are better the higher they are; losses, errors and perplexities are not."""

Kind = TypeVar("Kind", bound=Record)


class Setting(Record, frozen=True, kw_only=True):
    """What all runs of a comparison have in common."""

    version: Literal[1] = 1
    """Of the file format."""
    command: str
    thinwire: str
    """The version of the library."""
    script: str | None = None
    """A training script with its arguments; None for one of the built-in tasks."""
    model: str
    """One of `workloads.MODELS`, or the name of the script. What the script trains is known after a step."""
    hidden: tuple[Count, ...]
    """Widths of the model's layers; empty for its own."""
    data: str
    """As `workloads.load` takes it: "digits", "mnist:DIR"; empty for a script."""
    parameters: Count
    layers: dict[str, tuple[Count, ...]]
    """Shapes of the parameters by name."""
    workers: Positive
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the workers compute."""
    cores: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """How many threads of a worker ran at full speed beside each other; None if it is not known."""
    link: str
    """As the user gave it: "100mbit", "lab:100mbit", "none"."""
    bandwidth: Annotated[float, msgspec.Meta(gt=0)] | None
    """Bytes per second and direction of the link; None for no limit."""
    latency: Amount
    """Seconds per message."""
    batch: Count
    """Per worker; 0 for a script."""
    learning_rate: float
    optimizer: str
    momentum: Factor = 0.0
    """Of SGD, after the exchange."""
    momentum_before: Factor = 0.0
    """Instead, each worker's own, before the exchange."""
    steps: Positive
    evaluate_every: Positive
    seeds: Positive
    measure: str
    """What the test measures, "accuracy" or "perplexity"; for a script one of its own values, or empty."""
    target: float | None
    """The test accuracy or perplexity at which a run stops."""
    baseline: bool = True
    """Whether the first method is what the speed-ups of the others are against; without it there are none."""

    @property
    def dataset(self) -> str:
        """The name of the data, without its folder."""
        return self.data.partition(":")[0]

    @property
    def task(self) -> str:
        """What is trained, in words."""
        return self.model if self.script is not None else f"{self.model} on {self.dataset}"

    @property
    def higher_is_better(self) -> bool:
        """Of the measure; of a script's values by their names."""
        return bool(HIGHER.search(self.measure.lower()))

    def is_fraction(self, name: str) -> bool:
        """Whether this value is one from 0 to 1 that is shown in percent."""
        return self.script is None and name == "accuracy"

    def reached(self, test: Evaluation) -> bool:
        """Whether a test is at the target, if there is one."""
        if self.target is None:
            return False
        found = float(getattr(test, self.measure))
        return found >= self.target if self.higher_is_better else found <= self.target

    def result(self, run: Run) -> float | None:
        """The measure at the end of a run."""
        return getattr(run, self.measure) if self.script is None else run.values.get(self.measure)


class Step(Record, frozen=True):
    """One step of one run, on rank 0. Bytes and `seconds` count from the start of the run."""

    method: str
    seed: Count
    step: Count
    loss: float | None
    """None if it was not a finite number."""
    seconds: Amount
    """Training time so far, without evaluations."""
    sent: Count
    received: Count


class Evaluation(Record, frozen=True):
    """The test after a step: of the last common model if replicas differ, otherwise of rank 0's."""

    method: str
    seed: Count
    step: Positive
    seconds: Amount
    sent: Count
    loss: float | None
    accuracy: float
    perplexity: float


class Values(Record, frozen=True):
    """What a script recorded or printed, on rank 0. Bytes and seconds count from the start of the run."""

    method: str
    seed: Count
    step: Count
    seconds: Amount
    sent: Count
    values: dict[str, float | None]
    """By name; None if not finite."""


class Run(Record, frozen=True, kw_only=True):
    """One method with one seed as a whole, on rank 0. Seconds are means per step unless stated otherwise."""

    method: str
    seed: Count
    steps: Count
    loss: float | None = None
    """Loss, accuracy and perplexity are those of the last evaluation."""
    accuracy: float = 0.0
    perplexity: float = 1e300
    values: dict[str, float | None] = {}
    """The last ones of a script, in place of these three."""
    seconds: Amount
    """Training time of all steps."""
    step_seconds: Amount
    """The median step."""
    compute_seconds: Amount = 0.0
    """Forward pass, backward pass until the last gradient, optimizer: medians of these very steps."""
    compress_seconds: Amount = 0.0
    """Work of the method on the gradients, without waiting for the network. May overlap with compute."""
    wait_seconds: Amount = 0.0
    """Inside operations on the network. May overlap with compute."""
    sent: Count
    """Bytes through the interface, per worker, in all steps; with `hierarchical` those of a leader."""
    sent_inside: Count = 0
    """Bytes to other workers of the same host, in all steps; only `hierarchical` tells them apart."""
    received: Count
    rounds: Amount = 0.0
    """Operations per step."""
    payload: Amount = 0.0
    """Bytes per step that the method hands over, with frame headers."""
    target_step: Count | None = None
    target_seconds: Amount | None = None
    target_sent: Count | None = None
    chosen: str | None = None
    """What `auto` chose; None for all others."""
    layers: dict[str, Amount] = {}
    """Payload bytes per step by parameter, as far as they can be told apart."""
    interface_sent: Count | None = None
    """What the kernel counted on rank 0's interface in the same steps; None outside of a lab."""
    failed: str | None = None
    """Why the run ended early, if it did; all other values are those until then."""

    def scored(self, tests: Sequence[Evaluation]) -> Run:
        """With the result of the last of these evaluations."""
        if not tests:
            return self
        last = tests[-1]
        return replace(self, loss=last.loss, accuracy=last.accuracy, perplexity=last.perplexity)


class Records(msgspec.Struct, frozen=True):
    """All records of one comparison."""

    setting: Setting
    steps: list[Step] = []
    evaluations: list[Evaluation] = []
    runs: list[Run] = []
    values: list[Values] = []

    @property
    def methods(self) -> list[str]:
        """In the order in which they ran; the baseline is the first, if there is one."""
        return list(dict.fromkeys(run.method for run in self.runs))

    @property
    def baseline(self) -> str | None:
        """The method that speed-ups are against."""
        return self.runs[0].method if self.setting.baseline and self.runs else None

    @property
    def names(self) -> list[str]:
        """Of a script's values: the measure first, then in the order in which they came."""
        seen = [name for row in self.values for name in row.values]
        first = [self.setting.measure] if self.setting.measure in seen else []
        return list(dict.fromkeys([*first, *seen]))

    @property
    def has_inside(self) -> bool:
        """Whether a method told bytes inside a host from those between hosts."""
        return any(run.sent_inside for run in self.runs)

    def runs_of(self, method: str) -> list[Run]:
        return [run for run in self.runs if run.method == method]

    def results_of(self, method: str) -> dict[int, float]:
        """The measure by step, as a mean over the seeds that have it; of a script at the end of its runs.

        Of perplexity its logarithm, the loss. A seed that failed leaves nothing.
        """
        runs, found = self.runs_of(method), dict[int, list[float]]()
        if not runs or any(run.failed is not None for run in runs):
            return {}
        if self.setting.script is not None:
            ends = [self.setting.result(run) for run in runs]
            found[0] = [value for value in ends if value is not None]
        for test in self.evaluations if self.setting.script is None else ():
            if test.method == method:
                value = test.accuracy if self.setting.measure == "accuracy" else math.log(test.perplexity)
                found.setdefault(test.step, []).append(value)
        complete = {step: values for step, values in found.items() if len(values) == len(runs)}
        return {step: math.fsum(values) / len(values) for step, values in complete.items()}

    def recovered(self, method: str) -> float | None:
        """The part of the gap between a worker alone and the baseline that a method closes.

        At the last step that all three were tested at. None without these controls, or if the worker alone is
        as good there.
        """
        if self.baseline is None or method == self.baseline:
            return None
        base, alone, own = (self.results_of(each) for each in (self.baseline, ALONE, method))
        step = max(base.keys() & alone.keys() & own.keys(), default=None)
        if step is None or method == ALONE:
            return None
        gap = self._ahead(base[step], alone[step])
        return self._ahead(own[step], alone[step]) / gap if gap > 0 else None

    def control_gap(self) -> float | None:
        """How much better the baseline is than a worker alone, at the last step that both were tested at."""
        base, alone = (self.results_of(each) for each in (self.baseline or "", ALONE))
        step = max(base.keys() & alone.keys(), default=None)
        return None if step is None else self._ahead(base[step], alone[step])

    def _ahead(self, one: float, other: float) -> float:
        """How much better one result is than another."""
        return one - other if self.setting.higher_is_better else other - one

    def speed_up(self, run: Run) -> float | None:
        """How many times sooner than the baseline with the same seed: at the target, or after all steps."""
        same = (one for one in self.runs if (one.method, one.seed) == (self.baseline, run.seed))
        base, own = (self._duration(one) for one in (next(same, None), run))
        return base / own if base and own else None

    def _duration(self, run: Run | None) -> float | None:
        if run is None or run.failed is not None:
            return None
        return run.seconds if self.setting.target is None else run.target_seconds

    def __iter__(self) -> Iterator[Record]:
        yield self.setting
        yield from (*self.steps, *self.evaluations, *self.values, *self.runs)


_decoder = msgspec.json.Decoder(Setting | Step | Evaluation | Values | Run)


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def to_lines(records: Records) -> bytes:
    return msgspec.json.Encoder().encode_lines(list(records))


def write(path: Path, records: Records) -> None:
    """Write all records; a file from an earlier run is replaced at once or not at all."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(to_lines(records))
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def read(path: Path) -> Records:
    """The records of a file that `write` made. Every line is checked against its type."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    found: list[Record] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(_decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    settings = _of(found, Setting)
    if len(settings) != 1:
        raise ConfigError(f"{path}: not the records of one comparison, it has {len(settings)} settings")
    return Records(settings[0], _of(found, Step), _of(found, Evaluation), _of(found, Run), _of(found, Values))


def _of(found: list[Record], kind: type[Kind]) -> list[Kind]:
    return [record for record in found if isinstance(record, kind)]


def write_csv(path: Path, records: Records) -> None:
    """One row per run, with everything but the bytes by layer, and its speed-up over the baseline's run.

    A script's values have a column each; the results of the built-in tasks are left out then.
    """
    script = records.setting.script is not None
    left_out = {"layers", "values", *(("loss", "accuracy", "perplexity") if script else ())}
    names = [name for name in Run.__struct_fields__ if name not in left_out]
    own = records.names
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, *own, "baseline", "speed_up"])
        for run in records.runs:
            row = [*(getattr(run, name) for name in names), *(run.values.get(name) for name in own)]
            writer.writerow([*row, records.baseline, records.speed_up(run)])
