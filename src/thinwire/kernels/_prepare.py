"""Compile every CPU kernel now, so that no training step waits for the compiler."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the family about to be prepared, how many are done, and how many there are."""


def prepare(progress: Progress | None = None) -> None:
    """Compile the CPU kernels, or load them from the cache on disk when an earlier run compiled them."""
    from thinwire.kernels.cpu import FAMILIES, warm

    for done, family in enumerate(FAMILIES):
        if progress is not None:
            progress(family, done, len(FAMILIES))
        warm(family)
    if progress is not None:
        progress("", len(FAMILIES), len(FAMILIES))
