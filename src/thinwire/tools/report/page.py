"""One HTML file that needs nothing else: text, tables, Plotly plots, the library and the data inside.

A page is a list of sections; a section is a list of parts (`Text`, `Table`, `Plot`, `Fold`, `Download`).
All text is escaped here, so whatever a record holds may be handed over as it is. The browser is told to load
nothing from anywhere (a content security policy without sources).
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from thinwire.tools.report.palette import BASELINE, COLOURS, FAINT, GRID, INK, Style

Figure = Mapping[str, Any]
"""`{"data": [...], "layout": {...}}`, as Plotly takes it."""

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
LONG = 30
"""A table with more rows scrolls in its box."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"


@dataclass(frozen=True)
class Cell:
    """A table's cell: what is shown, and what is sorted by and copied (the text, if nothing else is said)."""

    text: str
    value: float | int | str | None = None
    style: Style | None = None
    """Draw a sample of this line before the text."""
    note: str = ""
    """In small letters below the text; not copied."""
    strong: bool = False
    bad: bool = False


@dataclass(frozen=True)
class Text:
    text: str
    kind: str = ""
    """"lead", "note", "hint" (not printed) or "code"; plain otherwise."""


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    numbers: bool = True
    """All columns but the first are figures, set flush right."""


@dataclass(frozen=True)
class Tile:
    """A figure worth large letters."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Tiles:
    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Choice:
    """One button of a switch above a plot."""

    key: str
    label: str


@dataclass(frozen=True)
class Views:
    """Other data for the same plot: every pair of a y and an x choice has a key "y|x" in `views`.

    A view is `{"traces": [{attribute: number of an array}, ...], "layout": {...}}`; arrays are shared.
    """

    y: Sequence[Choice]
    x: Sequence[Choice]
    arrays: Sequence[Sequence[Any]]
    views: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Plot:
    """A figure and its caption. `describes` is read out in its place; `legend` names lines by their style."""

    figure: Figure | Any
    caption: str
    describes: str
    height: int = 420
    rows: bool = False
    """The height follows from what is in it, also on paper."""
    legend: Mapping[str, Style] = field(default_factory=dict[str, Style])
    views: Views | None = None


@dataclass(frozen=True)
class Fold:
    """Parts that are there when they are asked for."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Download:
    """A file inside the page, compressed."""

    label: str
    name: str
    content: str


Part = Text | Table | Tiles | Plot | Fold | Download


@dataclass(frozen=True)
class Section:
    heading: str
    parts: Sequence[Part]


def write(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write the page. A section without a heading goes on where the one before ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(title, sections), encoding="utf-8")


def render(title: str, sections: Sequence[Section]) -> str:
    """The page as text."""
    writer = _Writer()
    body = "\n".join(writer.section(section) for section in sections)
    scripts = [f"<script>{_packaged('page.js')}</script>"]
    if writer.plots:
        scripts.insert(0, f"<script>{_plotly()}</script>")
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{_packaged('page.css')}</style></head>",
            f"<body><main><h1>{html.escape(title)}</h1>",
            body,
            "</main>",
            *scripts,
            "</body></html>\n",
        )
    )


def as_text(value: object) -> str:
    """JSON that may stand inside a script element, and that every browser reads: no NaN, no closing tag."""
    return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


AXIS: dict[str, Any] = {
    "gridcolor": GRID,
    "linecolor": FAINT,
    "zeroline": False,
    "ticks": "outside",
    "tickcolor": GRID,
    "automargin": True,
    "title": {"standoff": 8},
}
LOOK: dict[str, Any] = {
    "font": {"family": FONT, "size": 13, "color": INK},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "margin": {"l": 8, "r": 16, "t": 12, "b": 8},
    "hovermode": "closest",
    "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": FAINT, "font": {"color": INK}, "align": "left"},
}
TEMPLATE: dict[str, Any] = {
    "layout": {
        **LOOK,
        "colorway": [BASELINE, *COLOURS],
        "xaxis": AXIS,
        "yaxis": AXIS,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }
}
"""The same look for Plotly's own figures."""


