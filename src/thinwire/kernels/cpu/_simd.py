# pyright: basic
# Numba's intrinsics are built from untyped LLVM objects; the signatures below are what callers rely on.
"""Sixty-four lanes at a time, for what Numba's loops do not vectorise: bit masks of comparisons, and back.

The operations are written as generic LLVM vectors, so any processor can run them; none checks bounds: the
caller makes sure that 64 entries exist at the given offset.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from thinwire.kernels.cpu._lanes import (
    BITS,
    FLOATS,
    INTS,
    LANES,
    MASK,
    constant,
    lanes_at,
    load,
    shuffled,
    splat,
)


def _magnitude(builder, floats):
    return builder.and_(builder.bitcast(floats, INTS), constant(INTS, 0x7FFFFFFF))


def _above(builder, floats, bits):
    above = builder.icmp_signed(">", _magnitude(builder, floats), splat(builder, bits, INTS))
    return builder.bitcast(above, MASK)


@intrinsic
def above64(typingctx, array, offset, bits):
    """above64(float32 array, offset, int32 bits) -> uint64: lane j is set if |array[offset + j]| > bits.

    Magnitudes compare as integers: NaN is above everything.
    """

    def codegen(context, builder, signature, args):
        return _above(builder, load(context, builder, signature.args[0], args[0], args[1], FLOATS), args[2])

    return types.uint64(array, types.intp, types.int32), codegen


@intrinsic
def equal64(typingctx, array, offset, bits):
    """equal64(float32 array, offset, int32 bits) -> uint64: lane j is set if |array[offset + j]| == bits."""

    def codegen(context, builder, signature, args):
        lanes = load(context, builder, signature.args[0], args[0], args[1], FLOATS)
        equal = builder.icmp_signed("==", _magnitude(builder, lanes), splat(builder, args[2], INTS))
        return builder.bitcast(equal, MASK)

    return types.uint64(array, types.intp, types.int32), codegen


@intrinsic
def sum_above64(typingctx, first, second, offset, bits):
    """sum_above64(float32 array, float32 array, offset, int32 bits) -> uint64: `above64` of the sum."""

    def codegen(context, builder, signature, args):
        a = load(context, builder, signature.args[0], args[0], args[2], FLOATS)
        b = load(context, builder, signature.args[1], args[1], args[2], FLOATS)
        return _above(builder, builder.fadd(a, b), args[3])

    return types.uint64(first, second, types.intp, types.int32), codegen


@intrinsic
def accumulate64(typingctx, residual, grad, undo, offset, bits):
    """accumulate64(residual, grad, undo, offset, int32 bits) -> uint64: residual += grad, and its `above64`.

    The old residual goes to `undo`, which may be `grad`, or None.
    """

    def codegen(context, builder, signature, args):
        pointer = lanes_at(context, builder, signature.args[0], args[0], args[3], FLOATS)
        g = load(context, builder, signature.args[1], args[1], args[3], FLOATS)
        old = builder.load(pointer, align=4)
        total = builder.fadd(old, g)
        builder.store(total, pointer, align=4)
        if undo is not types.none:
            to = lanes_at(context, builder, signature.args[2], args[2], args[3], FLOATS)
            builder.store(old, to, align=4)
        return _above(builder, total, args[4])

    return types.uint64(residual, grad, undo, types.intp, types.int32), codegen


@intrinsic
def nonnegative64(typingctx, array, offset):
    """nonnegative64(float32 array, offset) -> uint64: lane j is set if array[offset + j] >= 0."""

    def codegen(context, builder, signature, args):
        lanes = load(context, builder, signature.args[0], args[0], args[1], FLOATS)
        return builder.bitcast(builder.fcmp_ordered(">=", lanes, constant(FLOATS, 0.0)), MASK)

    return types.uint64(array, types.intp), codegen


def _signed_sums64(pack):
    """An intrinsic (x, blocks, row, words) over the first 64 * blocks entries of x.

    Adds (sum of the entries >= 0, sum of the others, how many are >= 0) to the float64 row, in an order that
    depends on nothing else; with `pack` the masks go to the uint64 words.
    """
    doubles = ir.VectorType(ir.DoubleType(), 16)
    floats = ir.VectorType(ir.FloatType(), 16)
    zero = constant(floats, 0.0)

    @intrinsic
    def signed_sums64(typingctx, x, blocks, row, words):
        def codegen(context, builder, signature, args):
            totals = [cgutils.alloca_once_value(builder, constant(doubles, 0.0)) for _ in range(2)]
            count = cgutils.alloca_once_value(builder, ir.Constant(MASK, 0))
            with cgutils.for_range(builder, args[1]) as loop:
                at = builder.mul(loop.index, ir.Constant(loop.index.type, LANES))
                lanes = load(context, builder, signature.args[0], args[0], at, FLOATS)
                positive = builder.fcmp_ordered(">=", lanes, constant(FLOATS, 0.0))
                mask = builder.bitcast(positive, MASK)
                for first in range(0, LANES, 16):
                    part = shuffled(builder, lanes, lanes, list(range(first, first + 16)))
                    plus = builder.fcmp_ordered(">=", part, zero)
                    chosen = builder.select(plus, part, zero), builder.select(plus, zero, part)
                    for total, values in zip(totals, chosen, strict=True):
                        wide = builder.fpext(values, doubles)
                        builder.store(builder.fadd(builder.load(total), wide), total)
                builder.store(builder.add(builder.load(count), builder.ctpop(mask)), count)
                if pack:
                    data = context.make_array(signature.args[3])(context, builder, args[3]).data
                    builder.store(mask, cgutils.gep_inbounds(builder, data, loop.index))
            kind = ir.FunctionType(ir.DoubleType(), [ir.DoubleType(), doubles])
            reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f64")
            start = ir.Constant(ir.DoubleType(), 0.0)
            sums = [builder.call(reduce, [start, builder.load(total)]) for total in totals]
            sums.append(builder.uitofp(builder.load(count), ir.DoubleType()))
            out = context.make_array(signature.args[2])(context, builder, args[2]).data
            for j, value in enumerate(sums):
                slot = cgutils.gep_inbounds(builder, out, ir.Constant(ir.IntType(32), j))
                builder.store(builder.fadd(builder.load(slot), value), slot)
            return context.get_dummy_value()

        return types.void(x, types.intp, row, words), codegen

    return signed_sums64


signed_sums64 = _signed_sums64(pack=False)
signed_sums_pack64 = _signed_sums64(pack=True)


@intrinsic
def add_choice64(typingctx, array, offset, mask, plus, minus):
    """add_choice64(array, offset, uint64, float32, float32): add `plus` where set, `minus` elsewhere."""

    def codegen(context, builder, signature, args):
        pointer = lanes_at(context, builder, signature.args[0], args[0], args[1], FLOATS)
        chosen = builder.select(
            builder.bitcast(args[2], BITS),
            splat(builder, args[3], FLOATS),
            splat(builder, args[4], FLOATS),
        )
        builder.store(builder.fadd(builder.load(pointer, align=4), chosen), pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64, types.float32, types.float32), codegen


def _signed(context, builder, signature, args):
    """Lanes of the source, negated where the mask is not set, and where they go."""
    lanes = load(context, builder, signature.args[2], args[2], args[3], FLOATS)
    signed = builder.select(builder.bitcast(args[4], BITS), lanes, builder.fneg(lanes))
    return signed, lanes_at(context, builder, signature.args[0], args[0], args[1], FLOATS)


@intrinsic
def add_signed64(typingctx, target, at, source, offset, mask):
    """add_signed64(target, at, source, offset, uint64): target += source, negated where unset."""

    def codegen(context, builder, signature, args):
        signed, pointer = _signed(context, builder, signature, args)
        builder.store(builder.fadd(builder.load(pointer, align=4), signed), pointer, align=4)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, types.uint64), codegen


@intrinsic
def copy_signed64(typingctx, target, at, source, offset, mask):
    """copy_signed64(target, at, source, offset, uint64): target = source, negated where unset."""

    def codegen(context, builder, signature, args):
        signed, pointer = _signed(context, builder, signature, args)
        builder.store(signed, pointer, align=4)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, types.uint64), codegen


@intrinsic
def bits_of(typingctx, value):
    """bits_of(float32) -> int32, the same bits; vectorises inside loops."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def float_of(typingctx, bits):
    """float_of(int32) -> float32, the same bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def lowest_bit(typingctx, mask):
    """lowest_bit(uint64) -> int64: the position of the lowest set bit (64 if there is none)."""

    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), codegen


@intrinsic
def pointer_to(typingctx, address, element):
    """pointer_to(uint64 address, Numba type) -> a pointer for `numba.carray`; the caller keeps the memory."""
    pointer = types.CPointer(element.instance_type)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.uint64, element), codegen
