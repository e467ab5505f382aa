"""Outcomes as files: Markdown for docs/reproductions.md, one HTML file with a reproduction's plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from reproductions.base import NOT_RUN, Outcome, Reproduction, Table
from thinwire.tools.report.figures import write_figures


def markdown(
    outcomes: Mapping[str, tuple[Reproduction, Outcome]],
    command: str,
    pictures: Mapping[str, str] | None = None,
) -> str:
    """The page of all reproductions; `pictures` are addresses, as seen from the page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown, from texts of this repository
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.get_template("reproductions.md.j2")
    return template.render(
        outcomes=outcomes,
        command=command,
        pictures=pictures or {},
        claims=claims,
        left=sections_left,
        verdicts=[claim.holds for _, outcome in outcomes.values() for claim in outcome.claims],
    )


def sections_left(outcome: Outcome) -> int:
    """How many sections have not been run to their end."""
    return sum(claim.note.startswith(NOT_RUN) for claim in outcome.claims)


def claims(outcome: Outcome) -> Table:
    rows = tuple((c.what, c.paper, c.ours, c.verdict, c.note) for c in outcome.claims)
    return Table("Claims", ("claim", "paper", "ours", "verdict", "why"), rows)


def write_plots(path: Path, title: str, figures: Mapping[str, Any], outcome: Outcome | None = None) -> None:
    """One HTML file that opens without a network: claims and tables, if given, and the plots by title."""
    found = outcome or Outcome()
    first = [claims(found)] if found.claims else []
    write_figures(path, title, figures, claims=first, tables=found.tables, notes=found.notes)
