"""The momentum of `adam` in plain torch."""

import torch
from torch import Tensor


def adam_momentum(
    m: Tensor, grad: Tensor, roots: tuple[Tensor, Tensor, Tensor] | None, beta: float, out: Tensor
) -> Tensor | None:
    wide, own = grad.float(), None
    if roots is None:
        scaled = wide
    else:
        before, s_0, s = roots
        own = torch.hypot(before, wide)
        scaled = wide * (s_0 / s).nan_to_num_(1.0, 1.0, 1.0)
    out.copy_(m * beta + scaled * (1 - beta))
    return own


def adam_keep(out: Tensor, s: Tensor | None, m: Tensor) -> None:
    m.copy_(out)
    if s is not None:
        out.masked_fill_(s == 0, 0.0)
