"""What the plots share.

Plots are dictionaries, as Plotly takes them. Text from records goes through `plain`, because Plotly reads
some HTML in it. Every trace has the method as its `meta`: by that the legend shows and hides it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.tools.report import numbers
from thinwire.tools.report.palette import FAINT

HOVER = "<b>%{fullData.name}</b><br>%{text}<extra></extra>"


def plain(text: str) -> str:
    return html.escape(text)


def short(value: float) -> float:
    """Six digits are plenty on a screen, and keep the page small."""
    return float(f"{value:.6g}")


def rule(axis: str, value: float, **line: Any) -> dict[str, Any]:
    other = "x" if axis == "y" else "y"
    return {
        "type": "line",
        "layer": "below",
        f"{axis}0": value,
        f"{axis}1": value,
        f"{other}ref": "paper",
        f"{other}0": 0,
        f"{other}1": 1,
        "line": {"color": FAINT, "width": 1.5, "dash": "2px,3px", **line},
    }


def decades(values: Sequence[float], write: Callable[[float], str], title: str) -> dict[str, Any]:
    """A logarithmic axis with round numbers in words; more of them where there are few decades."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    factors = (1, 2, 5) if high / low < 5 else (1, 3) if high / low < 50 else (1,)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return {
        "type": "log",
        "title": {"text": title, "standoff": 8},
        "tickvals": ticks,
        "ticktext": [_rounded(write(tick)) for tick in ticks],
        "tickangle": 0,
    }


def _rounded(text: str) -> str:
    """ "100 MB" for "100.00 MB": ticks are round anyway."""
    number, space, unit = text.partition(numbers.SPACE)
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number}{space}{unit}"
