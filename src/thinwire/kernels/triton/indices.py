"""Index codes in Triton. The host waits once where the size of a result depends on the data.

A code of an unknown sender is never trusted: positions are bounded by the sizes that the caller has checked,
and whatever does not fit sets a flag. With `static_` the host does not wait, and all indices are -1 if the
code is not one of k indices.
"""

import torch
from torch import Tensor

from thinwire.kernels.reference.indices import INDEX_BITS
from thinwire.kernels.triton._launch import int32_full, launch_tiles, on_host, over
from thinwire.kernels.triton.programs import indices as programs


def bitmap(indices: Tensor, n: int) -> Tensor:
    length = (n + 7) // 8
    words = _words(indices, length)
    launch_tiles(programs.write_bitmap, indices.numel(), indices, indices.numel(), words)
    return _bytes(words, length)


def from_bitmap(code: Tensor) -> Tensor:
    _, total = _ones(code)
    return static_from_bitmap(code, int(total))


def static_from_bitmap(code: Tensor, k: int) -> Tensor:
    before, total = _ones(code)
    found = int32_full(code, -1, k)
    launch_tiles(programs.write_positions, 8 * code.numel(), code, code.numel(), before, k, found)
    return torch.where(total == k, found, -1)


def elias_fano(indices: Tensor, n: int, low: int) -> Tensor:
    k = indices.numel()
    plain = (k * low + 7) // 8
    length = plain + (k + (n >> low) + 8) // 8
    words = _words(indices, length)
    launch_tiles(programs.write_elias_fano, k, indices, k, low, 8 * plain, words)
    return _bytes(words, length)


def from_elias_fano(code: Tensor, k: int, low: int, plain: int) -> Tensor | None:
    found = static_from_elias_fano(code, k, low, plain)
    return found if k == 0 or int(found[0]) >= 0 else None


def static_from_elias_fano(code: Tensor, k: int, low: int, plain: int) -> Tensor:
    unary = code[plain:]
    length = unary.numel()
    before, total = _ones(unary)
    found, wrong = int32_full(code, -1, k), int32_full(code, 0)
    launch_tiles(
        programs.read_elias_fano, 8 * length, unary, length, before, code, plain, k, low, wrong, found
    )
    return torch.where((total == k) & (wrong == 0), found, -1)


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
    if k == 0 or code.numel() == plain:
        return int32_full(code, 0, 0) if k == 0 and code.numel() == plain else None
    found = static_from_rice(code, k, low, signed, plain)
    first, last = on_host(torch.stack((found[0], found[-1])))
    return None if first == -1 or last & INDEX_BITS >= n else found


def static_from_rice(code: Tensor, k: int, low: int, signed: int, plain: int) -> Tensor:
    unary = code[plain:]
    length, limit = unary.numel(), INDEX_BITS
    before, total = _ones(unary)
    positions = torch.zeros(k, dtype=torch.int64, device=code.device)
    launch_tiles(programs.write_positions, 8 * length, unary, length, before, k, positions)
    found, wrong = int32_full(code, -1, k), int32_full(code, 0)
    steps = torch.empty(k, dtype=torch.int64, device=code.device)
    launch_tiles(programs.rice_gaps, k, positions, code, plain, k, limit, low, signed, wrong, steps)
    launch_tiles(programs.read_rice, k, steps.cumsum(0), code, plain, k, limit, low, signed, wrong, found)
    right = (total == k) & (wrong == 0) & (positions[-1:] // 8 == length - 1)
    return torch.where(right, found, -1)


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
