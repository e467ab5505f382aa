"""The grid of the stochastic quantiser: how codes, scales and values relate."""

NORMS = ("max", "l2")

# Below this scale s / scale could overflow, so values are first multiplied by a power of two.
TINY_SCALE = 2.0**-64
TINY_BOOST = 2.0**80
LARGEST = 3.4028234663852886e38


def levels(bits: int) -> int:
    """The largest magnitude of a centred code: value = (code - levels) * scale / levels; one bit has none."""
    return 2 ** (bits - 1) - 1 if bits > 1 else 1


def buckets(numel: int, bucket: int) -> int:
    return (numel + bucket - 1) // bucket
