"""Selections of about k entries: what Gaussian-k is compared with, and how long they take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from thinwire import kernels
from thinwire.kernels.reference.gaussian import quantile

RATIO = 0.001


def exact(u: torch.Tensor, k: int) -> torch.Tensor:
    return u.abs().topk(k, sorted=False).indices


def dgc_sampling(u: torch.Tensor, k: int) -> torch.Tensor:
    """A threshold from 1 % of the entries, then an exact selection among what passes it."""
    size = u.abs()
    sample = size[:: max(1, u.numel() // max(1, u.numel() // 100))]
    kept = max(1, round(k * sample.numel() / u.numel()))
    passed = (size >= sample.topk(kept).values[-1]).nonzero().flatten()
    return passed[size[passed].topk(k).indices] if passed.numel() > 4 * k / 3 else passed


def redsync(u: torch.Tensor, k: int) -> torch.Tensor:
    """Bisection between the mean and the largest magnitude."""
    size = u.abs()
    mean, most = float(size.mean()), float(size.max())
    low, high = 0.0, 1.0
    passed = size > most
    while high - low > 0.002:
        middle = (low + high) / 2
        passed = size > mean + middle * (most - mean)
        count = int(passed.sum())
        if k <= count < 2 * k:
            break
        low, high = (low, middle) if count < k else (middle, high)
    return passed.nonzero().flatten()


def gaussian(u: torch.Tensor, k: int) -> torch.Tensor:
    """The authors' loop in plain torch: a two-sided normal threshold, and up to three corrections."""
    mean, deviation = float(u.mean()), float(u.std())
    size = u.abs()
    threshold = mean + deviation * math.sqrt(2) * float(torch.erfinv(torch.tensor(1 - k / u.numel())))
    passed = size > threshold
    for _ in range(3):
        passed = size > threshold
        count = int(passed.sum())
        if count < 2 * k / 3:
            threshold *= 0.5
        elif count > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return passed.nonzero().flatten()


def first_threshold(u: torch.Tensor, k: int) -> torch.Tensor:
    """The two-sided normal threshold as it is, without corrections."""
    return (u.abs() > u.mean() + u.std() * quantile(k, u.numel())).nonzero().flatten()


SELECTIONS: dict[str, Callable[[torch.Tensor, int], object]] = {
    "exact top-k, torch": exact,
    "DGC sampling, torch": dgc_sampling,
    "RedSync, torch": redsync,
    "Gaussian-k, torch": gaussian,
    "thinwire Gaussian-k": kernels.gaussiank,
    "thinwire exact top-k": kernels.topk,
}


def selection_times(size: int, repeats: int) -> dict[str, float]:
    """In copies of the vector, on heavy-tailed data."""
    rng = torch.Generator().manual_seed(0)
    u = torch.randn(size, generator=rng) * torch.randn(size, generator=rng).exp()
    best = best_times(u, max(1, int(RATIO * size)), repeats)
    return {name: best[name] / best["copy"] for name in SELECTIONS}


def best_times(u: torch.Tensor, k: int, repeats: int) -> dict[str, float]:
    """Seconds of a copy and of every selection: the best of several turns, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    target = torch.empty_like(u)
    todo: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(u)}
    for name, select in SELECTIONS.items():
        todo[name] = lambda chosen=select: chosen(u, k)
    best = dict.fromkeys(todo, math.inf)
    for _ in range(repeats):
        for name, call in todo.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return best
