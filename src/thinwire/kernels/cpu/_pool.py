"""A small thread pool of our own; kernels run in it without the GIL.

Numba's threading layers are no option: one aborts the process when two threads enter it, as lanes do, another
kills forked children.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

# Below this size handing work to another thread costs more than it saves.
PARALLEL_FROM = 1 << 21
# Cuts lie on multiples of this, so partial sums over such blocks do not depend on the number of threads.
GRAIN = 1 << 16
MOST_THREADS = 16

Cut = tuple[int, int]


class _Pool:
    """Made on first use and made anew after a fork: threads do not survive into the child."""

    lock = threading.Lock()
    executor: ThreadPoolExecutor | None = None
    process = 0

    @classmethod
    def get(cls) -> ThreadPoolExecutor:
        if cls.executor is None or cls.process != os.getpid():
            with cls.lock:
                if cls.executor is None or cls.process != os.getpid():
                    cls.executor = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="thinwire-kernel")
                    cls.process = os.getpid()
        return cls.executor

    @classmethod
    def forget(cls) -> None:
        """In a forked child: another thread may have held the lock at that moment."""
        cls.lock = threading.Lock()
        cls.executor = None


os.register_at_fork(after_in_child=_Pool.forget)


def cuts(numel: int, grain: int = GRAIN) -> list[Cut]:
    """Ranges for as many threads as torch would use here, cut at multiples of `grain`."""
    threads = min(torch.get_num_threads(), MOST_THREADS)
    if threads == 1 or numel < PARALLEL_FROM:
        return [(0, numel)]
    blocks = -(-numel // grain)
    per_thread = -(-blocks // threads) * grain
    return [(lo, min(lo + per_thread, numel)) for lo in range(0, numel, per_thread)]


def run(work: Callable[[int], T], parts: int) -> list[T]:
    """work(0), ..., work(parts - 1), the first in this thread, the others in the pool."""
    if parts == 1:
        return [work(0)]
    others = [_Pool.get().submit(work, part) for part in range(1, parts)]
    return [work(0), *(future.result() for future in others)]


def run_cuts(work: Callable[[int, int], T], ranges: Sequence[Cut]) -> list[T]:
    return run(lambda part: work(*ranges[part]), len(ranges))
