"""Python's garbage collector, which has nothing to find in what a command imports."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def paused() -> Generator[None]:
    """For imports: torch makes very many objects, and all of them stay."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@contextmanager
def sparing() -> Generator[None]:
    """It does not look through what is there now, again and again."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
