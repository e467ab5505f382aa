"""The scale of ternary codes, from one pass of sums."""

import math
import struct


def clipped_scale(
    numel: int, largest: float, total: float, squares: float, clip_sigma: float | None
) -> float:
    """max |x| after clipping at `clip_sigma` population standard deviations, as a float32 value."""
    if clip_sigma is None:
        return largest
    variance = max(squares - total * (total / numel), 0.0) / numel
    bound = clip_sigma * math.sqrt(variance)
    # A constant vector has no deviation to clip at: clipping it to nothing would lose it.
    if bound == 0.0 or bound >= largest:
        return largest
    return struct.unpack("f", struct.pack("f", bound))[0]
