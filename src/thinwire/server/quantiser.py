"""Vectors to bytes and back: the grid (step, bits) of double quantisation, float32, or signs with indices.

The grid of a pair (step, b) is {-2^(b-1) step, ..., 0, ..., (2^(b-1) - 1) step}. A value between two points
becomes one of them at random, so that the expectation is the value; E|Q(x) - x|^2 <= d step^2 / 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.errors import PayloadError
from thinwire.kernels import gspar_sample
from thinwire.kernels.cpu import grid
from thinwire.kernels.generator import keys
from thinwire.methods.families import indices as index_code
from thinwire.server.options import RAW_BITS

Vector = NDArray[Any]
Bytes = NDArray[np.uint8]

NOTHING, SPARSE, RAW = 0, 254, 255
"""Forms beside the widths 1 to 48 of a grid: a token for "zero" (or "no change"), signs, float32."""

SMALLEST_STEP = 2.0**-120
"""Below this a step is zero: it travels as a float32, which must stay a normal number."""

_EMPTY: Bytes = np.empty(0, np.uint8)


@dataclass(slots=True)
class Coded:
    """A vector as it travels. `entries` is its length, for signs the number of survivors."""

    form: int
    entries: int
    scale: float = 0.0
    payload: Bytes = field(default_factory=lambda: _EMPTY)

    @property
    def bits(self) -> int:
        """What the method itself has to send: the codes and, if there is one, the scale."""
        return 8 * len(self.payload) + (0 if self.form == RAW else 32)


def payload_bytes(form: int, entries: int, size: int) -> int:
    """The formula: bytes of a vector of length `size` in this form."""
    if form == NOTHING:
        return 0
    if form == RAW:
        return 4 * size
    if form == SPARSE:
        return index_code.code_bytes(size, entries) + -(-entries // 8)
    return -(-form * size // 8)


def raw(x: Vector) -> Coded:
    return Coded(RAW, len(x), 0.0, np.ascontiguousarray(x, np.float32).view(np.uint8))


def precision(square: float, largest: float, size: int, mu: float) -> tuple[float, int]:
    """The coarsest grid that keeps E|Q(x) - x|^2 <= mu * square and reaches `largest`: (step, bits).

    step = 2 sqrt(mu / d) |x - x~|, bits = 1 + ceil(log2(largest / step + 1)).
    """
    step = 2.0 * math.sqrt(mu * square / size)
    if step < SMALLEST_STEP:
        return 0.0, 0
    bits = 1 + math.ceil(math.log2(largest / step + 1.0))
    if bits > grid.MAX_BITS:
        return _upward(largest / (2.0 ** (grid.MAX_BITS - 1) - 1.0)), grid.MAX_BITS
    # Down to a float32: the rule holds for what travels. Where this costs the last point, a bit more.
    rounded = float(np.nextafter(np.float32(step), np.float32(0.0)))
    return rounded, bits if largest <= (2.0 ** (bits - 1) - 1.0) * rounded else bits + 1


def parameters(
    x: Vector, snapshot: Vector, *, mode: str, bits: int | None, mu: float, seed: int
) -> tuple[Coded, float]:
    """Q(x) for the way down, and |x - snapshot|^2 for the record."""
    square, largest, farthest = grid.distances(x, snapshot)
    if not math.isfinite(square) or not math.isfinite(largest):
        return Coded(NOTHING, len(x), math.nan), square
    if bits == RAW_BITS:
        return raw(x), square
    centred = mode == "centered"
    reach = farthest if centred else largest
    step, width = (_span(reach, bits), bits) if bits is not None else precision(square, reach, len(x), mu)
    if farthest == 0.0 or step < SMALLEST_STEP:
        return Coded(NOTHING, len(x)), square
    return _on_grid(x, snapshot if centred else None, step, width, seed), square


def difference(alpha: Vector, bits: int, seed: int) -> Coded:
    """Q(alpha) for the way up: step = |alpha|_inf / (2^(b-1) - 1)."""
    if bits == RAW_BITS:
        return raw(alpha)
    step = _span(float(np.abs(alpha).max(initial=0.0)), bits)
    return Coded(NOTHING, len(alpha)) if step < SMALLEST_STEP else _on_grid(alpha, None, step, bits, seed)


def survivors(alpha: Vector, keep: float, seed: int) -> Coded:
    """Coordinate i survives with p_i = keep |a_i| / |a|_inf, as sign(a_i) |a|_inf / keep."""
    largest = float(np.abs(alpha).max(initial=0.0))
    if largest < SMALLEST_STEP:
        return Coded(NOTHING, 0)
    values = torch.from_numpy(np.ascontiguousarray(alpha, np.float32))
    # A hair below 1 / |a|_inf: no entry is certain, so all survivors have one magnitude.
    chance = keep * (1.0 - 2.0**-20) / largest
    _, _, drawn, magnitude = gspar_sample(values, chance, seed)
    signed = drawn.numpy()
    found = torch.from_numpy(signed & np.int32(0x7FFFFFFF))
    code = index_code.encode(found, len(alpha)).numpy()
    signs = np.packbits(signed < 0, bitorder="little")
    return Coded(SPARSE, len(signed), _float32(magnitude), np.concatenate((code, signs)))


def check(coded: Coded, size: int) -> None:
    """Raise `PayloadError` unless this is a vector of length `size`; to be called before any decoding."""
    form = coded.form
    if form not in (NOTHING, SPARSE, RAW) and not 1 <= form <= grid.MAX_BITS:
        raise PayloadError(f"a vector has the unknown form {form}")
    wanted = coded.entries <= size if form == SPARSE else coded.entries == size or form == NOTHING
    if coded.entries < 0 or not wanted:
        raise PayloadError(f"a vector of {coded.entries} entries came where {size} are expected")
    expected = payload_bytes(form, coded.entries, size)
    if len(coded.payload) != expected:
        raise PayloadError(f"a vector of {size} has {len(coded.payload)} bytes, expected {expected}")
    if form not in (NOTHING, RAW) and not (0.0 < coded.scale < math.inf):
        raise PayloadError(f"a vector has the scale {coded.scale}")


def decode(coded: Coded, out: Vector, centre: Vector | None = None) -> None:
    """Write the vector into `out`, on top of `centre` if it was coded against one. Checked first."""
    check(coded, len(out))
    payload = coded.payload
    if coded.form == NOTHING:
        out[:] = 0.0 if centre is None else centre
    elif coded.form == RAW:
        out[:] = payload.view(np.float32) if payload.ctypes.data % 4 == 0 else payload.copy().view(np.float32)
    elif coded.form == SPARSE:
        out[:] = 0.0
        cut = index_code.code_bytes(len(out), coded.entries)
        found = index_code.decode(torch.from_numpy(payload[:cut].copy()), len(out), coded.entries).numpy()
        if coded.entries and not (
            found[0] >= 0 and found[-1] < len(out) and bool((np.diff(found) > 0).all())
        ):
            raise PayloadError(f"a vector of {len(out)} has indices that do not ascend within it")
        signs = np.unpackbits(payload[cut:], count=coded.entries, bitorder="little")
        out[found] = np.where(signs, -coded.scale, coded.scale)
    else:
        grid.decode(payload, out[:0] if centre is None else centre, coded.scale, coded.form, out)
    if coded.form == RAW and not bool(np.isfinite(out).all()):
        raise PayloadError("a vector in float32 has entries that are not finite")


def _on_grid(x: Vector, centre: Vector | None, step: float, bits: int, seed: int) -> Coded:
    key_a, key_b = keys(seed)
    packed: Bytes = np.empty(-(-bits * len(x) // 8), np.uint8)
    grid.encode(
        x, x[:0] if centre is None else centre, step, bits, np.uint32(key_a), np.uint32(key_b), packed
    )
    return Coded(bits, len(x), step, packed)


def _span(largest: float, bits: int) -> float:
    return _upward(largest / (2.0 ** (bits - 1) - 1.0))


def _upward(step: float) -> float:
    """The next float32, upward: the largest value must not be clipped."""
    return float(np.nextafter(np.float32(step), np.float32(np.inf)))


def _float32(value: float) -> float:
    return float(np.float32(value))
