"""Outcomes as files: Markdown for docs/reproductions.md, one HTML file with a reproduction's plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reproductions.base import Outcome, Reproduction, Table


def markdown(
    outcomes: Mapping[str, tuple[Reproduction, Outcome]],
    command: str,
    pictures: Mapping[str, str] | None = None,
) -> str:
    """The page of all reproductions; `pictures` are addresses, as seen from the page."""
    lines = ["# The papers, reproduced", "", f"Made by `{command}`; do not edit.", ""]
    lines += ["| reproduction | claims | hold | do not hold | not judged |", "|---|---|---|---|---|"]
    for name, (_, outcome) in outcomes.items():
        verdicts = [claim.holds for claim in outcome.claims]
        counts = (len(verdicts), verdicts.count(True), verdicts.count(False), verdicts.count(None))
        lines.append(f"| [{name}](#{name}) | {' | '.join(map(str, counts))} |")
    for name, (reproduction, outcome) in outcomes.items():
        lines += ["", f"## {name}", "", f"{reproduction.title}. {reproduction.paper}", ""]
        lines += _claims(outcome)
        if pictures is not None and name in pictures:
            lines += ["", f"![{reproduction.title}]({pictures[name]})"]
        for table in outcome.tables:
            lines += ["", f"**{table.title}**", "", *_table(table)]
        for note in outcome.notes:
            lines += ["", note]
    return "\n".join(lines) + "\n"


def _claims(outcome: Outcome) -> list[str]:
    if not outcome.claims:
        return []
    rows = tuple((c.what, c.paper, c.ours, c.verdict, c.note) for c in outcome.claims)
    return _table(Table("", ("claim", "paper", "ours", "verdict", "why"), rows))


def _table(table: Table) -> list[str]:
    return [_row(table.header), "|" + "---|" * len(table.header), *map(_row, table.rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def write_plots(path: Path, title: str, figures: Mapping[str, Any], outcome: Outcome | None = None) -> None:
    """One HTML file that opens without a network: claims and tables, if given, and the plots by title."""
    from thinwire.tools.report import page
    from thinwire.tools.report.figures import figure_sections

    first: list[page.Part] = []
    if outcome is not None and outcome.claims:
        rows = [(c.what, c.paper, c.ours, c.verdict, c.note) for c in outcome.claims]
        first.append(page.Table("Claims", ("claim", "paper", "ours", "verdict", "why"), rows, numbers=False))
    sections = [page.Section("", first)]
    sections += figure_sections(figures)
    if outcome is not None:
        tables = [page.Table(each.title, each.header, each.rows) for each in outcome.tables]
        if tables:
            sections.append(page.Section("Tables", tables))
        if outcome.notes:
            sections.append(page.Section("Notes", [page.Text(note) for note in outcome.notes]))
    page.write(path, title, sections)
