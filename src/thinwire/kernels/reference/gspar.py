"""GSpar's probabilities and sampling in plain torch, and the greedy iteration that all backends share."""

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.kernels.generator import words

# Lambda is used as a float32; tensors of subnormal numbers would ask for a larger one.
LARGEST = torch.finfo(torch.float32).max
_SIGN_BIT = -(2**31)


def gspar_probabilities(x: Tensor, ratio: float, rounds: int) -> float:
    """`greedy` on the device: the host waits once, for lambda."""
    g, wanted = x.float().abs(), ratio * x.numel()
    finite = torch.isfinite(g)
    total = torch.where(finite, g, 0.0).double().sum()
    lam = (wanted / total).clamp(max=LARGEST)
    going = total != 0
    for _ in range(rounds):
        kept = finite & (g * lam.float() < 1.0)
        mass = torch.where(kept, g, 0.0).double().sum()
        correction = (wanted - x.numel() + kept.sum().double()) / (lam * mass)
        going = going & (mass != 0) & (correction > 1.0)
        lam = torch.where(going, (lam * correction).clamp(max=LARGEST), lam)
    return float(torch.where(total == 0, 0.0, lam))


def greedy(numel: int, ratio: float, rounds: int, tail: Callable[[float | None], tuple[int, float]]) -> float:
    """Lambda with sum of p close to ratio * numel; p = min(lambda |x|, 1) keeps this shape in every round.

    `tail(lam)` gives the count and the sum of magnitudes of the finite entries with lam |x| < 1 (all finite
    entries for None). Rounds stop early once the correction is no longer above 1.
    """
    wanted = ratio * numel
    _, total = tail(None)
    if total == 0.0:
        return 0.0
    lam = min(wanted / total, LARGEST)
    for _ in range(rounds):
        below, mass = tail(lam)
        if mass == 0.0:
            break
        correction = (wanted - numel + below) / (lam * mass)
        if correction <= 1.0:
            break
        lam = min(lam * correction, LARGEST)
    return lam


def gspar_budget(x: Tensor, epsilon: float) -> float:
    g = torch.sort(x.float()[torch.isfinite(x)].abs().double(), descending=True).values
    if g.numel() == 0 or float(g[0]) == 0.0:
        return 0.0
    total = float(g.square().sum())
    # tail sums over j > kappa, for kappa = 0 .. d - 1
    first = g.flip(0).cumsum(0).flip(0)
    second = g.square().flip(0).cumsum(0).flip(0)
    fits = g * first <= epsilon * total + second
    if not bool(fits.any()):
        return 1.0 / float(g[-1]) if float(g[-1]) > 0 else 0.0
    kappa = int(fits.long().argmax())
    denominator = epsilon * total + float(second[kappa])
    return min(float(first[kappa]) / denominator, LARGEST) if denominator > 0 else 0.0


def gspar_sample(x: Tensor, lam: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.float()
    p = wide.abs() * torch.tensor(lam, dtype=torch.float32)
    certain = ~(p < 1.0)
    draw = words(seed, x.numel(), x.device) >> 1
    sampled = ~certain & (draw < (torch.where(certain, 0.0, p) * 2.0**31).long())
    certain_index = torch.nonzero(certain).flatten()
    index = torch.nonzero(sampled).flatten().to(torch.int32)
    signed = torch.where(wide[index] < 0, index | _SIGN_BIT, index)
    return certain_index.to(torch.int32), wide[certain_index], signed
