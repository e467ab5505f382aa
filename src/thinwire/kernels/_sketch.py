"""How the count sketch hashes: blocks of neighbours go to a run of neighbouring columns."""

from thinwire.kernels._random import SPLIT_STEP, mix64

BLOCK = 64
MAX_ROWS = 7
SIGN_SALT = 0x1D8E4E27C47D124F


def row_key(seed: int, row: int) -> int:
    """A signed 64-bit key per row; the hash of a block is mix64(key + block)."""
    key = mix64(seed + SPLIT_STEP * (row + 1))
    return key - 2**64 if key >= 2**63 else key


# Exchanges (i, j) that bring the median of an odd number of rows to the middle; checked by brute force in the
# tests. The compiled kernels spell the same networks out.
MEDIAN_NETWORKS: dict[int, tuple[tuple[int, int], ...]] = {
    1: (),
    3: ((0, 1), (1, 2), (0, 1)),
    5: ((0, 1), (3, 4), (0, 3), (1, 4), (1, 2), (2, 3), (1, 2)),
    7: (
        (0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6),
        (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4),
    ),
}  # fmt: skip
