"""The calls whose programs and memory passes are shown, and the passes of the CPU kernels.

A pass reads or writes as many bytes as the tensor has: a tensor that is read, changed and stored makes two.
Those of the CPU kernels are counted from their loops over the tensor; lists of indices, tables and candidates
are left out, as they are for the GPU. A code of indices has nothing else, so it has no passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common import Action
from thinwire import kernels
from thinwire.kernels import indices

WORKERS = 8
RATIO = 100


@dataclass(frozen=True, slots=True)
class Case:
    """`make(size)` gives the call; `cpu` its passes on the CPU."""

    name: str
    cpu: float
    make: Callable[[int], Action]


def _reading(call: Callable[[Tensor, int], object]) -> Callable[[int], Action]:
    def make(size: int) -> Action:
        x = torch.randn(size, generator=torch.Generator().manual_seed(1))
        return lambda: call(x, size // RATIO)

    return make


def _feedback(call: Callable[[Tensor, Tensor, int], object]) -> Callable[[int], Action]:
    def make(size: int) -> Action:
        generator = torch.Generator().manual_seed(2)
        residual, grad = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
        return lambda: call(residual, grad, size // RATIO)

    return make


def _every(size: int, first: int = 0) -> Tensor:
    return torch.arange(first, size, RATIO, dtype=torch.int32)


def _scatter(size: int) -> Action:
    where = [_every(size, worker) for worker in range(WORKERS)]
    what = [torch.ones(len(index)) for index in where]
    out = torch.empty(size)
    return lambda: kernels.scatter_mean(where, what, out)


def _sketch(size: int) -> Action:
    x, table = torch.randn(size), torch.zeros(5, 100)
    return lambda: kernels.sketch_insert(x, 5, 100, 1, table)


def _query(size: int) -> Action:
    table, out = torch.randn(5, 100), torch.empty(size)
    return lambda: kernels.sketch_query(table, size, 1, out)


def _query_topk(size: int) -> Action:
    table = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1))
    return lambda: kernels.sketch_query_topk(table, size, 1, size // RATIO)


def _codes(size: int) -> Action:
    where, low = _every(size), 6

    def call() -> None:
        indices.from_elias_fano(indices.elias_fano(where, size, low), size, len(where), low)

    return call


def _rice(size: int) -> Action:
    where, low = _every(size), 6
    return lambda: indices.from_rice(indices.rice(where, size, low), size, len(where), low)


def _bitmap(size: int) -> Action:
    where = _every(size)
    return lambda: indices.from_bitmap(indices.bitmap(where, size), size, len(where))


PER_CHUNK = kernels.PerChunk(41, 4096)

CASES = (
    Case("topk 1 %", 1.0, _reading(kernels.topk)),
    Case("threshold", 2.0, _reading(lambda x, _: kernels.threshold(x, 2.5))),
    Case("gaussiank 1 %, normal", 2.0, _reading(kernels.gaussiank)),
    Case("chunk topk 1 %", 1.0, _reading(lambda x, _: kernels.chunk_topk(x, PER_CHUNK))),
    Case("feedback + topk 1 %", 3.0, _feedback(kernels.feedback_topk)),
    # What was selected is zeroed afterwards.
    Case(
        "feedback + threshold",
        4.0 + 1 / RATIO,
        _feedback(lambda r, g, _: kernels.feedback_threshold(r, g, 3.65)),
    ),
    Case("feedback + gaussiank 1 %", 4.0 + 1 / RATIO, _feedback(kernels.feedback_gaussiank)),
    Case(
        "feedback + chunk topk 1 %",
        3.0,
        _feedback(lambda r, g, _: kernels.feedback_chunk_topk(r, g, PER_CHUNK)),
    ),
    Case("feedback + block of 1 %", 3.0, _feedback(lambda r, g, k: kernels.feedback_block(r, g, 0, k))),
    Case("scatter mean of 8 x 1 %", 1.0, _scatter),
    Case("gspar, two rounds", 3.0, _reading(lambda x, _: kernels.gspar_probabilities(x, 0.01))),
    Case("gspar sample, about 1 %", 1.0, _reading(lambda x, _: kernels.gspar_sample(x, 0.0125, 1))),
    Case("sketch insert 5 rows", 1.0, _sketch),
    Case("sketch query 5 rows", 1.0, _query),
    Case("sketch query + topk 1 %", 0.0, _query_topk),
    Case("bitmap, there and back", 0.0, _bitmap),
    Case("Elias-Fano, there and back", 0.0, _codes),
    Case("Rice, there and back", 0.0, _rice),
)
