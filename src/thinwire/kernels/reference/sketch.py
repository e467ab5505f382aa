"""Count sketch with block hashing in plain torch."""

import torch
from torch import Tensor

from thinwire.kernels._sketch import BLOCK, MEDIAN_NETWORKS, SIGN_SALT, row_key
from thinwire.kernels.reference._random import mix64
from thinwire.kernels.reference.selection import topk

_MASK32 = 0xFFFFFFFF


def sketch_insert(x: Tensor, seed: int, table: Tensor) -> None:
    rows, cols = table.shape
    for row in range(rows):
        where, signs = _hash(x.numel(), cols, seed, row, x.device)
        table[row].index_add_(0, where, x.float() * signs)


def sketch_query(table: Tensor, numel: int, seed: int, out: Tensor) -> None:
    out.copy_(_estimates(table, numel, seed))


def sketch_query_topk(table: Tensor, numel: int, seed: int, k: int) -> Tensor:
    return topk(_estimates(table, numel, seed), k)[0]


def _estimates(table: Tensor, numel: int, seed: int) -> Tensor:
    rows, cols = table.shape
    estimates: list[Tensor] = []
    for row in range(rows):
        where, signs = _hash(numel, cols, seed, row, table.device)
        estimates.append(table[row][where] * signs)
    return _median(estimates)


def _hash(numel: int, cols: int, seed: int, row: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The column and the sign of every entry in one row of the table."""
    blocks = -(-numel // BLOCK)
    key = row_key(seed, row)
    h = mix64(torch.arange(blocks, dtype=torch.int64, device=device) + key)
    start = (((h >> 32) & _MASK32) * cols) >> 32
    patterns = mix64(h ^ SIGN_SALT)
    lane = torch.arange(BLOCK, device=device)
    where = (start[:, None] + lane) % cols
    positive = (patterns[:, None] >> lane) & 1
    signs = positive.float() * 2.0 - 1.0
    return where.flatten()[:numel], signs.flatten()[:numel]


def _median(values: list[Tensor]) -> Tensor:
    v = list(values)
    for i, j in MEDIAN_NETWORKS[len(v)]:
        ordered = v[i] < v[j]
        v[i], v[j] = torch.where(ordered, v[i], v[j]), torch.where(ordered, v[j], v[i])
    return v[len(v) // 2]
