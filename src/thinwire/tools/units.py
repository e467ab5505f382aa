"""Numbers with units as people read them; a line never breaks between the two."""

from __future__ import annotations

import math

SPACE = "\u00a0"


def digits(value: float, places: int = 3) -> str:
    """With this many significant digits, never an exponent: 0.0123, 1.23, 12.3, 123, 1,234."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    after = max(0, places - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{after}f}"


def scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """With the largest unit that leaves at least 1 before the point; the smallest otherwise."""
    for factor, unit in units:
        if abs(value) >= factor * 0.9995:
            return f"{digits(value / factor)}{SPACE}{unit}"
    factor, unit = units[-1]
    return f"{digits(value / factor)}{SPACE}{unit}"


def seconds(value: float) -> str:
    if value == 0:
        return f"0{SPACE}s"
    if value >= 7200:
        return f"{digits(value / 3600)}{SPACE}h"
    if value >= 120:
        return f"{digits(value / 60)}{SPACE}min"
    return scaled(value, ((1, "s"), (1e-3, "ms"), (1e-6, "µs")))


def data(value: float) -> str:
    return scaled(value, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def rate(bytes_per_second: float) -> str:
    """Bits per second, as links are sold."""
    units = ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1, "bit/s"))
    return rounded(scaled(8 * bytes_per_second, units))


def rounded(text: str) -> str:
    """ "100 MB" for "100.00 MB"."""
    number, space, unit = text.partition(SPACE)
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number}{space}{unit}"


def span(low: str, high: str) -> str:
    """A range, with the unit once: "1.2 – 3.4 ms"; empty if both are the same."""
    if low == high:
        return ""
    number, _, unit = low.partition(SPACE)
    return f"{number if high.endswith(unit) else low} – {high}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}{SPACE}%"


def times(ratio: float) -> str:
    """A speed-up."""
    return f"{ratio:.2f}×" if ratio < 10 else f"{digits(ratio)}×"


def part(ratio: float) -> str:
    """A fraction in words: "1/23 of", "80 % of"."""
    return f"1/{1 / ratio:.0f} of" if ratio < 0.5 else f"{100 * ratio:.0f}{SPACE}% of"
