"""Index codes in Triton. Where the size of a result depends on the data, the host waits once, at the end.

A code of an unknown sender is never trusted: positions are bounded by the sizes that the caller has checked,
and whatever does not fit sets a flag.
"""

import torch
from torch import Tensor

from thinwire.kernels.triton._launch import int32_full, launch_tiles, on_host, over
from thinwire.kernels.triton.programs import indices as programs


def bitmap(indices: Tensor, n: int) -> Tensor:
    length = (n + 7) // 8
    words = _words(indices, length)
    launch_tiles(programs.write_bitmap, indices.numel(), indices, indices.numel(), words)
    return _bytes(words, length)


def from_bitmap(code: Tensor) -> Tensor:
    before, total = _ones(code)
    k = int(total)
    found = torch.empty(k, dtype=torch.int32, device=code.device)
    launch_tiles(programs.write_positions, 8 * code.numel(), code, code.numel(), before, k, found)
    return found


def elias_fano(indices: Tensor, n: int, low: int) -> Tensor:
    k = indices.numel()
    plain = (k * low + 7) // 8
    length = plain + (k + (n >> low) + 8) // 8
    words = _words(indices, length)
    launch_tiles(programs.write_elias_fano, k, indices, k, low, 8 * plain, words)
    return _bytes(words, length)


def from_elias_fano(code: Tensor, k: int, low: int, plain: int) -> Tensor | None:
    unary = code[plain:]
    length = unary.numel()
    before, total = _ones(unary)
    found = torch.empty(k, dtype=torch.int32, device=code.device)
    wrong = int32_full(code, 0)
    launch_tiles(
        programs.read_elias_fano, 8 * length, unary, length, before, code, plain, k, low, wrong, found
    )
    seen = on_host(torch.cat((total, wrong)))
    return found if seen == [k, 0] else None


def rice(marked: Tensor, n: int, low: int, signed: int) -> Tensor:
    k = marked.numel()
    plain = (k * (low + signed) + 7) // 8
    steps = torch.empty(k, dtype=torch.int64, device=marked.device)
    launch_tiles(programs.rice_steps, k, marked, k, low, steps)
    ends = steps.cumsum(0)
    words = _words(marked, plain + (k + (n >> low) + 7) // 8)
    launch_tiles(programs.write_rice, k, marked, k, low, signed, 8 * plain, ends, words)
    return _bytes(words, plain + (int(ends[-1]) + 7) // 8 if k else 0)


def from_rice(code: Tensor, n: int, k: int, low: int, signed: int, plain: int) -> Tensor | None:
    unary = code[plain:]
    length = unary.numel()
    found = torch.empty(k, dtype=torch.int32, device=code.device)
    if k == 0 or length == 0:
        return found if k == length == 0 else None
    before, total = _ones(unary)
    positions = torch.zeros(k, dtype=torch.int64, device=code.device)
    launch_tiles(programs.write_positions, 8 * length, unary, length, before, k, positions)
    wrong = int32_full(code, 0)
    steps = torch.empty(k, dtype=torch.int64, device=code.device)
    launch_tiles(programs.rice_gaps, k, positions, code, plain, k, n, low, signed, wrong, steps)
    launch_tiles(programs.read_rice, k, steps.cumsum(0), code, plain, k, n, low, signed, wrong, found)
    seen = on_host(torch.cat((total, wrong, positions[-1:] // 8)))
    return found if seen == [k, 0, length - 1] else None


def _ones(code: Tensor) -> tuple[Tensor, Tensor]:
    """How many bits are set before every tile of bits, and in all."""
    counts = torch.zeros(over(8 * code.numel()), dtype=torch.int32, device=code.device)
    launch_tiles(programs.count_bits, 8 * code.numel(), code, code.numel(), counts)
    upto = counts.cumsum(0)
    return upto - counts, counts.sum(0, keepdim=True)


def _words(like: Tensor, length: int) -> Tensor:
    """Zeros for a code of so many bytes, and one word more: a field may end behind the last byte."""
    return torch.zeros(-(-length // 4) + 1, dtype=torch.int32, device=like.device)


def _bytes(words: Tensor, length: int) -> Tensor:
    return words.view(torch.uint8)[:length]
