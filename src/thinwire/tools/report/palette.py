"""Colours, dashes and markers that people tell apart, whatever colours they see, and in grey print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BASELINE = "#1a1a1a"
"""Of the method that the others are measured against."""

COLOURS = ("#1f6fd0", "#e8590c", "#009e73", "#cc6aa3", "#882255", "#332288")
"""At least 3:1 on white, and far apart for all common kinds of colour vision: a test holds them to it."""

DASHES = ("6px,3px", "2px,3px", "9px,3px,2px,3px", "14px,4px", "9px,3px,2px,3px,2px,3px")
MARKERS = ("circle", "square", "diamond", "triangle-up", "star", "triangle-down", "triangle-left", "cross")

COMPUTE, COMPRESS, NETWORK = "#5b7083", "#e8a33d", "#1f6fd0"
"""Parts of a step; they also differ in their pattern."""

INK, FAINT, GRID, PAPER = "#1a1a1a", "#555b61", "#dfe3e6", "#ffffff"


@dataclass(frozen=True)
class Style:
    """How one method is drawn in every plot."""

    colour: str
    dash: str
    marker: str
    width: float = 2.0


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """One style a method; 30 pairs of colour and dash before one comes again. Only the first is solid."""
    found: dict[str, Style] = {}
    for number, method in enumerate(methods):
        if number == 0:
            found[method] = Style(BASELINE, "solid", MARKERS[0], 2.5)
            continue
        round_, colour = divmod(number - 1, len(COLOURS))
        dash = (number - 1 + round_) % len(DASHES)
        found[method] = Style(COLOURS[colour], DASHES[dash], MARKERS[number % len(MARKERS)])
    return found
