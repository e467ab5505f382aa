"""Is every entry finite?"""

from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import finite as reference


def all_finite(x: Tensor) -> bool:
    """Whether `x` holds no NaN and no infinity, in one reading pass without a temporary."""
    check.flat_float("x", x)
    return dispatch(reference.all_finite, x)


def finite_flag(x: Tensor) -> bool | Tensor:
    """The same as a flag for a commit: on other devices than a CPU a tensor, which nobody waits for."""
    if x.device.type == "cpu":
        return all_finite(x)
    check.flat_float("x", x)
    return torch.isfinite(x).all()


def all_flags(flags: Iterable[bool | Tensor]) -> bool | Tensor:
    """Whether all flags are set: a tensor if one of them is."""
    on_host, away = True, list[Tensor]()
    for flag in flags:
        if isinstance(flag, Tensor):
            away.append(flag)
        else:
            on_host = on_host and flag
    if not away:
        return on_host
    return torch.stack(away).all() if on_host else torch.zeros_like(away[0])
