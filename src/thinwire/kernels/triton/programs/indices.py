# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
"""Programs that write and read index codes, bit by bit.

Codes are written as 32-bit words with the lowest byte first, the order of all devices that Triton knows.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.programs.numbers import number_of, place_of, tile


@triton.jit
def set_bits(words, position, field, inside):
    """Put a field of up to 32 bits at a bit position; words begin as zeros."""
    shift = (position & 31).to(tl.uint64)
    wide = field.to(tl.uint64) << shift
    word = words + (position >> 5)
    tl.atomic_or(word, wide.to(tl.uint32).to(tl.int32, bitcast=True), mask=inside)
    rest = (wide >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(word + 1, rest, mask=inside & (rest != 0))


@triton.jit
def bits_at(code, position, width, end, inside):
    """A field of up to 32 bits, from bytes that end at `end`."""
    byte = position >> 3
    held = tl.load(code + byte, mask=inside & (byte < end), other=0).to(tl.uint64)
    for j in tl.static_range(1, 5):
        more = tl.load(code + byte + j, mask=inside & (byte + j < end), other=0).to(tl.uint64)
        held = held | (more << (8 * j))
    held = held >> (position & 7).to(tl.uint64)
    return held.to(tl.int64) & ((tl.zeros_like(position) + 1 << width) - 1)


@triton.jit(do_not_specialize=["low", "unary"])
def write_elias_fano(indices, k, low, unary, words, BLOCK: tl.constexpr):
    """Low bits from the first bit on, a one per index from the bit `unary` on; low = 0 makes no low bits.

    A bitmap is the code where the position in the list is not added: see `write_bitmap`.
    """
    at = tile(BLOCK)
    inside = at < k
    index = tl.load(indices + at, mask=inside, other=0).to(tl.int64)
    field = index & ((tl.zeros_like(index) + 1 << low) - 1)
    set_bits(words, at * low, field, inside & (field != 0))
    set_bits(words, unary + (index >> low) + at, tl.zeros_like(index) + 1, inside)


@triton.jit
def write_bitmap(indices, k, words, BLOCK: tl.constexpr):
    at = tile(BLOCK)
    inside = at < k
    index = tl.load(indices + at, mask=inside, other=0).to(tl.int64)
    set_bits(words, index, tl.zeros_like(index) + 1, inside)


@triton.jit(do_not_specialize=["low"])
def rice_steps(marked, k, low, steps, BLOCK: tl.constexpr):
    """The bits that each index takes in the unary part."""
    at = tile(BLOCK)
    inside = at < k
    index = (tl.load(marked + at, mask=inside, other=0) & 0x7FFFFFFF).to(tl.int64)
    first = inside & (at > 0)
    before = (tl.load(marked + at - 1, mask=first, other=0) & 0x7FFFFFFF).to(tl.int64)
    gap = index - tl.where(first, before + 1, 0)
    tl.store(steps + at, (gap >> low) + 1, mask=inside)


@triton.jit(do_not_specialize=["low", "signed", "unary"])
def write_rice(marked, k, low, signed, unary, ends, words, BLOCK: tl.constexpr):
    """`ends`: the bits of the unary part up to and with each index."""
    at = tile(BLOCK)
    inside = at < k
    value = tl.load(marked + at, mask=inside, other=0)
    first = inside & (at > 0)
    before = (tl.load(marked + at - 1, mask=first, other=0) & 0x7FFFFFFF).to(tl.int64)
    gap = (value & 0x7FFFFFFF).to(tl.int64) - tl.where(first, before + 1, 0)
    field = gap & ((tl.zeros_like(gap) + 1 << low) - 1)
    field = field | ((value < 0).to(tl.int64) * signed << low)
    set_bits(words, at * (low + signed), field, inside & (field != 0))
    end = tl.load(ends + at, mask=inside, other=1)
    set_bits(words, unary + end - 1, tl.zeros_like(gap) + 1, inside)


@triton.jit
def bits_of(code, length, BLOCK: tl.constexpr):
    """The positions of a tile of bits, and which of them are set."""
    at = tile(BLOCK)
    byte = tl.load(code + (at >> 3), mask=(at >> 3) < length, other=0).to(tl.int32)
    return at, ((byte >> (at & 7).to(tl.int32)) & 1) != 0


@triton.jit
def count_bits(code, length, counts, BLOCK: tl.constexpr):
    _, ones = bits_of(code, length, BLOCK)
    tl.store(counts + tl.program_id(0), number_of(ones))


@triton.jit
def write_positions(code, length, before, k, positions, BLOCK: tl.constexpr):
    """The positions of the set bits, as many as there is room for; `before` counts those of earlier tiles."""
    at, ones = bits_of(code, length, BLOCK)
    to = tl.load(before + tl.program_id(0)) + place_of(ones)
    tl.store(positions + to, at, mask=ones & (to < k))


@triton.jit(do_not_specialize=["low"])
def read_elias_fano(code, length, before, plain, plain_length, k, low, wrong, out, BLOCK: tl.constexpr):
    """Indices from the set bits of the unary part and their low bits; `wrong` is set if one exceeds int32."""
    at, ones = bits_of(code, length, BLOCK)
    to = (tl.load(before + tl.program_id(0)) + place_of(ones)).to(tl.int64)
    kept = ones & (to < k)
    index = ((at - to) << low) | bits_at(plain, to * low, low, plain_length, kept)
    beyond = kept & (index > 0x7FFFFFFF)
    tl.store(out + to, index.to(tl.int32), mask=kept)
    tl.atomic_max(wrong, tl.max(beyond.to(tl.int32), 0))


@triton.jit(do_not_specialize=["low", "signed"])
def rice_gaps(positions, plain, plain_length, k, n, low, signed, wrong, steps, BLOCK: tl.constexpr):
    """How far each index is behind the one before it; `wrong` is set for a gap that does not fit into n."""
    at = tile(BLOCK)
    inside = at < k
    first = inside & (at > 0)
    before = tl.load(positions + at - 1, mask=first, other=-1)
    high = tl.load(positions + at, mask=inside, other=0) - before - 1
    field = bits_at(plain, at * (low + signed), low, plain_length, inside)
    fits = (high >= 0) & (high <= (n >> low))
    tl.store(steps + at, tl.where(fits, (high << low | field) + 1, 0), mask=inside)
    tl.atomic_max(wrong, tl.max((inside & (fits == 0)).to(tl.int32), 0))


@triton.jit(do_not_specialize=["low", "signed"])
def read_rice(ends, plain, plain_length, k, n, low, signed, wrong, out, BLOCK: tl.constexpr):
    """`ends`: each index + 1."""
    at = tile(BLOCK)
    inside = at < k
    index = tl.load(ends + at, mask=inside, other=1) - 1
    sign = bits_at(plain, at * (low + signed) + low, signed, plain_length, inside)
    tl.store(out + at, (index - (sign << 31)).to(tl.int32), mask=inside)
    tl.atomic_max(wrong, tl.max((inside & (index >= n)).to(tl.int32), 0))
