"""GSpar in Triton: sums of the tail in one reading pass a round, then one pass that samples.

Lambda is found on the device: rounds that are no longer needed read nothing. The host waits where a result is
a number or has a size that depends on the data.
"""

import torch
from torch import Tensor

from thinwire.kernels.generator import keys
from thinwire.kernels.reference.gspar import LARGEST
from thinwire.kernels.triton._candidates import Buffer
from thinwire.kernels.triton._launch import launch_tiles, on_host, over, signed32
from thinwire.kernels.triton.programs import gspar as programs
from thinwire.kernels.triton.programs import moments

_ROUNDS_AT_A_TIME = 8
_MOST_ROUNDS = 64


def gspar_probabilities(x: Tensor, ratio: float, rounds: int) -> float:
    n = x.numel()
    wanted = ratio * n
    _, total, _ = _tail(x, _number(x, 0.0), _number(x, 1.0)).unbind()
    lam = torch.where(total == 0.0, 0.0, (wanted / total).clamp(max=LARGEST))
    on = lam > 0.0
    for _ in range(rounds):
        below, mass, _ = _tail(x, lam, on).unbind()
        correction = (wanted - n + below) / (lam * mass)
        on = on & (mass != 0.0) & (correction > 1.0)
        lam = torch.where(on, (lam * correction).clamp(max=LARGEST), lam)
    return float(lam)


def gspar_budget(x: Tensor, epsilon: float) -> float:
    """The closed form without sorting: the tail shrinks until lambda no longer grows, as on the CPU."""
    _, first, everything = _tail(x, _number(x, 0.0), _number(x, 1.0)).unbind()
    second, lam = everything, _number(x, 0.0)
    on = torch.ones_like(lam, dtype=torch.bool)
    for done in range(1, _MOST_ROUNDS + 1):
        better = (first / (epsilon * everything + second)).clamp(max=LARGEST)
        on = on & (first != 0.0) & (everything != 0.0) & (better > lam)
        lam = torch.where(on, better, lam)
        _, first, second = _tail(x, lam, on).unbind()
        if done % _ROUNDS_AT_A_TIME == 0 and not bool(on):
            break
    return float(lam)


def gspar_sample(x: Tensor, lam: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    n = x.numel()
    factor = torch.full((1,), lam, dtype=torch.float32, device=x.device)
    key_a, key_b = map(signed32, keys(seed))
    buffer = Buffer.empty(x, n, n // 16 + 8192)
    certain = torch.zeros_like(buffer.counts)
    launch_tiles(
        programs.draw, n, x, n, factor, key_a, key_b,
        buffer.capacity, buffer.total, *buffer.parts, certain,
    )  # fmt: skip
    numbers = torch.stack((certain, buffer.counts - certain))
    upto = numbers.cumsum(1, dtype=torch.int32)
    totals = on_host(upto[:, -1]) if n else [0, 0]
    before = upto - numbers
    indices = torch.empty(totals[0], dtype=torch.int32, device=x.device)
    values = torch.empty(totals[0], dtype=torch.float32, device=x.device)
    drawn = torch.empty(totals[1], dtype=torch.int32, device=x.device)
    launch_tiles(
        programs.write_drawn, n, x, n, factor, key_a, key_b,
        buffer.capacity, buffer.total, *buffer.parts, before[0], before[1], indices, values, drawn,
    )  # fmt: skip
    return indices, values, drawn


def _tail(x: Tensor, lam: Tensor, on: Tensor) -> Tensor:
    """Of the finite entries with lam |x| < 1: (how many, the sum of their magnitudes, of their squares)."""
    n = x.numel()
    sums = torch.zeros(over(n), 3, dtype=torch.float64, device=x.device)
    launch_tiles(moments.tail_sums, n, x, n, lam.float(), on.to(torch.int32), sums)
    return sums.sum(0)


def _number(like: Tensor, value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device=like.device)
