"""One HTML file that needs nothing else: Jinja2 templates, with Plotly, styles and data inside.

The templates escape all text, so whatever a record holds may be handed over as it is. The browser is told to
load nothing from anywhere (a content security policy without sources).
"""

from __future__ import annotations

import base64
import gzip
from functools import cache
from pathlib import Path
from typing import Any, cast

import jinja2
import msgspec
from markupsafe import Markup, escape

from thinwire.tools import units
from thinwire.tools.report import palette


def save(path: Path, text: str) -> None:
    """Write a file; its folder is made if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def render(template: str, **context: Any) -> str:
    return environment().get_template(template).render(**context)


@cache
def environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("thinwire.tools.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.globals.update(cast(Any, {"units": units, "palette": palette, "plotly": _plotly}))
    found.filters.update({"breakable": breakable, "json": as_json, "packed": packed, "short": short})
    return found


def packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()


def as_json(value: object) -> bytes:
    """With null for what is not a finite number."""
    return msgspec.json.encode(value)


def short(value: object) -> object:
    """Nine digits of a number are enough to sort by and to copy."""
    return f"{value:.9g}" if isinstance(value, float) else value


def breakable(text: str) -> Markup:
    """A method string that may continue on another line after a parenthesis or a comma."""
    return Markup(escape(text).replace("(", Markup("(<wbr>")).replace(",", Markup(",<wbr>")))


@cache
def _plotly() -> str:
    """Plotly's JavaScript, from the package."""
    from plotly.offline import get_plotlyjs  # takes long

    return packed(get_plotlyjs().encode())
