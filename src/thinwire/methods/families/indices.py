"""Codes for k ascending indices below n: raw, a bitmap, or Elias-Fano, whichever is shortest.

On a CPU, indices from the wire are checked here. On other devices the flag for the commit says whether they
ascend (`SparseMean`), so that the host need not wait for them.

The length depends only on n and k, so every rank knows it. Elias-Fano packs the l = floor(log2(n/k)) low bits
of each index and writes the increments of the high bits in unary: at most k (2 + log2(n/k)) bits. At 1 % this
is 8.6 bits per index instead of 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.kernels.indices import bitmap, elias_fano, from_bitmap, from_elias_fano
from thinwire.kernels.scatter import ascending_in_range

LONGEST_CHUNK = 2**16


def _elias_fano_bytes(n: int, k: int) -> int:
    low = low_bits(n, k)
    return -(-k * low // 8) + -(-(k + (n >> low) + 1) // 8)


def low_bits(n: int, k: int) -> int:
    return max(0, (n // k).bit_length() - 1) if k else 0


def rice_bits(n: int, k: int) -> int:
    """The plain bits of a Rice code that suit k indices drawn evenly from n."""
    # 2^bits is about ln 2 / -ln(1 - k/n); exact on whole numbers, so that all ranks agree.
    return max(0, (481 * (2 * n - k) // (1000 * k)).bit_length() - 1) if k else 0


def _ways(n: int, k: int) -> dict[str, int]:
    return {"raw": 4 * k, "bitmap": -(-n // 8), "elias-fano": _elias_fano_bytes(n, k)}


@lru_cache(maxsize=4096)
def best_way(n: int, k: int) -> str:
    """The shortest code. All indices (k = n) and no indices need no bytes."""
    if k in (0, n):
        return "none"
    ways = _ways(n, k)
    return min(ways, key=lambda way: ways[way])


@lru_cache(maxsize=4096)
def code_bytes(n: int, k: int) -> int:
    way = best_way(n, k)
    return 0 if way == "none" else _ways(n, k)[way]


def longest(n: int) -> int:
    """The bytes of the longest code of any number of indices: a bitmap is always possible."""
    return -(-n // 8)


def encode(indices: torch.Tensor, n: int) -> torch.Tensor:
    """The code of ascending int32 indices, as uint8."""
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
    """The k indices in a code from the wire. Raises PayloadError if it is not a valid code."""
    if not 0 <= k <= n:
        raise PayloadError(f"a payload claims {k} entries of a tensor of {n}")
    if code.numel() != code_bytes(n, k):
        raise PayloadError(f"an index code of {code.numel()} bytes; expected {code_bytes(n, k)}")
    way = best_way(n, k)
    if way == "none":
        return torch.arange(k, dtype=torch.int32, device=code.device)
    if way == "raw":
        return code.clone().view(torch.int32)
    if way == "bitmap":
        return from_bitmap(code, n, k)
    return from_elias_fano(code, n, k, low_bits(n, k))


@dataclass(frozen=True)
class ShortestCode:
    """The code of the k largest of n entries. `decode` checks order and range."""

    n: int
    k: int

    @property
    def bytes(self) -> int:
        return code_bytes(self.n, self.k)

    def choose(self, m: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """The indices of the k largest entries of m + g."""
        return kernels.select_feedback_topk(m, g, self.k)[0]

    def encode(self, indices: torch.Tensor) -> torch.Tensor:
        return encode(indices, self.n)

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return _checked(decode(code, self.n, self.k), self.n)


@dataclass(frozen=True)
class ChunkCode:
    """The code of the largest entry of each chunk: its offset, in one or two bytes."""

    n: int
    chunk: int

    @property
    def k(self) -> int:
        return -(-self.n // self.chunk)

    @property
    def bytes(self) -> int:
        return self.k * (1 if self.chunk <= 256 else 2)

    def choose(self, m: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """The index of the largest entry of m + g in each chunk."""
        return kernels.chunk_argmax_sum(m, g, self.chunk)

    def encode(self, indices: torch.Tensor) -> torch.Tensor:
        offsets = indices % self.chunk
        return offsets.to(torch.uint8) if self.chunk <= 256 else offsets.to(torch.int16).view(torch.uint8)

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        if code.numel() != self.bytes:
            raise PayloadError(f"a code of {code.numel()} bytes for {self.k} chunks; expected {self.bytes}")
        offsets = code.int() if self.chunk <= 256 else code.clone().view(torch.int16).int() & 0xFFFF
        begins = torch.arange(0, self.n, self.chunk, dtype=torch.int32, device=code.device)
        if code.device.type != "cpu":
            return _checked(torch.where(offsets < self.chunk, begins + offsets, -1), self.n)
        if bool((offsets >= self.chunk).any()):
            raise PayloadError(f"a payload names an entry outside its chunk of {self.chunk}")
        return _checked(begins + offsets, self.n)


def _checked(indices: torch.Tensor, n: int) -> torch.Tensor:
    """These indices, if they ascend within a tensor of n: others would read and write outside it.

    On another device than a CPU, they are only kept inside: the host would have to wait for more.
    """
    if indices.device.type != "cpu":
        return torch.where((indices >= 0) & (indices < n), indices, -1)
    if not ascending_in_range(indices, n):
        raise PayloadError(f"the indices of a payload do not ascend within a tensor of {n}")
    return indices
