"""What a reproduction is made of: claims with verdicts, tables, figures, and runs that can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from thinwire.errors import ConfigError

Json = TypeVar("Json")
"""What JSON can hold: dicts, lists, strings, numbers, None."""


@dataclass(frozen=True)
class Claim:
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


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass
class Outcome:
    """What a reproduction found. `figures` are Plotly figures by title, the first is shown on the page."""

    claims: list[Claim] = field(default_factory=list[Claim])
    tables: list[Table] = field(default_factory=list[Table])
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: list[str] = field(default_factory=list[str])

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.tables.append(Table(title, tuple(header), tuple(tuple(row) for row in rows)))

    def to_json(self) -> dict[str, Any]:
        return {
            "claims": [asdict(claim) for claim in self.claims],
            "tables": [asdict(table) for table in self.tables],
            "notes": self.notes,
        }

    @staticmethod
    def from_json(found: dict[str, Any]) -> Outcome:
        """Without the figures: they are in the HTML file beside the record."""
        claims = [Claim(**claim) for claim in found["claims"]]
        outcome = Outcome(claims, notes=list(found["notes"]))
        for table in found["tables"]:
            outcome.table(table["title"], table["header"], table["rows"])
        return outcome


class Context:
    """What a reproduction is given: where the data are, how much to do, and a memory of what is done.

    Every finished part is a line of `records.jsonl` in the output folder; a run that was stopped goes on
    behind the last one.
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
        self.folder = out / (f"{name}-quick" if quick else name)
        self._data = data
        self._progress = progress
        self._known: dict[str, Any] = {}
        self._records = self.folder / "records.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._records.exists():
            text = self._records.read_text()
            for line in text.splitlines():
                self._remember(line)
            if not text.endswith("\n"):  # cut off in the middle of a line: what comes next begins a new one
                self._records.write_text(text + "\n")

    def _remember(self, line: str) -> None:
        try:
            record = json.loads(line)
            self._known[record["key"]] = record["value"]
        except (ValueError, KeyError, TypeError):
            return  # the last line of a run that was killed while it wrote: done anew

    @property
    def data(self) -> Path:
        """The folder with the datasets."""
        if self._data is None:
            raise ConfigError("this reproduction reads real datasets: say where they are with --data DIR")
        return self._data

    @property
    def has_data(self) -> bool:
        return self._data is not None

    def once(self, key: str, function: Callable[[], Json]) -> Json:
        """The value of `function()`, computed now or remembered from an earlier run with the same key.

        The key must name everything the value depends on (settings, seeds, sizes).
        """
        if key not in self._known:
            value = function()
            with self._records.open("a") as file:
                file.write(json.dumps({"key": key, "value": value}) + "\n")
            self._known[key] = json.loads(json.dumps(value))
        return cast(Json, self._known[key])

    def progress(self, what: str, done: int, total: int) -> None:
        """Tell the progress bar: `done` of `total` parts are finished, `what` comes next."""
        if self._progress is not None:
            self._progress(what, done, total)


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
