"""Colours that people tell apart, whatever colours they see."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from thinwire.tools.report.palette import BASELINE, COLOURS, FAINT, INK, MARKERS, Style, styles

# Machado, Oliveira and Fernandes 2009, complete deficiency, on linear RGB.
VISION = {
    "common": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour))


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.clip(to_xyz @ rgb, 1e-4, None) / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_any_two_colours_are_far_apart(vision: str) -> None:
    seen = {c: lab(np.clip(VISION[vision] @ linear(c), 0, 1)) for c in (BASELINE, *COLOURS)}
    nearest = min(np.linalg.norm(seen[a] - seen[b]) for a, b in itertools.combinations(seen, 2))
    # A difference of 2.3 is just noticeable.
    assert nearest > 12


def test_contrast_on_white() -> None:
    assert all(1.05 / (luminance(colour) + 0.05) >= 3.0 for colour in (BASELINE, *COLOURS))
    assert all(1.05 / (luminance(colour) + 0.05) >= 4.5 for colour in (INK, FAINT))


def test_methods_differ_in_more_than_colour() -> None:
    found = list(styles([f"method {number}" for number in range(31)]).values())
    assert len({(style.colour, style.dash) for style in found}) == 31
    for one, following in itertools.pairwise(found):
        assert one.dash != following.dash
        assert one.marker != following.marker
    assert [style.dash for style in found].count("solid") == 1


def test_every_marker_can_be_drawn() -> None:
    drawn = {Style(INK, "solid", marker).outline(10, 10, 5) for marker in MARKERS}
    assert len(drawn) == len(MARKERS)
    assert all(path.startswith("M") and path.endswith("Z") for path in drawn)
