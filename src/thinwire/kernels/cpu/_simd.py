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

LANES = 64

_MASK = ir.IntType(LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_BITS = ir.VectorType(ir.IntType(1), LANES)


def _pointer(context, builder, array_type, array, offset, vector):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(cgutils.gep_inbounds(builder, data, offset), vector.as_pointer())


def _load(context, builder, array_type, array, offset, vector):
    return builder.load(_pointer(context, builder, array_type, array, offset, vector), align=4)


def _splat(builder, scalar, vector):
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _constant(vector, value):
    return ir.Constant(vector, [value] * LANES)


@intrinsic
def above64(typingctx, array, offset, bits):
    """above64(float32 array, offset, int32 bits) -> uint64: lane j is set if |array[offset + j]| > bits.

    Magnitudes compare as integers: NaN is above everything.
    """

    def codegen(context, builder, signature, args):
        lanes = _load(context, builder, signature.args[0], args[0], args[1], _INTS)
        magnitude = builder.and_(lanes, _constant(_INTS, 0x7FFFFFFF))
        above = builder.icmp_signed(">", magnitude, _splat(builder, args[2], _INTS))
        return builder.bitcast(above, _MASK)

    return types.uint64(array, types.intp, types.int32), codegen


@intrinsic
def equal64(typingctx, array, offset, bits):
    """equal64(float32 array, offset, int32 bits) -> uint64: lane j is set if |array[offset + j]| == bits."""

    def codegen(context, builder, signature, args):
        lanes = _load(context, builder, signature.args[0], args[0], args[1], _INTS)
        magnitude = builder.and_(lanes, _constant(_INTS, 0x7FFFFFFF))
        equal = builder.icmp_signed("==", magnitude, _splat(builder, args[2], _INTS))
        return builder.bitcast(equal, _MASK)

    return types.uint64(array, types.intp, types.int32), codegen


def _above(builder, floats, bits):
    magnitude = builder.and_(builder.bitcast(floats, _INTS), _constant(_INTS, 0x7FFFFFFF))
    return builder.bitcast(builder.icmp_signed(">", magnitude, _splat(builder, bits, _INTS)), _MASK)


@intrinsic
def sum_above64(typingctx, first, second, offset, bits):
    """sum_above64(float32 array, float32 array, offset, int32 bits) -> uint64: `above64` of the sum."""

    def codegen(context, builder, signature, args):
        a = _load(context, builder, signature.args[0], args[0], args[2], _FLOATS)
        b = _load(context, builder, signature.args[1], args[1], args[2], _FLOATS)
        return _above(builder, builder.fadd(a, b), args[3])

    return types.uint64(first, second, types.intp, types.int32), codegen


@intrinsic
def accumulate64(typingctx, residual, grad, offset, bits):
    """accumulate64(residual, grad, offset, int32 bits) -> uint64: residual += grad, `above64` of the sum."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], args[0], args[2], _FLOATS)
        g = _load(context, builder, signature.args[1], args[1], args[2], _FLOATS)
        total = builder.fadd(builder.load(pointer, align=4), g)
        builder.store(total, pointer, align=4)
        return _above(builder, total, args[3])

    return types.uint64(residual, grad, types.intp, types.int32), codegen


@intrinsic
def accumulate_keeping64(typingctx, residual, grad, undo, offset, bits):
    """`accumulate64` that writes the old residual to `undo`, which may be `grad`."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], args[0], args[3], _FLOATS)
        g = _load(context, builder, signature.args[1], args[1], args[3], _FLOATS)
        old = builder.load(pointer, align=4)
        total = builder.fadd(old, g)
        builder.store(total, pointer, align=4)
        keep = _pointer(context, builder, signature.args[2], args[2], args[3], _FLOATS)
        builder.store(old, keep, align=4)
        return _above(builder, total, args[4])

    return types.uint64(residual, grad, undo, types.intp, types.int32), codegen


@intrinsic
def nonnegative64(typingctx, array, offset):
    """nonnegative64(float32 array, offset) -> uint64: lane j is set if array[offset + j] >= 0."""

    def codegen(context, builder, signature, args):
        lanes = _load(context, builder, signature.args[0], args[0], args[1], _FLOATS)
        return builder.bitcast(builder.fcmp_ordered(">=", lanes, _constant(_FLOATS, 0.0)), _MASK)

    return types.uint64(array, types.intp), codegen


@intrinsic
def add_choice64(typingctx, array, offset, mask, plus, minus):
    """add_choice64(array, offset, uint64, float32, float32): add `plus` where set, `minus` elsewhere."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _FLOATS)
        chosen = builder.select(
            builder.bitcast(args[2], _BITS),
            _splat(builder, args[3], _FLOATS),
            _splat(builder, args[4], _FLOATS),
        )
        builder.store(builder.fadd(builder.load(pointer, align=4), chosen), pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64, types.float32, types.float32), codegen


@intrinsic
def add_signed64(typingctx, target, at, source, offset, mask):
    """add_signed64(target, at, source, offset, uint64): target += source, negated where unset."""

    def codegen(context, builder, signature, args):
        lanes = _load(context, builder, signature.args[2], args[2], args[3], _FLOATS)
        signed = builder.select(builder.bitcast(args[4], _BITS), lanes, builder.fneg(lanes))
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _FLOATS)
        builder.store(builder.fadd(builder.load(pointer, align=4), signed), pointer, align=4)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, types.uint64), codegen


@intrinsic
def copy_signed64(typingctx, target, at, source, offset, mask):
    """copy_signed64(target, at, source, offset, uint64): target = source, negated where unset."""

    def codegen(context, builder, signature, args):
        lanes = _load(context, builder, signature.args[2], args[2], args[3], _FLOATS)
        signed = builder.select(builder.bitcast(args[4], _BITS), lanes, builder.fneg(lanes))
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _FLOATS)
        builder.store(signed, pointer, align=4)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, types.uint64), codegen


def _interleave(builder, first, second):
    """first[0], second[0], first[1], ..."""
    n = first.type.count
    order = [j // 2 + (j % 2) * n for j in range(2 * n)]
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(ir.IntType(32), 2 * n), order))


def _unpacked(builder, pointer, bits):
    """64 codes of 2, 4 or 8 bits as bytes."""
    byte = ir.VectorType(ir.IntType(8), 8 * bits)
    packed = builder.load(builder.bitcast(pointer, byte.as_pointer()), align=1)
    parts = [packed]
    for width in (4, 2):
        if bits <= width:
            mask = ir.Constant(byte, [(1 << width) - 1] * byte.count)
            amount = ir.Constant(byte, [width] * byte.count)
            parts = [
                half
                for part in parts
                for half in (builder.and_(part, mask), builder.and_(builder.lshr(part, amount), mask))
            ]
    if bits == 2:  # parts hold bits 0-1, 2-3, 4-5, 6-7
        return _interleave(
            builder, _interleave(builder, parts[0], parts[2]), _interleave(builder, parts[1], parts[3])
        )
    return parts[0] if bits == 8 else _interleave(builder, *parts)


def _centred(builder, codes, bits):
    """code - s as floats; as bytes where that fits, which is a quarter of the work."""
    s = (1 << (bits - 1)) - 1
    if bits == 8:
        return builder.fsub(builder.uitofp(codes, _FLOATS), _constant(_FLOATS, float(s)))
    return builder.sitofp(builder.sub(codes, _constant(codes.type, s)), _FLOATS)


def _packed(builder, codes, bits):
    """64 codes, held as bytes, as 8 * bits bytes."""
    width = bits
    while width < 8:
        n = codes.type.count // 2
        index = ir.VectorType(ir.IntType(32), n)
        even = builder.shuffle_vector(codes, codes, ir.Constant(index, list(range(0, 2 * n, 2))))
        odd = builder.shuffle_vector(codes, codes, ir.Constant(index, list(range(1, 2 * n, 2))))
        codes = builder.or_(even, builder.shl(odd, ir.Constant(even.type, [width] * n)))
        width *= 2
    return codes


def _encode_difference64(bits):
    """An intrinsic (grad, last, at, radius, inverse, top, packed, byte) for LAQ's codes of 64 entries."""

    @intrinsic
    def encode_difference64(typingctx, grad, last, at, radius, inverse, top, packed, byte):
        def codegen(context, builder, signature, args):
            g = _load(context, builder, signature.args[0], args[0], args[2], _FLOATS)
            q = _load(context, builder, signature.args[1], args[1], args[2], _FLOATS)
            shifted = builder.fadd(builder.fsub(g, q), _splat(builder, args[3], _FLOATS))
            level = builder.fmul(shifted, _splat(builder, args[4], _FLOATS))
            level = builder.fadd(level, _constant(_FLOATS, 0.5))
            most = _splat(builder, args[5], _FLOATS)
            level = builder.select(builder.fcmp_ordered("<", level, most), level, most)
            codes = builder.trunc(builder.fptosi(level, _INTS), ir.VectorType(ir.IntType(8), LANES))
            code = _packed(builder, codes, bits)
            data = context.make_array(signature.args[6])(context, builder, args[6]).data
            target = builder.bitcast(cgutils.gep_inbounds(builder, data, args[7]), code.type.as_pointer())
            builder.store(code, target, align=1)
            return context.get_dummy_value()

        f, p = types.float32, types.intp
        return types.void(grad, last, p, f, f, f, packed, p), codegen

    return encode_difference64


encode_difference64_1bit = _encode_difference64(1)
encode_difference64_2bit = _encode_difference64(2)
encode_difference64_4bit = _encode_difference64(4)
encode_difference64_8bit = _encode_difference64(8)


def _sum_decoded64(bits):
    """An intrinsic (out, at, addresses, byte offset, steps, workers): out = sum of (code - s) * step."""

    @intrinsic
    def sum_decoded64(typingctx, out, at, packed, offset, steps, workers):
        def codegen(context, builder, signature, args):
            addresses = context.make_array(signature.args[2])(context, builder, args[2]).data
            factors = context.make_array(signature.args[4])(context, builder, args[4]).data
            total = cgutils.alloca_once_value(builder, _constant(_FLOATS, 0.0))
            with cgutils.for_range(builder, args[5]) as loop:
                address = builder.load(cgutils.gep_inbounds(builder, addresses, loop.index))
                step = _splat(
                    builder, builder.load(cgutils.gep_inbounds(builder, factors, loop.index)), _FLOATS
                )
                pointer = builder.inttoptr(builder.add(address, args[3]), ir.IntType(8).as_pointer())
                if bits == 1:
                    mask = builder.load(builder.bitcast(pointer, _MASK.as_pointer()), align=1)
                    value = builder.select(builder.bitcast(mask, _BITS), step, builder.fneg(step))
                else:
                    value = builder.fmul(_centred(builder, _unpacked(builder, pointer, bits), bits), step)
                builder.store(builder.fadd(builder.load(total), value), total)
            target = _pointer(context, builder, signature.args[0], args[0], args[1], _FLOATS)
            builder.store(builder.load(total), target, align=4)
            return context.get_dummy_value()

        return types.void(out, types.intp, packed, types.intp, steps, types.intp), codegen

    return sum_decoded64


sum_decoded64_1bit = _sum_decoded64(1)
sum_decoded64_2bit = _sum_decoded64(2)
sum_decoded64_4bit = _sum_decoded64(4)
sum_decoded64_8bit = _sum_decoded64(8)


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
