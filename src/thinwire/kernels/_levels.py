"""The grid of the stochastic quantiser: how codes, scales and values relate."""

NORMS = ("max", "l2")

# Below this scale s / scale could overflow, so values are first multiplied by a power of two.
TINY_SCALE = 2.0**-64
TINY_BOOST = 2.0**80
# Below this LAQ divides by the step: its inverse might overflow.
TINY_STEP = 2.0**-100
LARGEST = 3.4028234663852886e38


# Rounding adds 1 + r / 2^16, r being 16 random bits, to y + s - 1 and cuts the fraction off. For integer y
# that is exact in float32, so levels (and zeros) stay what they are. Half a unit of r centres the rounding;
# 8-bit codes have no bit of precision left for it, and are centred by the rounding of y + s - 1 itself.
CENTRE = 2.0**-17


def shift(bits: int) -> float:
    """What the rounding adds to a scaled value before its random part."""
    return levels(bits) - 1.0 + (CENTRE if bits < 8 else 0.0)


def levels(bits: int) -> int:
    """The largest magnitude of a centred code: value = (code - levels) * scale / levels; one bit has none."""
    return 2 ** (bits - 1) - 1 if bits > 1 else 1


def buckets(numel: int, bucket: int) -> int:
    return (numel + bucket - 1) // bucket
