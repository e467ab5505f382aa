# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
"""What several programs share: magnitudes as integers, sums of two tensors, the counter-based generator."""

import triton
import triton.language as tl

from thinwire.kernels import generator

MIX_A = tl.constexpr(generator.MIX_A)
MIX_B = tl.constexpr(generator.MIX_B)
SPLIT_A = tl.constexpr(generator.SPLIT_A)
SPLIT_B = tl.constexpr(generator.SPLIT_B)


@triton.jit
def tile(BLOCK: tl.constexpr):
    """The positions of this program's entries; 64 bits, since the last ones may lie beyond 2^31."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def magnitude(v):
    """An integer that orders like |v|, with NaN above infinity."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def loaded(x, grad, at, inside):
    """x, or x + grad, in float32."""
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if grad is not None:
        v = v + tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    return v


@triton.jit
def number_of(flags):
    return tl.sum(flags.to(tl.int32), 0)


@triton.jit
def place_of(flags):
    """How many flags are set before each one."""
    ones = flags.to(tl.int32)
    return tl.cumsum(ones, 0) - ones


@triton.jit
def word(position, key_a, key_b):
    """`thinwire.kernels.generator.words`, one 32-bit word per position; the keys come as int32 bits."""
    h = position.to(tl.uint32) + key_a.to(tl.uint32, bitcast=True)
    h = h ^ (h >> 16)
    h = h * MIX_A
    h = h ^ (h >> 15) ^ key_b.to(tl.uint32, bitcast=True)
    h = h * MIX_B
    return h ^ (h >> 16)


@triton.jit
def mix64(value):
    """The splitmix64 finaliser of uint64."""
    value = (value ^ (value >> 30)) * SPLIT_A
    value = (value ^ (value >> 27)) * SPLIT_B
    return value ^ (value >> 31)


@triton.jit
def joined64(low, high):
    """A uint64 from the int32 bits of its halves."""
    return (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(
        tl.uint64
    )
