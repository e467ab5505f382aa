"""What a reproduction is made of: sections, and in them claims with verdicts, tables and figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from reproductions.parts import Context, NotRunError
from thinwire.tools.report.figures import Curve, lines

NOT_RUN = "not run yet"


class Claim(msgspec.Struct, frozen=True):
    """One figure of a paper beside ours.

    Args:
        what: what is claimed, in a few words.
        paper: the paper's figure, or what it says; how sure we are of it belongs here too.
        ours: what was measured.
        holds: the verdict; None where the run cannot tell.
        note: why it differs, if it does; what would settle it, if it is not judged.
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

    def add(self, other: Outcome) -> None:
        """What another section has found."""
        self.claims += other.claims
        self.tables += other.tables
        self.notes += [note for note in other.notes if note not in self.notes]
        self.figures |= other.figures


@dataclass(frozen=True)
class Section:
    """What is run and judged together.

    Args:
        what: the question that it answers, for the page as long as it has not been run.
        run: computes everything, then adds claims, tables and figures.
        smoke: whether a smoke run has it, too.
    """

    what: str
    run: Callable[[Context, Outcome], None]
    smoke: bool = True


class Left(msgspec.Struct, frozen=True):
    """A section that has not been run to its end: how many of its parts are finished, at least."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Reproduction:
    """One paper's central claims, run again.

    Args:
        title: what it is about.
        paper: authors, title, venue, year.
        sections: what is run, one after the other; the first figure of the first section is shown.
        doc: the module's docstring; what follows "Verdicts:" says what makes each claim fail.
        takeaway: what a practitioner should take from it, in one sentence.
        methods: those of thinwire that it is about.
    """

    title: str
    paper: str
    sections: tuple[Section, ...]
    doc: str
    takeaway: str
    methods: tuple[str, ...] = ()

    @property
    def rules(self) -> list[str]:
        """The verdict rules of the docstring, fixed before a run."""
        text = self.doc.partition("\nVerdicts")[2]
        return [" ".join(rule.split()) for rule in text.split("\n- ")[1:]]

    def run(self, context: Context, only: str = "") -> tuple[Outcome, list[Left]]:
        """All sections, and what is left; of sections without the words `only` nothing is computed."""
        outcome, left = Outcome(judged=not context.quick), list[Left]()
        for section in self.sections:
            if context.quick and not section.smoke:
                continue
            found = Outcome(judged=outcome.judged)
            try:
                section.run(context if only in section.what else context.as_finished(), found)
            except NotRunError as missing:
                found = Outcome()
                left.append(Left(section.what, missing.done, missing.total))
                settles = f"{NOT_RUN}; settled by `python -m reproductions {context.name} --data DATA`"
                ours = f"{missing.done} of its first {missing.total} parts are finished"
                found.claim(section.what, "", ours, None, settles)
            outcome.add(found)
        return outcome, left


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
