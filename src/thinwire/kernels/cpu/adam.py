"""The momentum of `adam` on the CPU: one pass before the exchange and one after it."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._jit import F32, kernel
from thinwire.kernels.cpu._tensors import view
from thinwire.kernels.reference import adam as reference

_TILE = 2048
_LARGEST = np.float32(np.finfo(np.float32).max)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)

Roots = tuple[Tensor, Tensor, Tensor]


# Short loops over tiles, each with few arrays: the compiler vectorises no loop with many that may overlap.
@kernel
def scale_tile(g: F32, s_0: F32, s: F32, scaled: F32) -> None:
    for j in range(len(scaled)):
        c = s_0[j] / s[j]
        scaled[j] = g[j] * (c if abs(c) <= _LARGEST else _ONE)


@kernel
def grow_tile(own: F32, g: F32, grown: F32) -> None:
    # In double precision no square is too large or too small.
    for j in range(len(grown)):
        a, b = np.float64(own[j]), np.float64(g[j])
        grown[j] = np.float32(np.sqrt(a * a + b * b))


@kernel
def mix_tile(m: F32, beta: np.float32, scaled: F32, part: np.float32, out: F32) -> None:
    for j in range(len(out)):
        out[j] = m[j] * beta + scaled[j] * part


@kernel
def momentum_range(
    m: F32, g: F32, own: F32, s_0: F32, s: F32, beta: np.float32, part: np.float32, grown: F32, out: F32
) -> None:
    """`out` may be g: a tile of g is read before it is written."""
    scratch = np.empty(_TILE, np.float32)
    for lo in range(0, len(m), _TILE):
        hi = min(lo + _TILE, len(m))
        scaled = scratch[: hi - lo]
        scale_tile(g[lo:hi], s_0[lo:hi], s[lo:hi], scaled)
        grow_tile(own[lo:hi], g[lo:hi], grown[lo:hi])
        mix_tile(m[lo:hi], beta, scaled, part, out[lo:hi])


@kernel
def plain_range(m: F32, g: F32, beta: np.float32, part: np.float32, out: F32) -> None:
    scratch = np.empty(_TILE, np.float32)
    for lo in range(0, len(m), _TILE):
        hi = min(lo + _TILE, len(m))
        scaled = scratch[: hi - lo]
        for j in range(len(scaled)):
            scaled[j] = g[lo + j]
        mix_tile(m[lo:hi], beta, scaled, part, out[lo:hi])


@kernel
def keep_range(out: F32, s: F32, m: F32) -> None:
    for j in range(len(m)):
        value = out[j]
        m[j] = value
        out[j] = _ZERO if s[j] == _ZERO else value


def adam_momentum(m: Tensor, grad: Tensor, roots: Roots | None, beta: float, out: Tensor) -> Tensor | None:
    if grad.dtype != torch.float32:
        return reference.adam_momentum(m, grad, roots, beta, out)
    kept, part = np.float32(beta), np.float32(1 - beta)
    old, g, to = view(m), view(grad), view(out)
    ranges = _pool.cuts(m.numel())
    if roots is None:
        _pool.run_cuts(lambda lo, hi: plain_range(old[lo:hi], g[lo:hi], kept, part, to[lo:hi]), ranges)
        return None
    grown = torch.empty_like(m)
    own, s_0, s, new = view(roots[0]), view(roots[1]), view(roots[2]), view(grown)

    def work(lo: int, hi: int) -> None:
        before = old[lo:hi], g[lo:hi], own[lo:hi], s_0[lo:hi], s[lo:hi]
        momentum_range(*before, kept, part, new[lo:hi], to[lo:hi])

    _pool.run_cuts(work, ranges)
    return grown


def adam_keep(out: Tensor, s: Tensor | None, m: Tensor) -> None:
    if s is None or out.dtype != torch.float32:
        reference.adam_keep(out, s, m)
        return
    result, squares, kept = view(out), view(s), view(m)
    _pool.run_cuts(
        lambda lo, hi: keep_range(result[lo:hi], squares[lo:hi], kept[lo:hi]), _pool.cuts(m.numel())
    )


def warm() -> None:
    m = torch.ones(10)
    roots = (torch.ones(10), torch.ones(10), torch.ones(10))
    for given in (None, roots):
        adam_momentum(m, torch.ones(10), given, 0.9, torch.empty(10))
    adam_keep(torch.ones(10), torch.ones(10), m)
