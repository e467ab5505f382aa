"""The papers' central claims, run again at a size that a laptop can do: `python -m reproductions NAME`."""

from __future__ import annotations

import importlib

from reproductions.base import Claim, Outcome, Reproduction
from reproductions.parts import Context
from thinwire.errors import ConfigError

__all__ = ["NAMES", "Claim", "Context", "Outcome", "Reproduction", "find"]

# In the order of docs/reproductions.md. Each of these modules has a REPRODUCTION.
NAMES: tuple[str, ...] = (
    "pqasgd",
    "gaussiank",
    "a2sgd",
    "sketched",
    "scalecom",
    "asylpg",
    "distributions",
    "lag",
    "laq",
    "gspar",
    "sparse",
)


def find(name: str) -> Reproduction:
    if name not in NAMES:
        raise ConfigError(f"there is no reproduction {name!r}; there are: {', '.join((*NAMES, 'all'))}")
    return importlib.import_module(f"reproductions.{name}").REPRODUCTION
