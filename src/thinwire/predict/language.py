"""Our table of a transformer trained with AdamW: how far each method ended behind `dense`.

`python -m benchmarks language` measures it, and `python -m benchmarks language-page` writes `language.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from thinwire.errors import ConfigError
from thinwire.methods.registry import parse

CLOSE_ENOUGH = 0.05
"""A method is recommended if it ended at most so many nats behind `dense`."""
LEAST_RECOVERED = 0.5
"""And if it recovers at least this part of the gap between a worker alone and `dense`."""


@lru_cache(maxsize=1)
def behind() -> Mapping[str, float]:
    """Validation loss minus that of `dense`, by method; a method that was not measured is missing."""
    return {name: float(row["behind"]) for name, row in _rows().items()}


def _rows() -> Mapping[str, Mapping[str, Any]]:
    record = json.loads(files("thinwire.predict").joinpath("language.json").read_text())
    rows: Sequence[Mapping[str, Any]] = record["rows"]
    return {name: row for row in rows if (name := _name(str(row["method"]))) is not None}


def _name(text: str) -> str | None:
    """The method with its options in full; None for PyTorch's own, and for a worker alone."""
    try:
        return str(parse(text))
    except ConfigError:
        return None


@lru_cache(maxsize=1)
def recovered() -> Mapping[str, float]:
    """The part of the gap between a worker alone and `dense`, by method."""
    return {name: float(row["recovered"]) for name, row in _rows().items() if "recovered" in row}


def close() -> list[str]:
    """The measured methods that may be recommended."""
    return [method for method in useful() if behind()[method] <= CLOSE_ENOUGH]


def useful() -> list[str]:
    """The measured methods that recover enough of the gap, also those that ended further behind `dense`."""
    return [method for method in behind() if recovered().get(method, 1.0) >= LEAST_RECOVERED]
