"""A page of figures under headings: one HTML file that opens without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.tools.report import page

PLOT_HEIGHT = 440


def figure_sections(figures: Mapping[str, Any]) -> list[page.Section]:
    """A section for each figure, by its heading."""
    return [
        page.Section(heading, [page.Plot(figure, "", heading, int(figure.layout.height or PLOT_HEIGHT))])
        for heading, figure in figures.items()
    ]


def write_figures(path: Path, title: str, figures: Mapping[str, Any]) -> None:
    page.write(path, title, figure_sections(figures))
