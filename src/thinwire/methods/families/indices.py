"""How k ascending indices below n become bytes: raw, a bitmap, or Elias-Fano, whichever is shortest.

The length depends on n and k only, so it is known on every rank. Elias-Fano splits an index in l =
floor(log2(n/k)) low bits, packed as they are, and the rest, of which only the increments are written, in
unary: k (2 + log2(n/k)) bits at the most. At 1 % that is 8.6 bits an index instead of 32.
"""

from __future__ import annotations

import torch

from thinwire.errors import PayloadError
from thinwire.kernels.indices import bitmap, elias_fano, from_bitmap, from_elias_fano


def _elias_fano_bytes(n: int, k: int) -> int:
    low = low_bits(n, k)
    return -(-k * low // 8) + -(-(k + (n >> low) + 1) // 8)


def low_bits(n: int, k: int) -> int:
    return max(0, (n // k).bit_length() - 1) if k else 0


def _ways(n: int, k: int) -> dict[str, int]:
    return {"raw": 4 * k, "bitmap": -(-n // 8), "elias-fano": _elias_fano_bytes(n, k)}


def best_way(n: int, k: int) -> str:
    """The shortest code; all indices (k = n) and none need no bytes at all."""
    if k in (0, n):
        return "none"
    ways = _ways(n, k)
    return min(ways, key=lambda way: ways[way])


def code_bytes(n: int, k: int) -> int:
    way = best_way(n, k)
    return 0 if way == "none" else _ways(n, k)[way]


def encode(indices: torch.Tensor, n: int) -> torch.Tensor:
    """uint8 code of ascending int32 indices."""
    k = indices.numel()
    way = best_way(n, k)
    if way == "none":
        return torch.empty(0, dtype=torch.uint8, device=indices.device)
    if way == "raw":
        return indices.contiguous().view(torch.uint8)
    if way == "bitmap":
        return bitmap(indices, n)
    return elias_fano(indices, n, low_bits(n, k))


def decode(code: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The k indices in a code from the wire; `PayloadError` if it cannot be one."""
    if not 0 <= k <= n:
        raise PayloadError(f"a payload claims {k} entries of a tensor of {n}")
    if code.numel() != code_bytes(n, k):
        raise PayloadError(f"an index code of {code.numel()} bytes, expected {code_bytes(n, k)}")
    way = best_way(n, k)
    if way == "none":
        return torch.arange(k, dtype=torch.int32, device=code.device)
    if way == "raw":
        return code.clone().view(torch.int32)
    if way == "bitmap":
        return from_bitmap(code, n, k)
    return from_elias_fano(code, n, k, low_bits(n, k))
