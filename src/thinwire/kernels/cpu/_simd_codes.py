# pyright: basic
# Numba's intrinsics are built from untyped LLVM objects; the signatures below are what callers rely on.
"""Codes of 1, 2, 4 or 8 bits, 64 entries at a time: from floats to packed bytes and back, in registers.

Like everything in `_simd`, these are generic LLVM vectors and check no bounds. The number of bits is their
first argument and must be a literal: every width is code of its own.
"""

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
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
from thinwire.kernels.generator import MIX_A, MIX_B

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_WORDS = ir.VectorType(_I32, 16)
_SIXTEEN = ir.VectorType(ir.FloatType(), 16)
_HALF = ir.VectorType(_I32, LANES // 2)
_HALF_FLOATS = ir.VectorType(ir.FloatType(), LANES // 2)

# A float of this value has a fraction of whole numbers: a code set into its bits is a code added to it.
_BASE, _BASE_BITS = 2.0**23, 0x4B000000


# Decoding


def _code_words(builder, pointer, bits):
    """64 codes as 16 words of 4 bytes, each byte with a code in its low bits and others above it.

    Narrow codes are loaded repeatedly, and each repetition is shifted to other codes.
    """
    groups = 8 // bits
    count = 16 // groups
    few = ir.VectorType(_I32, count)
    loaded = builder.load(builder.bitcast(pointer, few.as_pointer()), align=1)
    if groups == 1:
        return loaded
    words = shuffled(builder, loaded, loaded, [lane % count for lane in range(16)])
    return builder.lshr(words, ir.Constant(_WORDS, [bits * (lane // count) for lane in range(16)]))


def _in_order(builder, parts, bits):
    """Four vectors, vector b from byte b of all of `_code_words`, as 64 entries in order."""
    groups = 8 // bits
    count = 16 // groups
    # Entry e of a pair of vectors (bytes 0 and 1, or 2 and 3): which vector, which lane.
    pair = []
    for e in range(32):
        word, byte, group = e // (2 * groups), e // groups % 2, e % groups
        pair.append(byte * 16 + group * count + word)
    low = shuffled(builder, parts[0], parts[1], pair)
    high = shuffled(builder, parts[2], parts[3], pair)
    order = []
    for e in range(LANES):
        run, within = e // (2 * groups), e % (2 * groups)
        order.append(run % 2 * 32 + run // 2 * 2 * groups + within)
    return shuffled(builder, low, high, order)


def _decoded(builder, words, bits, step, s):
    """(code - s) * step, as four vectors.

    A code in the second byte of a word counts 256 times as much, which is exact to undo; the processor may do
    it together with the subtraction.
    """
    values = []
    for half in (words, builder.lshr(words, constant(_WORDS, 16))):
        for place in (0, 8):
            code = builder.and_(half, constant(_WORDS, ((1 << bits) - 1) << place))
            lanes = builder.bitcast(builder.or_(code, constant(_WORDS, _BASE_BITS)), _SIXTEEN)
            if place:
                lanes = builder.fmul(lanes, constant(_SIXTEEN, 2.0**-place), flags=("contract",))
            lanes = builder.fsub(lanes, constant(_SIXTEEN, _BASE / 2.0**place + s), flags=("contract",))
            values.append(builder.fmul(lanes, splat(builder, step, _SIXTEEN)))
    return values


def _looked_up(builder, pointer, bits, step, s):
    """(code - s) * step of 2 or 4 bits, from a table in a register, as four vectors of 16 neighbours.

    The processor reads the low 4 bits of an index only, so what lies above a code of 4 bits does no harm;
    for 2 bits the table repeats itself. Each vector of 4-bit codes comes as 0, 8, 1, 9, ...
    """
    entries = ir.Constant(_SIXTEEN, [float(j % (1 << bits) - s) for j in range(16)])
    table = builder.fmul(entries, splat(builder, step, _SIXTEEN))
    chunk = ir.IntType(16 * bits)
    lanes = ir.VectorType(chunk, 32 // bits)
    kind = ir.FunctionType(_SIXTEEN, [_SIXTEEN, _WORDS])
    lookup = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
    values = []
    for part in range(4):
        at = builder.gep(builder.bitcast(pointer, chunk.as_pointer()), [ir.Constant(_I32, part)])
        codes = splat(builder, builder.load(at, align=1), lanes)
        codes = builder.lshr(codes, ir.Constant(lanes, [bits * j for j in range(lanes.count)]))
        values.append(builder.call(lookup, [table, builder.bitcast(codes, _WORDS)]))
    return values


def _lookup_in_order(builder, parts, bits):
    if bits == 4:
        parts = [shuffled(builder, part, part, [*range(0, 16, 2), *range(1, 16, 2)]) for part in parts]
    first, second = (shuffled(builder, a, b, list(range(32))) for a, b in (parts[:2], parts[2:]))
    return shuffled(builder, first, second, list(range(64)))


def has_tables():
    """Whether Numba compiles for a processor that looks 16 floats up at once."""
    features = getattr(config, "CPU_FEATURES")  # noqa: B009 - made at run time
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    return "+avx512f" in features.split(",")


def sum_decoder(tables):
    """An intrinsic (bits, out, at, addresses, byte offset, steps, workers, factor).

    out = factor * sum over workers of (code - s) * step, the same bits with `tables` as without.
    """

    def decoded(builder, pointer, bits, step):
        s = (1 << (bits - 1)) - 1
        if bits == 1:
            plus = splat(builder, step, FLOATS)
            return [_chosen(builder, pointer, plus, builder.fneg(plus))]
        if tables and bits < 8:
            return _looked_up(builder, pointer, bits, step, s)
        return _decoded(builder, _code_words(builder, pointer, bits), bits, step, s)

    def in_order(builder, parts, bits):
        if bits == 1:
            return parts[0]
        return (_lookup_in_order if tables and bits < 8 else _in_order)(builder, parts, bits)

    @intrinsic(prefer_literal=True)
    def sum_decoded64(typingctx, bits, out, at, packed, offset, steps, workers, factor):
        width = bits.literal_value

        def codegen(context, builder, signature, args):
            _, out, at, packed, offset, steps, workers, factor = args
            addresses = context.make_array(signature.args[3])(context, builder, packed).data
            factors = context.make_array(signature.args[5])(context, builder, steps).data
            zeros = [constant(FLOATS, 0.0)] if width == 1 else [constant(_SIXTEEN, 0.0)] * 4
            totals = [cgutils.alloca_once_value(builder, zero) for zero in zeros]
            with cgutils.for_range(builder, workers) as loop:
                address = builder.load(cgutils.gep_inbounds(builder, addresses, loop.index))
                step = builder.load(cgutils.gep_inbounds(builder, factors, loop.index))
                pointer = builder.inttoptr(builder.add(address, offset), _I8.as_pointer())
                for total, value in zip(totals, decoded(builder, pointer, width, step), strict=True):
                    builder.store(builder.fadd(builder.load(total), value), total)
            result = in_order(builder, [builder.load(total) for total in totals], width)
            result = builder.fmul(result, splat(builder, factor, FLOATS))
            target = lanes_at(context, builder, signature.args[1], out, at, FLOATS)
            builder.store(result, target, align=4)
            return context.get_dummy_value()

        p = types.intp
        return types.void(bits, out, p, packed, p, steps, p, types.float32), codegen

    return sum_decoded64


sum_decoded64 = sum_decoder(tables=has_tables())


def _chosen(builder, pointer, plus, minus):
    mask = builder.load(builder.bitcast(pointer, MASK.as_pointer()), align=1)
    return builder.select(builder.bitcast(mask, BITS), plus, minus)


@intrinsic(prefer_literal=True)
def add_decoded64(typingctx, bits, last, at, packed, byte, step, radius):
    """add_decoded64(bits, last, at, packed, byte, step, radius): last += code * step - radius."""
    width = bits.literal_value

    def codegen(context, builder, signature, args):
        _, last, at, packed, byte, step, radius = args
        source = lanes_at(context, builder, signature.args[3], packed, byte, _I8)
        if width == 1:
            value = _chosen(builder, source, splat(builder, step, FLOATS), constant(FLOATS, 0.0))
        else:
            words = _code_words(builder, source, width)
            value = _in_order(builder, _decoded(builder, words, width, step, 0), width)
        move = builder.fsub(value, splat(builder, radius, FLOATS))
        target = lanes_at(context, builder, signature.args[1], last, at, FLOATS)
        builder.store(builder.fadd(builder.load(target, align=4), move), target, align=4)
        return context.get_dummy_value()

    f, p = types.float32, types.intp
    return types.void(bits, last, p, packed, p, f, f), codegen


# Encoding


def _clipped(builder, lanes, low, high):
    lanes = builder.select(builder.fcmp_ordered("<", lanes, high), lanes, high)
    return lanes if low is None else builder.select(builder.fcmp_ordered(">", lanes, low), lanes, low)


def _even_and_odd(builder, lanes):
    return [shuffled(builder, lanes, lanes, list(range(first, LANES, 2))) for first in (0, 1)]


def _packed_pairs(builder, even, odd, bits):
    """The codes of entries 0, 2, ... and 1, 3, ..., a word each, as 8 * bits bytes."""
    pairs = builder.or_(even, builder.shl(odd, constant(_HALF, bits)))
    if bits == 8:
        return builder.trunc(pairs, ir.VectorType(ir.IntType(16), 32))
    packed = builder.trunc(pairs, ir.VectorType(_I8, 32))
    if bits == 2:
        two = ir.VectorType(ir.IntType(16), 16)
        pairs = builder.bitcast(packed, two)
        packed = builder.trunc(
            builder.or_(pairs, builder.lshr(pairs, constant(two, 4))), ir.VectorType(_I8, 16)
        )
    return packed


def _random_words(builder, counter, key):
    """32 consecutive words of the shared generator."""
    h = builder.add(splat(builder, counter, _HALF), ir.Constant(_HALF, list(range(32))))
    h = builder.xor(h, builder.lshr(h, constant(_HALF, 16)))
    h = builder.mul(h, constant(_HALF, MIX_A))
    h = builder.xor(builder.xor(h, builder.lshr(h, constant(_HALF, 15))), splat(builder, key, _HALF))
    h = builder.mul(h, constant(_HALF, MIX_B))
    return builder.xor(h, builder.lshr(h, constant(_HALF, 16)))


def _one_to_two(builder, words):
    """1 + half / 2^16 of the low halves and of the high ones."""
    low = builder.shl(builder.and_(words, constant(_HALF, 0xFFFF)), constant(_HALF, 7))
    high = builder.and_(builder.lshr(words, constant(_HALF, 9)), constant(_HALF, 0xFFFF << 7))
    one = constant(_HALF, 0x3F800000)
    return [builder.bitcast(builder.or_(half, one), _HALF_FLOATS) for half in (low, high)]


@intrinsic(prefer_literal=True)
def encode64(typingctx, bits, x, at, inverse, add, counter, key, packed, byte):
    """encode64(bits, x, at, inverse, add, counter, key, packed, byte): stochastic codes of 64 entries.

    Entries are multiplied by `inverse` and clipped to the grid; `counter` belongs to the first word.
    """
    width = bits.literal_value
    s = float((1 << (width - 1)) - 1) if width > 1 else 1.0

    def codegen(context, builder, signature, args):
        _, x, at, inverse, add, counter, key, packed, byte = args
        lanes = load(context, builder, signature.args[1], x, at, FLOATS)
        lanes = builder.fmul(lanes, splat(builder, inverse, FLOATS))
        lanes = _clipped(builder, lanes, constant(FLOATS, -s), constant(FLOATS, s))
        random = _one_to_two(builder, _random_words(builder, counter, key))
        if width == 1:
            order = [j // 2 + j % 2 * 32 for j in range(LANES)]
            chance = builder.fmul(builder.fadd(lanes, constant(FLOATS, 1.0)), constant(FLOATS, 0.5))
            chance = builder.fadd(chance, splat(builder, add, FLOATS))
            below = builder.fcmp_ordered("<", shuffled(builder, random[0], random[1], order), chance)
            code = builder.bitcast(below, MASK)
        else:
            lanes = builder.fadd(lanes, splat(builder, add, FLOATS))
            even, odd = (
                builder.fptosi(builder.fadd(half, r), _HALF)
                for half, r in zip(_even_and_odd(builder, lanes), random, strict=True)
            )
            code = _packed_pairs(builder, even, odd, width)
        target = lanes_at(context, builder, signature.args[7], packed, byte, code.type)
        builder.store(code, target, align=1)
        return context.get_dummy_value()

    f, p, u = types.float32, types.intp, types.uint32
    return types.void(bits, x, p, f, f, u, u, packed, p), codegen


@intrinsic(prefer_literal=True)
def encode_difference64(typingctx, bits, grad, last, at, radius, step, update, packed, byte):
    """encode_difference64(bits, grad, last, at, radius, step, update, packed, byte): LAQ's codes.

    With `update`, last += code * step - radius at once. The step must not be tiny.
    """
    width = bits.literal_value

    def codegen(context, builder, signature, args):
        _, grad, last, at, radius, step, update, packed, byte = args
        g = load(context, builder, signature.args[1], grad, at, FLOATS)
        state = lanes_at(context, builder, signature.args[2], last, at, FLOATS)
        q = builder.load(state, align=4)
        far = splat(builder, radius, FLOATS)
        inverse = builder.fdiv(ir.Constant(ir.FloatType(), 1.0), step)
        level = builder.fmul(builder.fadd(builder.fsub(g, q), far), splat(builder, inverse, FLOATS))
        level = builder.fadd(level, constant(FLOATS, 0.5))
        level = _clipped(builder, level, None, constant(FLOATS, float((1 << width) - 1)))
        codes = builder.fptosi(level, INTS)
        if width == 1:
            code = builder.bitcast(builder.icmp_signed("!=", codes, constant(INTS, 0)), MASK)
        else:
            even, odd = _even_and_odd(builder, codes)
            code = _packed_pairs(builder, even, odd, width)
        target = lanes_at(context, builder, signature.args[7], packed, byte, code.type)
        builder.store(code, target, align=1)
        with builder.if_then(update):
            move = builder.fmul(builder.sitofp(codes, FLOATS), splat(builder, step, FLOATS))
            builder.store(builder.fadd(q, builder.fsub(move, far)), state, align=4)
        return context.get_dummy_value()

    f, p = types.float32, types.intp
    return types.void(bits, grad, last, p, f, f, types.boolean, packed, p), codegen
