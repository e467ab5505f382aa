"""How DistributedDataParallel cuts a model into buckets, as far as the shapes determine it."""

from __future__ import annotations

import math
from collections.abc import Mapping

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20

Shapes = Mapping[str, tuple[int, ...]]


def ddp_buckets(
    shapes: Shapes, itemsize: int = 4, *, first: int = FIRST_BUCKET_BYTES, cap: int = BUCKET_BYTES
) -> list[list[str]]:
    """Names per bucket, in the order in which the backward pass finishes them: the last layer first.

    A bucket is closed by the tensor that reaches its limit; the first one has a limit of its own.
    """
    buckets: list[list[str]] = []
    current: list[str] = []
    held = 0
    for name in reversed(list(shapes)):
        current.append(name)
        held += math.prod(shapes[name]) * itemsize
        if held >= (cap if buckets else first):
            buckets.append(current)
            current, held = [], 0
    return [*buckets, current] if current else buckets
