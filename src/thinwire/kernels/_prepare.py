"""Compile CPU kernels now, so that no training step waits for the compiler."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator, Sequence

Progress = Callable[[str, int, int], None]
"""Called with the family about to be prepared, how many are done, and how many there are."""


def prepare(progress: Progress | None = None, families: Sequence[str] | None = None) -> None:
    """Compile the CPU kernels (all families, or these), or load them from the cache on disk.

    One process of a machine at a time: the others find in the cache what the first has compiled.
    """
    from thinwire.kernels.cpu import FAMILIES, warm

    wanted = FAMILIES if families is None else families
    with _alone():
        for done, family in enumerate(wanted):
            if progress is not None:
                progress(family, done, len(wanted))
            warm(family)
    if progress is not None:
        progress("", len(wanted), len(wanted))


@contextlib.contextmanager
def _alone() -> Generator[None]:
    from thinwire.kernels.cpu._jit import CACHE_DIRECTORY

    try:
        os.makedirs(CACHE_DIRECTORY, exist_ok=True)
        lock = open(os.path.join(CACHE_DIRECTORY, "lock"), "w")  # noqa: SIM115
    except OSError:  # nowhere to write, hence no cache to share either
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
