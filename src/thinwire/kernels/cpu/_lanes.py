# pyright: basic
"""What the intrinsics are built from: vectors of 64 lanes, in memory and out of one number."""

from llvmlite import ir
from numba.core import cgutils

LANES = 64

MASK = ir.IntType(LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
BITS = ir.VectorType(ir.IntType(1), LANES)


def lanes_at(context, builder, array_type, array, offset, vector):
    """A pointer to a vector in an array; the offset counts the array's entries."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(cgutils.gep_inbounds(builder, data, offset), vector.as_pointer())


def load(context, builder, array_type, array, offset, vector):
    return builder.load(lanes_at(context, builder, array_type, array, offset, vector), align=4)


def shuffled(builder, first, second, order):
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
    return builder.shuffle_vector(first, second, lanes)


def splat(builder, scalar, vector):
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return shuffled(builder, one, ir.Constant(vector, ir.Undefined), [0] * vector.count)


def constant(vector, value):
    return ir.Constant(vector, [value] * vector.count)
