# pyright: basic
# Numba's intrinsics are built from untyped LLVM objects; the signatures in the stub are what callers rely on.
"""Butterflies of the Walsh-Hadamard transform on vectors of eight lanes.

Additions only, each in a fixed order: every processor computes the same bits.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from thinwire.kernels.cpu._lanes import lanes_at, shuffled, splat

WIDTH = 8
FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
INTS = ir.VectorType(ir.IntType(32), WIDTH)
_SIGN = -(2**31)


def _flipped(builder, lanes, signs):
    """The lanes, negated where the integers have their highest bit set."""
    return builder.bitcast(builder.xor(builder.bitcast(lanes, INTS), signs), FLOATS)


def _across(builder, rows, half):
    """Sums and differences of whole vectors that are `half` apart."""
    out = list(rows)
    for low in range(len(rows)):
        if not low & half:
            a, b = rows[low], rows[low | half]
            out[low], out[low | half] = builder.fadd(a, b), builder.fsub(a, b)
    return out


def _within(builder, rows, half):
    """Sums and differences of lanes that are `half` apart: the neighbour's lane plus the own one, signed."""
    partner = [lane ^ half for lane in range(WIDTH)]
    minus = ir.Constant(INTS, [_SIGN if lane & half else 0 for lane in range(WIDTH)])
    return [builder.fadd(shuffled(builder, row, row, partner), _flipped(builder, row, minus)) for row in rows]


def _signed(builder, rows, signs):
    """Vector j, negated by the bits 8 j .. 8 j + 7."""
    shifts = ir.Constant(INTS, [31 - lane for lane in range(WIDTH)])
    top = ir.Constant(INTS, [_SIGN] * WIDTH)
    out = []
    for j, row in enumerate(rows):
        byte = builder.trunc(builder.lshr(signs, ir.Constant(ir.IntType(64), WIDTH * j)), ir.IntType(32))
        bits = builder.and_(builder.shl(splat(builder, byte, INTS), shifts), top)
        out.append(_flipped(builder, row, bits))
    return out


def _pointers(context, builder, array_type, array, offset, stride, count):
    """To vectors that are `stride` entries apart."""
    places = [builder.add(offset, builder.mul(stride, ir.Constant(offset.type, j))) for j in range(count)]
    return [lanes_at(context, builder, array_type, array, place, FLOATS) for place in places]


def _store(builder, rows, pointers):
    for row, pointer in zip(rows, pointers, strict=True):
        builder.store(row, pointer, align=4)


def _hadamard64(context, builder, signature, args, signed):
    step = ir.Constant(args[1].type, WIDTH)
    pointers = _pointers(context, builder, signature.args[0], args[0], args[1], step, 8)
    rows = [builder.load(pointer, align=4) for pointer in pointers]
    if signed:
        factor = splat(builder, args[5], FLOATS)
        rows = _signed(builder, [builder.fmul(row, factor) for row in rows], args[4])
    for level in (_within, _across):
        for half in (1, 2, 4):
            rows = level(builder, rows, half)
    _store(builder, rows, _pointers(context, builder, signature.args[2], args[2], args[3], step, 8))
    return context.get_dummy_value()


@intrinsic
def hadamard64(typingctx, source, offset, target, at):
    """hadamard64(source, offset, target, at): the transform of 64 entries, not normalised."""

    def codegen(context, builder, signature, args):
        return _hadamard64(context, builder, signature, args, False)

    return types.void(source, types.intp, target, types.intp), codegen


@intrinsic
def signed_hadamard64(typingctx, source, offset, target, at, signs, scale):
    """signed_hadamard64(source, offset, target, at, uint64, scale): of scaled entries, negated where set."""

    def codegen(context, builder, signature, args):
        return _hadamard64(context, builder, signature, args, True)

    return types.void(source, types.intp, target, types.intp, types.uint64, types.float32), codegen


@intrinsic
def flip64(typingctx, array, offset, signs):
    """flip64(array, offset, uint64): negates the entries whose bits are set."""

    def codegen(context, builder, signature, args):
        step = ir.Constant(args[1].type, WIDTH)
        pointers = _pointers(context, builder, signature.args[0], args[0], args[1], step, 8)
        rows = [builder.load(pointer, align=4) for pointer in pointers]
        _store(builder, _signed(builder, rows, args[2]), pointers)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), codegen


def _butterfly(radix):
    """An intrinsic (array, offset, stride): the levels across `radix` vectors that are `stride` apart."""

    @intrinsic
    def butterfly(typingctx, array, offset, stride):
        def codegen(context, builder, signature, args):
            pointers = _pointers(context, builder, signature.args[0], args[0], args[1], args[2], radix)
            rows = [builder.load(pointer, align=4) for pointer in pointers]
            for half in (1, 2, 4):
                if half < radix:
                    rows = _across(builder, rows, half)
            _store(builder, rows, pointers)
            return context.get_dummy_value()

        return types.void(array, types.intp, types.intp), codegen

    return butterfly


butterfly2, butterfly4, butterfly8 = _butterfly(2), _butterfly(4), _butterfly(8)
