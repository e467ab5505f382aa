"""Count sketch on the CPU: a block of 64 neighbours is one run of columns, added with one mask of signs."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._collect import collect_tile, joined
from thinwire.kernels.cpu._exact import keep_largest
from thinwire.kernels.cpu._jit import F32, I32, U64, kernel
from thinwire.kernels.cpu._memory import scratch_array
from thinwire.kernels.cpu._random import mix64
from thinwire.kernels.cpu._simd import add_signed64, copy_signed64
from thinwire.kernels.cpu._tensors import Source, through_float32, view
from thinwire.kernels.cpu.selection import empty_selection, threshold_from, topk_of
from thinwire.kernels.reference.sketch import BLOCK, MEDIAN_NETWORKS, SIGN_SALT, row_key

_SEVEN = MEDIAN_NETWORKS[7]
_SALT = np.uint64(SIGN_SALT)
_32 = np.uint64(32)
_ONE = np.uint64(1)
_TILE = 2048
_INSERT_TILE = 4096


@kernel
def insert_row(x: F32, first_block: int, key: np.uint64, cols: int, row: F32) -> None:
    """Add x (its first entry begins block `first_block`) to a row with BLOCK spare columns at its end."""
    width = np.uint64(cols)
    whole = len(x) // BLOCK
    for b in range(whole):
        h = mix64(key + np.uint64(first_block + b))
        start = int(((h >> _32) * width) >> _32)
        add_signed64(row, start, x, b * BLOCK, mix64(h ^ _SALT))
    if whole * BLOCK < len(x):
        h = mix64(key + np.uint64(first_block + whole))
        start = int(((h >> _32) * width) >> _32)
        signs = mix64(h ^ _SALT)
        for j in range(len(x) - whole * BLOCK):
            v = x[whole * BLOCK + j]
            row[start + j] += v if (signs >> np.uint64(j)) & _ONE else -v


@kernel
def insert_rows(x: F32, first_block: int, keys: U64, cols: int, padded: F32, first: int, every: int) -> None:
    """Add x to the rows first, first + every, ...: tile by tile, which stay in the cache for all of them."""
    for lo in range(0, len(x), _INSERT_TILE):
        tile = x[lo : min(lo + _INSERT_TILE, len(x))]
        for r in range(first, len(keys), every):
            insert_row(tile, first_block + lo // BLOCK, keys[r], cols, padded[r])


@kernel
def fold(row: F32, cols: int) -> None:
    """Bring what was added beyond the last column back to the first ones."""
    for j in range(cols, len(row)):
        row[j % cols] += row[j]


@kernel
def exchange(a: F32, b: F32) -> None:
    for j in range(len(a)):
        low, high = a[j], b[j]
        ordered = low < high
        a[j] = low if ordered else high
        b[j] = high if ordered else low


@kernel
def median5(e: F32, out: F32) -> None:
    r0, r1, r2, r3, r4 = e[0], e[1], e[2], e[3], e[4]
    for j in range(len(out)):
        a, b, c, d, f = r0[j], r1[j], r2[j], r3[j], r4[j]
        a, b = (a, b) if a < b else (b, a)
        d, f = (d, f) if d < f else (f, d)
        a, d = (a, d) if a < d else (d, a)
        b, f = (b, f) if b < f else (f, b)
        b, c = (b, c) if b < c else (c, b)
        c, d = (c, d) if c < d else (d, c)
        out[j] = c if b < c else b


@kernel
def median3(e: F32, out: F32) -> None:
    r0, r1, r2 = e[0], e[1], e[2]
    for j in range(len(out)):
        a, b, c = r0[j], r1[j], r2[j]
        a, b = (a, b) if a < b else (b, a)
        b, c = (b, c) if b < c else (c, b)
        out[j] = b if a < b else a


@kernel
def query_tile(table: F32, keys: U64, cols: int, first_block: int, estimates: F32, out: F32) -> None:
    """Estimates of up to a tile of entries; `table` has BLOCK spare columns that repeat the first ones."""
    rows = len(keys)
    blocks = (len(out) + BLOCK - 1) // BLOCK
    width = np.uint64(cols)
    for r in range(rows):
        key = keys[r]
        row = table[r]
        mine = estimates[r]
        for b in range(blocks):
            h = mix64(key + np.uint64(first_block + b))
            start = int(((h >> _32) * width) >> _32)
            copy_signed64(mine, b * BLOCK, row, start, mix64(h ^ _SALT))
    if rows == 1:
        only = estimates[0]
        for j in range(len(out)):
            out[j] = only[j]
    elif rows == 3:
        median3(estimates, out)
    elif rows == 5:
        median5(estimates, out)
    else:
        for i, j in _SEVEN:
            exchange(estimates[i][: len(out)], estimates[j][: len(out)])
        middle = estimates[3]
        for j in range(len(out)):
            out[j] = middle[j]


@kernel
def query_range(table: F32, keys: U64, cols: int, base: int, out: F32) -> None:
    """Estimates of entries base .. base + len(out); base is a multiple of the tile."""
    estimates = np.empty((len(keys), _TILE), np.float32)
    for lo in range(0, len(out), _TILE):
        hi = min(lo + _TILE, len(out))
        query_tile(table, keys, cols, (base + lo) // BLOCK, estimates, out[lo:hi])


@kernel
def query_collecting(
    table: F32, keys: U64, cols: int, lo: int, hi: int, above: int, indices: I32, values: F32
) -> tuple[int, bool]:
    """Estimates above the magnitude, without storing the others: (how many, whether room ran out)."""
    estimates = np.empty((len(keys), _TILE), np.float32)
    tile = np.empty(_TILE, np.float32)
    at = 0
    for begin in range(lo, hi, _TILE):
        part = tile[: min(_TILE, hi - begin)]
        if at + len(part) > len(indices):
            return at, True
        query_tile(table, keys, cols, begin // BLOCK, estimates, part)
        at = collect_tile(part, begin, above, indices, values, at)
    return at, False


@kernel
def query_sample(table: F32, keys: U64, cols: int, stride: int, out: F32) -> None:
    """Estimates of every stride-th block."""
    estimates = np.empty((len(keys), _TILE), np.float32)
    for b in range(len(out) // BLOCK):
        query_tile(table, keys, cols, b * stride, estimates, out[b * BLOCK : (b + 1) * BLOCK])


_SAMPLE_BLOCKS = 1024
_SAMPLED_FROM = 4 * BLOCK * _SAMPLE_BLOCKS


def sketch_insert(x: Tensor, seed: int, table: Tensor) -> None:
    rows, cols = table.shape
    padded = np.zeros((rows, cols + BLOCK), np.float32)
    keys = _keys(seed, rows)

    # One thread takes whole rows: sums come out the same whatever the number of threads.
    threads = min(len(_pool.cuts(x.numel())), rows)

    def work(part: int) -> None:
        for a, _, lo in Source(x).in_order():
            insert_rows(a, lo // BLOCK, keys, cols, padded, part, threads)
        for r in range(part, rows, threads):
            fold(padded[r], cols)

    _pool.run(work, threads)
    table += torch.from_numpy(padded)[:, :cols]


def sketch_query(table: Tensor, numel: int, seed: int, out: Tensor) -> None:
    padded, keys = _extended(table), _keys(seed, table.shape[0])
    cols = table.shape[1]
    through_float32(out, lambda part, lo: query_range(padded, keys, cols, lo, part))


def sketch_query_topk(table: Tensor, numel: int, seed: int, k: int) -> Tensor:
    found = _collected(table, numel, seed, k) if 0 < k <= numel // 4 and numel >= _SAMPLED_FROM else None
    if found is None or len(found[0]) < k:
        estimates = torch.empty(numel)
        sketch_query(table, numel, seed, estimates)
        return topk_of(Source(estimates), k)[0]
    indices, values = empty_selection(k)
    keep_largest(*found, k, indices.numpy(), values.numpy(), None)
    return indices


def _collected(table: Tensor, numel: int, seed: int, k: int) -> tuple[I32, F32] | None:
    """Candidates for the top-k, above a threshold taken from a sample of blocks; None if it was too low."""
    padded, keys, cols = _extended(table), _keys(seed, table.shape[0]), table.shape[1]
    sample = scratch_array("sample", np.float32, BLOCK * _SAMPLE_BLOCKS)
    query_sample(padded, keys, cols, numel // BLOCK // _SAMPLE_BLOCKS, sample)
    guess = threshold_from(sample, k, numel)
    if guess is None:
        return None
    above, room = guess
    capacity = room + _TILE
    ranges = _pool.cuts(numel)
    indices = scratch_array("survivors", np.int32, capacity * len(ranges))
    values = scratch_array("survivors", np.float32, capacity * len(ranges))

    def work(part: int) -> tuple[int, bool]:
        lo, hi = ranges[part]
        mine = slice(part * capacity, (part + 1) * capacity)
        return query_collecting(padded, keys, cols, lo, hi, above, indices[mine], values[mine])

    return joined(_pool.run(work, len(ranges)), capacity, capacity * len(ranges), indices, values)


def _extended(table: Tensor) -> F32:
    """The table with its first columns repeated after the last: every run of columns is contiguous."""
    rows, cols = table.shape
    padded = np.empty((rows, cols + BLOCK), np.float32)
    padded[:, :cols] = view(table)
    for at in range(cols, cols + BLOCK, cols):
        end = min(at + cols, cols + BLOCK)
        padded[:, at:end] = padded[:, : end - at]
    return padded


def _keys(seed: int, rows: int) -> U64:
    return np.array([row_key(seed, row) & 0xFFFFFFFFFFFFFFFF for row in range(rows)], np.uint64)


def warm() -> None:
    x = torch.arange(-50.0, 50.0)
    for rows in (3, 5):
        table = torch.zeros(rows, 100)
        sketch_insert(x, 1, table)
        sketch_query(table, 100, 1, torch.empty(100))
        _collected(table, 1 << 17, 1, 10)
