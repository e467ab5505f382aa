"""Gaussian-k in plain torch."""

import torch
from torch import Tensor

from thinwire.kernels._gaussian import first_threshold, moments_from_sums, search
from thinwire.kernels.reference import selection


def gaussiank(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if k == 0 or k == x.numel():
        return selection.topk(x, k)
    x = x.float()
    mean, deviation = finite_moments(x)
    first = first_threshold(mean, deviation, k, x.numel())
    verdict = search(first, k, lambda t: int(selection.above(x, t).sum()))
    if verdict.threshold is None or verdict.capped:
        return selection.topk(x, k)
    return selection.threshold(x, verdict.threshold)


def finite_moments(x: Tensor) -> tuple[float, float]:
    """Mean and unbiased standard deviation of the finite entries, in double precision."""
    kept = x[torch.isfinite(x)].double()
    return moments_from_sums(kept.numel(), float(kept.sum()), float((kept * kept).sum()))
