"""Gradients of linear models on sparse rows (CSR arrays), one pass over the entries of the rows."""

import math

import numpy as np

from thinwire.kernels.cpu._jit import F64, I32, I64, kernel
from thinwire.kernels.cpu._rows import (
    product4,
    product8,
    product12,
    product16,
    update4,
    update8,
    update12,
    update16,
)

LOGISTIC = 0
SQUARES = 1
HINGE = 2


@kernel
def slope(kind: int, margin: float, label: float) -> float:
    """The derivative of a row's loss by its margin a'x."""
    if kind == SQUARES:
        return margin - label
    if kind == HINGE:
        return -label if label * margin < 1.0 else 0.0
    return -label / (1.0 + math.exp(label * margin)) if label * margin < 700.0 else 0.0


@kernel
def _loss(kind: int, margin: float, label: float) -> float:
    if kind == SQUARES:
        return 0.5 * (margin - label) ** 2
    if kind == HINGE:
        return max(0.0, 1.0 - label * margin)
    agreed = label * margin
    return math.log1p(math.exp(-agreed)) if agreed > 0 else -agreed + math.log1p(math.exp(agreed))


@kernel
def gradient_difference(
    starts: I32,
    columns: I32,
    values: F64,
    labels: F64,
    kind: int,
    rows: I64,
    x: F64,
    snapshot: F64,
    out: F64,
) -> None:
    """out = the mean over `rows` of the gradient at x minus that at the snapshot."""
    out[:] = 0.0
    for number in range(len(rows)):
        r = int(rows[number])
        here, there = 0.0, 0.0
        for e in range(starts[r], starts[r + 1]):
            here += values[e] * x[columns[e]]
            there += values[e] * snapshot[columns[e]]
        weight = (slope(kind, here, labels[r]) - slope(kind, there, labels[r])) / len(rows)
        for e in range(starts[r], starts[r + 1]):
            out[columns[e]] += weight * values[e]


@kernel
def gradient_sum(
    starts: I32, columns: I32, values: F64, labels: F64, kind: int, begin: int, end: int, x: F64, out: F64
) -> float:
    """out = the sum of the gradients of rows `begin` to `end`; returns the sum of their losses."""
    out[:] = 0.0
    total = 0.0
    for r in range(begin, end):
        margin = 0.0
        for e in range(starts[r], starts[r + 1]):
            margin += values[e] * x[columns[e]]
        total += _loss(kind, margin, labels[r])
        weight = slope(kind, margin, labels[r])
        for e in range(starts[r], starts[r + 1]):
            out[columns[e]] += weight * values[e]
    return total


@kernel
def _product(scores: F64, matrix: F64, columns: I32, values: F64, begin: int, end: int, stride: int) -> None:
    """scores = the row's product with the matrix, which has `stride` entries for each column of the row."""
    for c in range(0, stride, 16):
        width = stride - c
        if width == 4:
            product4(scores, c, matrix, stride, c, columns, values, begin, end)
        elif width == 8:
            product8(scores, c, matrix, stride, c, columns, values, begin, end)
        elif width == 12:
            product12(scores, c, matrix, stride, c, columns, values, begin, end)
        else:
            product16(scores, c, matrix, stride, c, columns, values, begin, end)


@kernel
def _update(matrix: F64, scores: F64, columns: I32, values: F64, begin: int, end: int, stride: int) -> None:
    """matrix += the outer product of the row and the scores."""
    for c in range(0, stride, 16):
        width = stride - c
        if width == 4:
            update4(matrix, stride, c, scores, c, columns, values, begin, end)
        elif width == 8:
            update8(matrix, stride, c, scores, c, columns, values, begin, end)
        elif width == 12:
            update12(matrix, stride, c, scores, c, columns, values, begin, end)
        else:
            update16(matrix, stride, c, scores, c, columns, values, begin, end)


@kernel
def softmax_stride(classes: int) -> int:
    """Entries for each column in the matrices of `softmax_sum`: the classes, and zeros to fill a vector."""
    return (classes + 3) // 4 * 4


@kernel
def softmax_sum(
    starts: I32, columns: I32, values: F64, labels: I64, classes: int, weights: F64, out: F64
) -> float:
    """Softmax regression: out += the sum of the rows' gradients; returns the sum of their losses.

    `weights` and `out` have `softmax_stride(classes)` entries for each column.
    """
    stride = softmax_stride(classes)
    scores = np.zeros(stride)
    total = 0.0
    for r in range(len(starts) - 1):
        begin, end, label = int(starts[r]), int(starts[r + 1]), int(labels[r])
        _product(scores, weights, columns, values, begin, end, stride)
        top = -np.inf
        for c in range(classes):
            top = max(top, scores[c])
        own, whole = scores[label], 0.0
        for c in range(classes):
            scores[c] = math.exp(scores[c] - top)
            whole += scores[c]
        total += math.log(whole) + top - own
        for c in range(classes):
            scores[c] /= whole
        scores[label] -= 1.0
        _update(out, scores, columns, values, begin, end, stride)
    return total


def warm() -> None:
    starts, columns = np.array([0, 1, 2], np.int32), np.array([0, 1], np.int32)
    values, labels = np.ones(2), np.ones(2)
    x, out = np.zeros(2), np.zeros(2)
    gradient_difference(starts, columns, values, labels, LOGISTIC, np.array([0, 1]), x, x, out)
    gradient_sum(starts, columns, values, labels, LOGISTIC, 0, 2, x, out)
    softmax_sum(starts, columns, values, np.array([0, 1]), 2, np.zeros(8), np.zeros(8))
