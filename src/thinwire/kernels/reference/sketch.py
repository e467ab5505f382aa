"""Count sketch with block hashing in plain torch: a block of neighbours goes to a run of columns."""

import torch
from torch import Tensor

from thinwire.kernels.generator import MASK32, SPLIT_STEP, mix64, mix64_tensor
from thinwire.kernels.reference.selection import topk

BLOCK = 64
SIGN_SALT = 0x1D8E4E27C47D124F


def row_key(seed: int, row: int) -> int:
    """A signed 64-bit key per row; the hash of a block is mix64(key + block)."""
    key = mix64(seed + SPLIT_STEP * (row + 1))
    return key - 2**64 if key >= 2**63 else key


# Exchanges (i, j) that bring the median of an odd number of rows to the middle; checked by brute force in the
# tests. The compiled kernels spell the same networks out.
MEDIAN_NETWORKS: dict[int, tuple[tuple[int, int], ...]] = {
    1: (),
    3: ((0, 1), (1, 2), (0, 1)),
    5: ((0, 1), (3, 4), (0, 3), (1, 4), (1, 2), (2, 3), (1, 2)),
    7: (
        (0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6),
        (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4),
    ),
}  # fmt: skip


def sketch_insert(x: Tensor, seed: int, table: Tensor) -> None:
    rows, cols = table.shape
    for row in range(rows):
        where, signs = _hash(x.numel(), cols, seed, row, x.device)
        table[row].index_add_(0, where, x.float() * signs)


def sketch_query(table: Tensor, numel: int, seed: int, out: Tensor) -> None:
    out.copy_(_estimates(table, numel, seed))


def sketch_query_topk(table: Tensor, numel: int, seed: int, k: int) -> Tensor:
    return topk(_estimates(table, numel, seed), None, k)[0]


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
    h = mix64_tensor(torch.arange(blocks, dtype=torch.int64, device=device) + key)
    start = (((h >> 32) & MASK32) * cols) >> 32
    patterns = mix64_tensor(h ^ SIGN_SALT)
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
