"""The mean of sparse contributions from all workers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import PayloadError
from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import scatter as reference


def scatter_mean(indices: Sequence[Tensor], values: Sequence[Tensor], out: Tensor) -> None:
    """out = (1/W) sum of the workers' sparse vectors, summed in rank order; absent entries become zero.

    Every index list must ascend strictly within [0, out.numel()), else PayloadError with `out` untouched. On
    other devices than a CPU the caller asks `ascending_flag`; here, indices are only kept inside.
    """
    check.output(out, out.numel())
    check.workers(indices, values)
    for rank, (where, what) in enumerate(zip(indices, values, strict=True)):
        if what.dim() != 1 or not what.is_contiguous() or what.dtype not in check.FLOATS:
            raise PayloadError(f"values of rank {rank} must be flat contiguous floats, got {what.dtype}")
        if where.numel() != what.numel():
            raise PayloadError(f"rank {rank} sent {where.numel()} indices but {what.numel()} values")
        if out.device.type == "cpu" and not ascending_in_range(where, out.numel()):
            raise PayloadError(f"indices of rank {rank} do not ascend strictly within [0, {out.numel()})")
    if out.device.type != "cpu" and out.numel():
        indices = [where.clamp(0, out.numel() - 1) for where in indices]
    wide = [what.float() for what in values]
    dispatch(reference.scatter_mean, indices, wide, out)


def ascending_in_range(indices: Tensor, numel: int) -> bool:
    """Whether these are strictly ascending int32 indices within [0, numel)."""
    if indices.dtype != torch.int32 or indices.dim() != 1 or not indices.is_contiguous():
        raise PayloadError(f"indices must be flat contiguous int32, got {indices.dtype}")
    return dispatch(reference.ascending_in_range, indices, numel)


def ascending_flag(indices: Tensor, numel: int) -> bool | Tensor:
    """The same as a flag for a commit: on other devices than a CPU a tensor, which nobody waits for."""
    if indices.device.type == "cpu":
        return ascending_in_range(indices, numel)
    return reference.ascending_flag(indices, numel)
