"""The records of a comparison: one JSON object per line.

Workers report them, `compare` writes them as they are, and `report` needs nothing else.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from thinwire.errors import ConfigError

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Factor = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=str.lower):
    """Base of the records; the class's name is the line's "kind"."""


Kind = TypeVar("Kind", bound=Record)


class Setting(Record, frozen=True, kw_only=True):
    """What all runs of a comparison have in common."""

    version: Literal[1] = 1
    """Of the file format."""
    command: str
    thinwire: str
    """The version of the library."""
    model: str
    hidden: tuple[Count, ...]
    """Widths of the hidden layers of `mlp`, or of the layers of `lstm`; empty for its own."""
    data: str
    """As `workloads.load` takes it: "digits", "mnist:DIR"."""
    parameters: Count
    layers: dict[str, tuple[Count, ...]]
    """Shapes of the parameters by name."""
    workers: Positive
    link: str
    """As the user gave it: "100mbit", "lab:100mbit", "none"."""
    bandwidth: Annotated[float, msgspec.Meta(gt=0)] | None
    """Bytes per second and direction of the link; None for no limit."""
    latency: Amount
    """Seconds per message."""
    batch: Positive
    """Per worker."""
    learning_rate: float
    optimizer: str
    momentum: Factor = 0.0
    """Of SGD, after the exchange."""
    momentum_before: Factor = 0.0
    """Instead, each worker's own, before the exchange."""
    steps: Positive
    evaluate_every: Positive
    seeds: Positive
    measure: Literal["accuracy", "perplexity"]
    """What the test measures."""
    target: float | None
    """The test accuracy at which a run stops."""

    @property
    def dataset(self) -> str:
        """The name of the data, without its folder."""
        return self.data.partition(":")[0]


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
    """The test of rank 0's replica after a step."""

    method: str
    seed: Count
    step: Positive
    seconds: Amount
    sent: Count
    loss: float | None
    accuracy: float
    perplexity: float


class Run(Record, frozen=True, kw_only=True):
    """One method with one seed as a whole, on rank 0. Seconds are means per step unless stated otherwise."""

    method: str
    seed: Count
    steps: Count
    loss: float | None = None
    """Loss, accuracy and perplexity are those of the last evaluation."""
    accuracy: float = 0.0
    perplexity: float = 1e300
    seconds: Amount
    """Training time of all steps."""
    step_seconds: Amount
    """The median step."""
    compute_seconds: Amount = 0.0
    """A step without any communication, measured while all workers compute."""
    compress_seconds: Amount = 0.0
    """Work of the method on the gradients, without waiting for the network. May overlap with compute."""
    wait_seconds: Amount = 0.0
    """Inside operations on the network. May overlap with compute."""
    sent: Count
    """Bytes through the interface, per worker, in all steps."""
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

    @property
    def methods(self) -> list[str]:
        """In the order in which they ran; the first is the baseline."""
        return list(dict.fromkeys(run.method for run in self.runs))

    @property
    def compute(self) -> float:
        """Seconds of a step without any communication."""
        return self.runs[0].compute_seconds if self.runs else 0.0

    def runs_of(self, method: str) -> list[Run]:
        return [run for run in self.runs if run.method == method]

    def __iter__(self) -> Iterator[Record]:
        yield self.setting
        yield from (*self.steps, *self.evaluations, *self.runs)


_decoder = msgspec.json.Decoder(Setting | Step | Evaluation | Run)


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
    return Records(settings[0], _of(found, Step), _of(found, Evaluation), _of(found, Run))


def _of(found: list[Record], kind: type[Kind]) -> list[Kind]:
    return [record for record in found if isinstance(record, kind)]


def write_csv(path: Path, runs: list[Run]) -> None:
    """One row per run, with everything but the bytes by layer."""
    names = [name for name in Run.__struct_fields__ if name != "layers"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(run, name) for name in names] for run in runs)
