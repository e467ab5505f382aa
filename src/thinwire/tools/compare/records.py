"""What a comparison writes down: one JSON object a line, and nothing else is needed to make its report.

`compare` writes these records, `report` only reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, cast

from thinwire.errors import ConfigError

VERSION = 1


@dataclass(frozen=True)
class Setting:
    """What all runs of a comparison have in common."""

    kind: ClassVar[str] = "setting"
    command: str
    thinwire: str
    model: str
    data: str
    parameters: int
    layers: list[tuple[str, list[int]]]
    """Names and shapes of the parameters."""
    workers: int
    link: str
    """As it was asked for: "100mbit", "lab:100mbit", "none"."""
    bandwidth: float | None
    """Bytes per second and direction of the link; None for no limit."""
    latency: float
    """Seconds per message."""
    batch: int
    """Per worker."""
    learning_rate: float
    optimizer: str
    steps: int
    seeds: int
    measure: str
    """What the test measures: "accuracy" or "perplexity"."""
    target: float | None
    compute: float
    """Seconds of a step without any communication, measured on the workers all at once."""
    version: int = VERSION


@dataclass(frozen=True)
class Step:
    """One step of one run, on rank 0. Bytes and `seconds` count from the run's beginning."""

    kind: ClassVar[str] = "step"
    method: str
    seed: int
    step: int
    loss: float
    seconds: float
    """Training time so far; evaluations excepted."""
    sent: int
    received: int


@dataclass(frozen=True)
class Evaluation:
    """A look at the test data, on rank 0's replica."""

    kind: ClassVar[str] = "evaluation"
    method: str
    seed: int
    step: int
    seconds: float
    sent: int
    loss: float
    accuracy: float
    perplexity: float


@dataclass(frozen=True)
class Run:
    """One method with one seed, as a whole, on rank 0. Seconds are means per step."""

    kind: ClassVar[str] = "run"
    method: str
    seed: int
    steps: int
    loss: float
    accuracy: float
    perplexity: float
    seconds: float
    """Training time of all steps."""
    step_seconds: float
    """The median step."""
    compute_seconds: float
    """Forward, backward and optimizer, until the gradients were handed over; compression in the same
    thread is not in it."""
    compress_seconds: float
    """Work of the method on the gradients, waiting for the network not counted. May lie beside compute."""
    wait_seconds: float
    """In operations on the network. May lie beside compute."""
    sent: int
    """Bytes through the interface, per worker, all steps."""
    received: int
    rounds: float
    """Operations a step."""
    payload: float
    """Bytes a step that the method hands over, frames included."""
    target_step: int | None
    target_seconds: float | None
    target_sent: int | None
    layers: dict[str, float] = field(default_factory=dict[str, float])
    """Payload bytes a step by parameter, as far as they can be told apart."""
    interface_sent: int | None = None
    """What the kernel counted on rank 0's interface over the same steps, where there is one (lab)."""
    failed: str | None = None
    """Why the run ended early, if it did; the other figures are those until then."""


Record = Setting | Step | Evaluation | Run
_KINDS: dict[str, type[Record]] = {cls.kind: cls for cls in (Setting, Step, Evaluation, Run)}


@dataclass(frozen=True)
class Records:
    """All records of one comparison."""

    setting: Setting
    steps: list[Step]
    evaluations: list[Evaluation]
    runs: list[Run]

    @property
    def methods(self) -> list[str]:
        """In the order in which they ran; `dense` or whatever is compared against comes first."""
        return list(dict.fromkeys(run.method for run in self.runs))

    def runs_of(self, method: str) -> list[Run]:
        return [run for run in self.runs if run.method == method]


def to_line(record: Record) -> str:
    return json.dumps({"kind": record.kind, **asdict(record)})


def from_line(line: str) -> Record:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ConfigError("a record is a JSON object")
    content = cast("dict[str, Any]", found)
    cls = _KINDS.get(str(content.pop("kind", None)))
    if cls is None:
        raise ConfigError(f"records are {', '.join(_KINDS)}")
    known = {each.name for each in fields(cls)}
    if content.keys() - known:
        raise ConfigError(f"a {cls.kind} record has no {sorted(content.keys() - known)[0]!r}")
    if cls is Setting and isinstance(content.get("layers"), list):
        content["layers"] = [(name, shape) for name, shape in content["layers"]]
    return cls(**content)


def write(path: Path, records: Iterable[Record]) -> None:
    path.write_text("".join(to_line(record) + "\n" for record in records))


def read(path: Path) -> Records:
    """The records of a file that `write` made."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    found: list[Record] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            found.append(from_line(line))
        except (ValueError, TypeError, ConfigError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    settings = [record for record in found if isinstance(record, Setting)]
    if len(settings) != 1 or settings[0].version != VERSION:
        raise ConfigError(f"{path}: not the records of one comparison in format {VERSION}")
    return Records(
        settings[0],
        [record for record in found if isinstance(record, Step)],
        [record for record in found if isinstance(record, Evaluation)],
        [record for record in found if isinstance(record, Run)],
    )
