"""Compile CPU kernels now, so that no training step waits for the compiler."""

import contextlib
import fcntl
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""Called with the family about to be prepared, how many are done, and how many there are."""


def prepare(progress: Progress | None = None, families: Sequence[str] | None = None) -> None:
    """Compile the CPU kernels (all families, or these), or load them from the cache on disk.

    What has never been compiled here is compiled by one process of the machine at a time: the others find
    it in the cache afterwards, and load it side by side.
    """
    from thinwire.kernels.cpu import FAMILIES, warm
    from thinwire.kernels.cpu._jit import CACHE_DIRECTORY

    wanted = FAMILIES if families is None else families
    for done, family in enumerate(wanted):
        if progress is not None:
            progress(family, done, len(wanted))
        compiled = Path(CACHE_DIRECTORY, f"{family}.compiled")
        with contextlib.nullcontext() if compiled.exists() else _alone(compiled):
            warm(family)
    if progress is not None:
        progress("", len(wanted), len(wanted))


@contextlib.contextmanager
def _alone(compiled: Path) -> Generator[None]:
    """Nobody else compiles meanwhile; leaves the mark that this family is in the cache."""
    try:
        compiled.parent.mkdir(parents=True, exist_ok=True)
        lock = (compiled.parent / "lock").open("w")
    except OSError:  # nowhere to write, hence no cache to share either
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        compiled.touch()
