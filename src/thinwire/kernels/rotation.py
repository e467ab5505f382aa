"""Random rotation: R = H D, twice, by blocks; D flips signs at random, H is the normalised Hadamard matrix.

A rotated block looks like normal noise, whatever it was: no entry is far larger than the others, so few bits
lose little. One round does not do that for a block with few large entries; two rounds do, for any block.

A tensor of n entries stays one of n: blocks have `block_of(n)` entries, a power of two. If they do not fill
the tensor, a block that ends with it is rotated first; it overlaps the last regular one, which is rotated
after it. So R is orthogonal, entries of one block have one variance, and nothing is padded.
"""

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import rotation as reference

LARGEST_BLOCK = 4096
"""16 KiB: a block stays in the first-level cache."""


def block_of(n: int) -> int:
    """The entries of a block of a tensor of n."""
    return min(LARGEST_BLOCK, 1 << max(0, n.bit_length() - 1))


def rotate(x: Tensor, seed: int, out: Tensor) -> None:
    """out = R x, for the rotation that the seed draws. `out` is float32 and may be `x`."""
    _check(x, out)
    dispatch(reference.rotate, x, seed, block_of(x.numel()), out)


def rotate_back(x: Tensor, seed: int, out: Tensor) -> None:
    """out = R^T x: undoes `rotate` with the same seed. `out` is float32 and may be `x`."""
    _check(x, out)
    dispatch(reference.rotate_back, x, seed, block_of(x.numel()), out)


def _check(x: Tensor, out: Tensor) -> None:
    check.flat_float("x", x)
    check.flat_float32("out", out)
    check.same_size("x", x, "out", out)
