"""Outcomes as files: Markdown for docs/reproductions.md, one HTML file with a reproduction's plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.reproduce.base import Outcome, Reproduction, Table


def markdown(outcomes: Mapping[str, tuple[Reproduction, Outcome]], command: str) -> str:
    """The page of all reproductions."""
    lines = ["# The papers, reproduced", "", f"Made by `{command}`; do not edit.", ""]
    lines += ["| reproduction | claims | hold | do not hold | not judged |", "|---|---|---|---|---|"]
    for name, (_, outcome) in outcomes.items():
        verdicts = [claim.holds for claim in outcome.claims]
        counts = (len(verdicts), verdicts.count(True), verdicts.count(False), verdicts.count(None))
        lines.append(f"| [{name}](#{name}) | {' | '.join(map(str, counts))} |")
    for name, (reproduction, outcome) in outcomes.items():
        lines += ["", f"## {name}", "", f"{reproduction.title}. {reproduction.paper}", ""]
        lines += _claims(outcome)
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
    lines = [f"| {' | '.join(table.header)} |", "|" + "---|" * len(table.header)]
    return lines + [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in table.rows]


def write_plots(path: Path, title: str, figures: Mapping[str, Any]) -> None:
    """One HTML file that opens without a network: the plotting library comes once, inside."""
    parts: list[str] = []
    for number, (heading, figure) in enumerate(figures.items()):
        html = figure.to_html(full_html=False, include_plotlyjs=number == 0, config={"responsive": True})
        parts.append(f"<h2>{heading}</h2>\n{html}")
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    style = "body{font-family:system-ui,sans-serif;max-width:70rem;margin:1rem auto;padding:0 1rem}"
    body = "\n".join(parts)
    path.write_text(
        f"{head}<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>\n{body}</body></html>\n"
    )
