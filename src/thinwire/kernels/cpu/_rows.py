# pyright: basic
# Numba's intrinsics are built from untyped LLVM objects; the signatures below are what callers rely on.
"""Products of a sparse row with a matrix of a few columns, with all sums in registers.

None checks bounds: the caller makes sure that `width` entries exist at every offset.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from thinwire.kernels.cpu._lanes import constant, lanes_at, load, splat

WIDTHS = (4, 8, 12, 16)


def _entry(context, builder, signature, args, array, position):
    """The entry of the array with this number among the arguments."""
    data = context.make_array(signature.args[array])(context, builder, args[array]).data
    return builder.load(cgutils.gep_inbounds(builder, data, position))


def _column(context, builder, signature, args, array, position, stride, offset):
    """Where in a matrix, flat by rows of `stride` entries, the row of this entry's column begins."""
    column = builder.sext(_entry(context, builder, signature, args, array, position), stride.type)
    return builder.add(builder.mul(column, stride), offset)


def row_product(width) -> Any:
    """An intrinsic (scores, at, matrix, stride, offset, columns, values, begin, end).

    scores[at:at + width] = the sum of values[e] * matrix[columns[e] * stride + offset:][:width].
    """
    doubles = ir.VectorType(ir.DoubleType(), width)

    @intrinsic
    def product(typingctx, scores, at, matrix, stride, offset, columns, values, begin, end):
        def codegen(context, builder, signature, args):
            _, _, _, step, first, _, _, start, stop = args
            # Two sums take turns: each waits for its own last addition only.
            sums = [cgutils.alloca_once_value(builder, constant(doubles, 0.0)) for _ in range(2)]

            def add(position, total):
                at_row = _column(context, builder, signature, args, 5, position, step, first)
                lanes = load(context, builder, signature.args[2], args[2], at_row, doubles)
                value = splat(builder, _entry(context, builder, signature, args, 6, position), doubles)
                scaled = builder.fmul(lanes, value, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), scaled, flags=("contract",)), total)

            one = ir.Constant(start.type, 1)
            pairs = builder.ashr(builder.sub(stop, start), one)
            with cgutils.for_range(builder, pairs) as loop:
                position = builder.add(start, builder.shl(loop.index, one))
                add(position, sums[0])
                add(builder.add(position, one), sums[1])
            odd = builder.and_(builder.sub(stop, start), one)
            with builder.if_then(builder.icmp_signed("==", odd, one)):
                add(builder.sub(stop, one), sums[0])
            whole = builder.fadd(builder.load(sums[0]), builder.load(sums[1]))
            builder.store(
                whole, lanes_at(context, builder, signature.args[0], args[0], args[1], doubles), align=8
            )
            return context.get_dummy_value()

        counts = types.intp, types.intp, columns, values, types.intp, types.intp
        return types.void(scores, types.intp, matrix, *counts), codegen

    return product


def row_update(width) -> Any:
    """An intrinsic (matrix, stride, offset, scores, at, columns, values, begin, end).

    matrix[columns[e] * stride + offset:][:width] += values[e] * scores[at:at + width], for every entry.
    """
    doubles = ir.VectorType(ir.DoubleType(), width)

    @intrinsic
    def update(typingctx, matrix, stride, offset, scores, at, columns, values, begin, end):
        def codegen(context, builder, signature, args):
            _, step, first, _, _, _, _, start, stop = args
            lanes = load(context, builder, signature.args[3], args[3], args[4], doubles)
            with cgutils.for_range(builder, builder.sub(stop, start)) as loop:
                position = builder.add(start, loop.index)
                at_row = _column(context, builder, signature, args, 5, position, step, first)
                pointer = lanes_at(context, builder, signature.args[0], args[0], at_row, doubles)
                value = splat(builder, _entry(context, builder, signature, args, 6, position), doubles)
                scaled = builder.fmul(lanes, value, flags=("contract",))
                total = builder.fadd(builder.load(pointer, align=8), scaled, flags=("contract",))
                builder.store(total, pointer, align=8)
            return context.get_dummy_value()

        counts = types.intp, columns, values, types.intp, types.intp
        return types.void(matrix, types.intp, types.intp, scores, *counts), codegen

    return update


product4, product8, product12, product16 = map(row_product, WIDTHS)
update4, update8, update12, update16 = map(row_update, WIDTHS)
