"""What a reproduction is made of: claims with verdicts, tables, figures, and parts that are computed once."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, get_type_hints

import msgspec

from thinwire.errors import ConfigError
from thinwire.tools.report.figures import Curve, lines
from thinwire.tools.workloads import Dataset

P = ParamSpec("P")
Key = TypeVar("Key")
Value = TypeVar("Value")


class Claim(msgspec.Struct, frozen=True):
    """One figure of a paper beside ours.

    Args:
        what: what is claimed, in a few words.
        paper: the paper's figure, or what it says; how sure we are of it belongs here too.
        ours: what was measured.
        holds: the verdict; None where the run cannot tell (a smoke run, say).
        note: why it differs, if it does.
    """

    what: str
    paper: str
    ours: str
    holds: bool | None
    note: str = ""

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "does not hold", None: "not judged"}[self.holds]


class Table(msgspec.Struct, frozen=True):
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Findings(msgspec.Struct):
    """What is kept of an outcome in outcome.json."""

    claims: list[Claim] = []
    tables: list[Table] = []
    notes: list[str] = []


class Outcome(Findings):
    """What a reproduction found. `figures` are Plotly figures by title; the first is shown on the page.

    A smoke run is too short to judge a claim: its outcome is not `judged`.
    """

    figures: dict[str, Any] = {}
    judged: bool = True

    def claim(self, what: str, paper: str, ours: str, holds: bool | None, note: str = "") -> None:
        self.claims.append(Claim(what, paper, ours, holds if self.judged else None, note))

    def table(
        self, title: str, header: Sequence[str] | Mapping[str, str], rows: Iterable[Sequence[object]]
    ) -> None:
        """A table of texts; or of numbers, if the header says how they are formatted: `{"loss": ".4f"}`."""
        formats = [header[name] if isinstance(header, Mapping) else "" for name in header]
        cells = tuple(tuple(cell(*pair) for pair in zip(row, formats, strict=True)) for row in rows)
        self.tables.append(Table(title, tuple(header), cells))

    def figure(
        self,
        title: str,
        curves: Mapping[str, Curve],
        x: str,
        y: str,
        *,
        log: Literal["", "x", "xy"] = "",
        mode: Literal["lines", "markers", "both"] = "lines",
    ) -> None:
        """One line per named curve; `log`: the axes that are logarithmic."""
        self.figures[title] = lines(
            curves,
            x,
            y,
            log_x="x" in log,
            log_y="y" in log,
            markers=mode == "both",
            only_markers=mode == "markers",
        )

    def findings(self) -> Findings:
        return Findings(self.claims, self.tables, self.notes)


class Part(msgspec.Struct, Generic[Value]):
    """The value of a function, and the call that made it."""

    call: str
    value: Value


def described(value: object) -> str:
    """The text of an argument; a dataclass leaves out fields with `repr=False`, such as folders."""
    if isinstance(value, Dataset):
        return f"{value.name} {len(value.inputs)}"
    if is_dataclass(value) and not isinstance(value, type):
        options = (f"{f.name}={described(getattr(value, f.name))}" for f in fields(value) if f.repr)
        return f"{type(value).__name__}({', '.join(options)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(described, cast('tuple[object, ...]', value)))})"
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    raise TypeError(f"{type(value).__name__} does not describe itself: it cannot be an argument of a part")


class Context:
    """What a reproduction is given: where the data are, how much to do, and a memory of what is done.

    Every finished part is a file below `parts` in the output folder; a run that was stopped continues after
    the last one.
    """

    def __init__(
        self,
        name: str,
        *,
        data: Path | None,
        quick: bool,
        out: Path,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.quick = quick
        self.folder = folder(name, quick, out)
        self._data = data
        self._progress = progress
        self._parts = self.folder / "parts"
        self._parts.mkdir(parents=True, exist_ok=True)

    @property
    def data(self) -> Path:
        """The folder with the datasets."""
        if self._data is None:
            raise ConfigError("this reproduction reads real datasets: say where they are with --data DIR")
        return self._data

    @property
    def has_data(self) -> bool:
        return self._data is not None

    def once(self, function: Callable[P, Value], *args: P.args, **kwargs: P.kwargs) -> Value:
        """`function(*args, **kwargs)`, computed now or read from an earlier run with equal arguments.

        The function declares its result with a type that msgspec knows. What the result depends on must be
        among the arguments, because only they tell one part from another; see `described`.
        """
        given = [described(value) for value in args]
        given += [f"{name}={described(value)}" for name, value in kwargs.items()]
        call = f"{function.__module__}.{function.__qualname__}({', '.join(given)})"
        path = self._parts / f"{hashlib.sha256(call.encode()).hexdigest()[:20]}.msgpack"
        if not path.exists():
            made = msgspec.msgpack.encode(Part(call, function(*args, **kwargs)))
            unfinished = path.with_suffix(".partial")
            unfinished.write_bytes(made)
            unfinished.replace(path)
        record: Any = Part[get_type_hints(function)["return"]]
        try:
            part: Part[Value] = msgspec.msgpack.decode(path.read_bytes(), type=record)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} cannot be read ({error}): remove it to compute it again") from None
        if part.call != call:
            raise ConfigError(f"{path} is the part {part.call}, not {call}: remove it")
        return part.value

    def each(self, parts: Mapping[Key, partial[Value]], what: str = "") -> dict[Key, Value]:
        """`once` for every part, with progress: `what` they are, and their keys."""
        found: dict[Key, Value] = {}
        for number, (key, part) in enumerate(parts.items()):
            words = cast("tuple[object, ...]", key) if isinstance(key, tuple) else (key,)
            self.progress(" ".join((what, *map(str, words))).strip(), number, len(parts))
            found[key] = self.once(part.func, *part.args, **part.keywords)
        return found

    def progress(self, what: str, done: int, total: int) -> None:
        """Tell the progress bar: `done` of `total` parts are finished, `what` comes next."""
        if self._progress is not None:
            self._progress(what, done, total)


def folder(name: str, quick: bool, out: Path) -> Path:
    """Where a reproduction keeps its parts, its outcome and its plots."""
    return out / (f"{name}-quick" if quick else name)


@dataclass(frozen=True)
class Reproduction:
    """One paper's central claim, run again.

    Args:
        title: what it is about.
        paper: authors, title, venue, year.
        run: does the work.
        methods: those of thinwire that it is about.
    """

    title: str
    paper: str
    run: Callable[[Context], Outcome]
    methods: tuple[str, ...] = ()


def exponent(points: Iterable[tuple[float, float]]) -> float:
    """The power of x that y follows: the slope of log y over log x, by least squares."""
    xs, ys = zip(*((math.log(x), math.log(y)) for x, y in points), strict=True)
    return statistics.linear_regression(xs, ys).slope


def percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"


def cell(value: object, form: str) -> str:
    """A value as `form` says; texts stay as they are."""
    if isinstance(value, str):
        return value
    return format(value, form).replace("%", " %")
