"""Count sketch: a table of rows x cols sums from which heavy entries can be read back; sketches add.

Blocks of 64 neighbours are hashed together, to a run of neighbouring columns (wrapping around the end) with
64 random signs, so memory is touched in runs. Entries of one block never collide with each other.
"""

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import sketch as reference
from thinwire.kernels.reference.sketch import MEDIAN_NETWORKS


def sketch_insert(x: Tensor, rows: int, cols: int, seed: int, table: Tensor) -> None:
    """Add `x` to `table` (float32, shape rows x cols)."""
    check.flat_float("x", x)
    _check_table(table)
    if table.shape != (rows, cols):
        raise ValueError(f"table has shape {tuple(table.shape)}, expected {(rows, cols)}")
    dispatch(reference.sketch_insert, x, seed, table)


def sketch_query(table: Tensor, numel: int, seed: int, out: Tensor) -> None:
    """out[i] = the estimate of entry i: the median over the rows."""
    _check_table(table)
    check.output(out, numel)
    dispatch(reference.sketch_query, table, numel, seed, out)


def sketch_query_topk(table: Tensor, numel: int, seed: int, k: int) -> Tensor:
    """The indices of the k largest estimates, ranked as by `topk`: equal tables give equal indices."""
    _check_table(table)
    if not 0 <= numel <= check.MAX_NUMEL:
        raise ValueError(f"numel must be in [0, {check.MAX_NUMEL}], got {numel}")
    return dispatch(reference.sketch_query_topk, table, numel, seed, check.count(k, numel))


def _check_table(table: Tensor) -> None:
    if table.dim() != 2 or not table.is_contiguous() or table.dtype != torch.float32:
        raise ValueError("table must be a contiguous float32 matrix")
    if table.shape[0] not in MEDIAN_NETWORKS or table.shape[1] < 1:
        raise ValueError(
            f"table must have 1, 3, 5 or 7 rows and at least one column, got {tuple(table.shape)}"
        )