def layout(**changes: Any) -> dict[str, Any]:
    """The look that all plots share; `xaxis` and `yaxis` are added to the axes' own."""
    found: dict[str, Any] = {**LOOK, "showlegend": False}
    for key, value in changes.items():
        found[key] = {**AXIS, **value} if key in ("xaxis", "yaxis") else value
    return found


def sample(style: Style) -> str:
    """A short piece of a method's line, as SVG."""
    dash = "" if style.dash == "solid" else f' stroke-dasharray="{style.dash.replace("px", "")}"'
    return (
        '<svg class="sample" width="30" height="14" viewBox="0 0 30 14" aria-hidden="true">'
        f'<path d="M0 7H30" fill="none" stroke="{style.colour}" stroke-width="{style.width}"{dash}/>'
        f'<path d="{shape(style.marker, 15, 7, 4.5)}" fill="{style.colour}" stroke="#fff"/></svg>'
    )


def shape(marker: str, x: float, y: float, r: float) -> str:
    """The outline of one of the palette's markers around a point."""
    if marker == "circle":
        return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z"
    if marker == "cross":
        a, b = r, r / 2.5
        points = [
            (-b, -a),
            (b, -a),
            (b, -b),
            (a, -b),
            (a, b),
            (b, b),
            (b, a),
            (-b, a),
            (-b, b),
            (-a, b),
            (-a, -b),
        ]
        points.append((-b, -b))
    elif marker == "star":
        points = [
            (q * math.sin(k * math.pi / 5), -q * math.cos(k * math.pi / 5))
            for k in range(10)
            for q in ((1.25 * r if k % 2 == 0 else 0.5 * r),)
        ]
    else:
        corners, turn = {
            "square": (4, 0.5),
            "diamond": (4, 0.0),
            "triangle-up": (3, 0.0),
            "triangle-down": (3, 0.5),
            "triangle-left": (3, 2.25),
        }[marker]
        q = r * 1.2
        points = [
            (
                q * math.sin(2 * math.pi * (k + turn) / corners),
                -q * math.cos(2 * math.pi * (k + turn) / corners),
            )
            for k in range(corners)
        ]
    return "M" + "L".join(f"{x + a:.1f} {y + b:.1f}" for a, b in points) + "Z"


class _Writer:
    """Parts to HTML; counts plots and tables so that each has a name of its own."""

    def __init__(self) -> None:
        self.plots = 0
        self.names = 0

    def section(self, section: Section) -> str:
        heading = f"<h2>{html.escape(section.heading)}</h2>" if section.heading else ""
        return f"<section>{heading}{self.parts(section.parts)}</section>"

    def parts(self, parts: Sequence[Part]) -> str:
        return "\n".join(self.part(part) for part in parts)

    def part(self, part: Part) -> str:
        match part:
            case Text():
                found = _text(part)
            case Tiles():
                found = f'<dl class="tiles">{"".join(_tile(tile) for tile in part.tiles)}</dl>'
            case Table():
                found = self.table(part)
            case Plot():
                found = self.plot(part)
            case Fold():
                inner = self.parts(part.parts)
                found = f"<details><summary>{html.escape(part.title)}</summary>{inner}</details>"
            case Download():
                found = _download(part)
        return found

    def table(self, table: Table) -> str:
        self.names += 1
        name = f"table-{self.names}"
        head = "".join(
            f'<th scope="col" aria-sort="none"><button type="button">{html.escape(each)}</button></th>'
            for each in table.header
        )
        rows = "".join(f"<tr>{''.join(_cell(*each) for each in enumerate(row))}</tr>" for row in table.rows)
        kind = "numbers" if table.numbers else "words"
        scroll = "scroll long" if len(table.rows) > LONG else "scroll"
        return (
            f'<div class="table" role="group" aria-labelledby="{name}">'
            f'<div class="bar"><span id="{name}">{html.escape(table.title)}</span>'
            '<button type="button" class="copy">Copy as CSV</button></div>'
            f'<div class="{scroll}" tabindex="0" role="region" aria-labelledby="{name}">'
            f'<table class="{kind}">'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>"
        )

    def plot(self, plot: Plot) -> str:
        self.plots += 1
        name = f"plot-{self.plots}"
        spec: dict[str, Any] = {"figure": _figure(plot.figure)}
        if plot.views is not None:
            spec["views"] = {"arrays": plot.views.arrays, "views": plot.views.views}
        described = html.escape(plot.describes)
        height = f'style="height:{plot.height}px"{" data-rows" if plot.rows else ""}'
        return (
            f"<figure>{_switches(name, plot.views)}"
            f'<div class="chart" id="{name}" role="img" aria-label="{described}" {height}></div>'
            f'<script type="application/json" data-for="{name}">{as_text(spec)}</script>'
            f"{_legend(plot.legend)}<figcaption>{html.escape(plot.caption)}</figcaption></figure>"
        )


