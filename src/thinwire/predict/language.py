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


@lru_cache(maxsize=1)
def behind() -> Mapping[str, float]:
    """Validation loss minus that of `dense`, by method; a method that was not measured is missing."""
    record = json.loads(files("thinwire.predict").joinpath("language.json").read_text())
    rows: Sequence[Mapping[str, Any]] = record["rows"]
    return {name: float(row["behind"]) for row in rows if (name := _name(str(row["method"]))) is not None}


def _name(text: str) -> str | None:
    """The method with its options in full; None for PyTorch's own, and for a worker alone."""
    try:
        return str(parse(text))
    except ConfigError:
        return None


def close() -> list[str]:
    """The measured methods that may be recommended."""
    return [method for method, nats in behind().items() if nats <= CLOSE_ENOUGH]
