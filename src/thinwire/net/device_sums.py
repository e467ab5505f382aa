"""Checksums of frames that are not in the host's memory: computed where the frame is, read together.

XXH3 needs the bytes on the host. A copy of every frame to the host would make it wait for the device twice
per frame. This sum is made of whole-tensor operations instead: every 64-bit word is added to a key of its
position and mixed, and the results are added up. Two words that change places change the sum, as one does
that changes a bit. A rank on a CPU computes the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_STEP = 0x9E3779B97F4A7C15 - 2**64  # as signed numbers: torch's integers wrap around
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


class Head(NamedTuple):
    """The beginning of a frame on the host, and the sum of the rest, which was computed on the device."""

    memory: memoryview
    sum: int


def device_sum(frame: torch.Tensor, header: int) -> torch.Tensor:
    """One int64 for everything behind the header; the first word of the header is part of it."""
    words = frame[header:].view(torch.int64)
    keys = torch.arange(1, words.numel() + 1, device=frame.device) * _STEP
    return _mixed(words + keys).sum() ^ _mixed(frame[:8].view(torch.int64))[0]


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64: every bit of a word depends on all of them."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def heads(frames: Sequence[torch.Tensor], length: int, header: int) -> list[Head]:
    """The first bytes of these frames and their sums, in one copy to the host. No frame is shorter."""
    parts = [
        torch.cat([frame[:length], device_sum(frame, header).view(1).view(torch.uint8)]) for frame in frames
    ]
    rows = torch.stack(parts).cpu().numpy()
    return [Head(memoryview(row[:length]), _number(row[length:].tobytes())) for row in rows]


def _number(raw: bytes) -> int:
    return int.from_bytes(raw, "little")