def _text(text: Text) -> str:
    if text.kind == "code":
        return f"<pre><code>{html.escape(text.text)}</code></pre>"
    kind = f' class="{html.escape(text.kind)}"' if text.kind else ""
    return f"<p{kind}>{html.escape(text.text)}</p>"


def _download(download: Download) -> str:
    packed = base64.b64encode(gzip.compress(download.content.encode(), mtime=0)).decode()
    name, label = html.escape(download.name), html.escape(download.label)
    return (
        f'<p class="download"><button type="button" data-download="{name}">{label}</button>'
        f'<script type="application/gzip">{packed}</script></p>'
    )


def _tile(tile: Tile) -> str:
    name, value, note = html.escape(tile.name), html.escape(tile.value), html.escape(tile.note)
    return f"<div><dt>{name}</dt><dd>{value}</dd><dd class='note'>{note}</dd></div>"


def _cell(number: int, cell: Cell | str) -> str:
    cell = Cell(cell) if isinstance(cell, str) else cell
    tag = 'th scope="row"' if number == 0 else "td"
    kinds = [kind for kind, on in (("strong", cell.strong), ("bad", cell.bad)) if on]
    attributes = f' class="{" ".join(kinds)}"' if kinds else ""
    if cell.value is not None:
        attributes += f' data-value="{html.escape(str(cell.value))}"'
    text = _breakable(cell.text) if number == 0 else html.escape(cell.text)
    if cell.style is not None:
        text = f'<span class="named">{sample(cell.style)}<span>{text}</span></span>'
    if cell.note:
        text += f"<small>{html.escape(cell.note)}</small>"
    return f"<{tag}{attributes}>{text}</{tag[:2]}>"


def _breakable(text: str) -> str:
    """A method string may go on in another line behind a parenthesis or a comma."""
    return html.escape(text).replace("(", "(<wbr>").replace(",", ",<wbr>")


def _switches(name: str, views: Views | None) -> str:
    if views is None:
        return ""
    groups: list[str] = []
    for axis, title, choices in (("y", "Show", views.y), ("x", "against", views.x)):
        buttons = "".join(
            f'<label><input type="radio" name="{name}-{axis}" value="{html.escape(choice.key)}"'
            f"{' checked' if number == 0 else ''}><span>{html.escape(choice.label)}</span></label>"
            for number, choice in enumerate(choices)
        )
        groups.append(f'<fieldset data-axis="{axis}"><legend>{title}</legend>{buttons}</fieldset>')
    return f'<div class="switches" data-switches="{name}">{"".join(groups)}</div>'


def _legend(legend: Mapping[str, Style]) -> str:
    chips = "".join(
        f'<button type="button" aria-pressed="true" data-series="{html.escape(name)}">'
        f"{sample(style)}{html.escape(name)}</button>"
        for name, style in legend.items()
    )
    return f'<div class="legend" role="group" aria-label="Show or hide">{chips}</div>' if chips else ""


def _figure(figure: Any) -> dict[str, Any]:
    if isinstance(figure, Mapping):
        return dict(cast("Mapping[str, Any]", figure))
    found = cast("dict[str, Any]", json.loads(figure.to_json()))
    found["layout"] = {**found.get("layout", {}), "template": TEMPLATE}
    return found


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in cast("Mapping[object, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in cast("Sequence[object]", value)]
    return value


@cache
def _packaged(name: str) -> str:
    return resources.files("thinwire.tools.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
