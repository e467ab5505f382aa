"""The byte code of natural compression: a sign bit and seven bits of exponent.

`field` is the biased float32 exponent after stochastic rounding to a power of two (0 is zero, 1 is 2^-126,
254 is 2^127). The code is `field - offset`, 0 meaning zero, where `offset` (0..127) travels in the payload's
last byte and is chosen so that the largest magnitude fits. With max |x| < 1 the offset is 0 and nothing but
subnormal numbers can underflow.
"""

LARGEST_FIELD = 254
INFINITE_FIELD = 255
NOT_FINITE = 255
LARGEST_OFFSET = 127


def offset_for(largest_field: int) -> int:
    """The offset for a tensor whose largest magnitude has this exponent field (rounding may add one)."""
    return max(min(largest_field + 1, LARGEST_FIELD) - 127, 0)
