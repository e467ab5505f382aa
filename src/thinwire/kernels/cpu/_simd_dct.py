# pyright: basic
# Numba's intrinsics are built from untyped LLVM objects; the signatures in the stub are what callers rely on.
"""The fast cosine transform of 64 numbers, on eight columns at a time, and a transposition.

The factors are rotations and sums of pairs, all orthogonal up to a scale (Plonka and Tasche, "Fast and
numerically stable algorithms for discrete cosine transforms", 2005): errors do not grow.
"""

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from thinwire.kernels.cpu._lanes import constant, lanes_at, shuffled

SIDE = 64
_WIDTH = 8
_FLOATS = ir.VectorType(ir.FloatType(), _WIDTH)


class _Emitter:
    """Transforms of lists of vectors; every result is sqrt(length) times the orthonormal one."""

    def __init__(self, builder):
        self.add, self.sub = builder.fadd, builder.fsub
        self._mul = builder.fmul

    def times(self, x, factor):
        return self._mul(x, constant(_FLOATS, factor))

    def dct2(self, x):
        """DCT-II: sums of mirrored pairs give the even coefficients, differences the odd ones."""
        n = len(x)
        if n == 1:
            return x
        pairs = [(x[i], x[n - 1 - i]) for i in range(n // 2)]
        even = self.dct2([self.add(a, b) for a, b in pairs])
        odd = self.dct4([self.sub(a, b) for a, b in pairs])
        return [value for both in zip(even, odd, strict=True) for value in both]

    def dct3(self, y):
        """The inverse of DCT-II."""
        n = len(y)
        if n == 1:
            return y
        sums, differences = self.dct3(y[0::2]), self.dct4(y[1::2])
        pairs = list(zip(sums, differences, strict=True))
        return [self.add(u, v) for u, v in pairs] + [self.sub(u, v) for u, v in reversed(pairs)]

    def dct4(self, x):
        """DCT-IV, its own inverse: mirrored pairs are rotated, and two DCT-II of half the length follow."""
        n = len(x)
        if n == 1:
            return x
        half = n // 2
        first, second = [], [None] * half
        for i in range(half):
            angle = (2 * i + 1) * math.pi / (4 * n)
            c, s = math.cos(angle), math.sin(angle)
            a, b = x[i], x[n - 1 - i]
            first.append(self.add(self.times(a, c), self.times(b, s)))
            turned = self.times(b, c), self.times(a, s)
            at = half - 1 - i
            second[at] = self.sub(*turned) if at % 2 == 0 else self.sub(*reversed(turned))
        p, q = self.dct2(first), self.dct2(second)
        out = [self.times(p[0], math.sqrt(2))]
        for k in range(1, half):
            low, high = self.add(p[k], q[half - k]), self.sub(p[k], q[half - k])
            out += (low, high) if (half - k) % 2 == 0 else (high, low)
        return [*out, self.times(q[0], math.sqrt(2) if half > 1 else -math.sqrt(2))]


def _transposed(builder, rows):
    """Eight vectors as the rows of a square, transposed."""
    for half in (1, 2, 4):
        out = list(rows)
        for low in range(_WIDTH):
            if not low & half:
                a, b = rows[low], rows[low | half]
                lanes = range(_WIDTH)
                out[low] = shuffled(builder, a, b, [j + _WIDTH - half if j & half else j for j in lanes])
                out[low | half] = shuffled(
                    builder, a, b, [j + _WIDTH if j & half else j + half for j in lanes]
                )
        rows = out
    return rows


def _cosine(inverse):
    """An intrinsic (source, column, target): eight columns of a 64 x 64 source become rows of the target."""

    @intrinsic
    def cosine(typingctx, source, column, target):
        def codegen(context, builder, signature, args):
            def at(array, place, offset):
                place = builder.add(place, ir.Constant(place.type, offset))
                return lanes_at(context, builder, signature.args[array], args[array], place, _FLOATS)

            emit = _Emitter(builder)
            rows = [builder.load(at(0, args[1], SIDE * i), align=4) for i in range(SIDE)]
            rows = emit.dct3(rows) if inverse else emit.dct2(rows)
            first = builder.mul(args[1], ir.Constant(args[1].type, SIDE))
            for k in range(0, SIDE, _WIDTH):
                for j, row in enumerate(_transposed(builder, rows[k : k + _WIDTH])):
                    builder.store(row, at(2, first, SIDE * j + k), align=4)
            return context.get_dummy_value()

        return types.void(source, types.intp, target), codegen

    return cosine


cosine64, inverse_cosine64 = _cosine(False), _cosine(True)
