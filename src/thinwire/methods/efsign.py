"""Signs, one magnitude a tensor, and error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.methods.families.signs import ScaledSigns


@dataclass(frozen=True)
class EFSign(ScaledSigns):
    """Every rank sends the signs of error + gradient and their mean magnitude; the rest it keeps.

    u_i = g_i + e_i;  Delta_i = (||u_i||_1 / d) sign(u_i);  e_i = u_i - Delta_i;  out = (1/W) sum_i Delta_i

    Delta is a contraction: ||u - Delta||^2 = (1 - delta) ||u||^2 with delta = ||u||_1^2 / (d ||u||_2^2),
    2/pi for a normal distribution. One bit an entry and one float32 a tensor.

    Args:
        reduce: as for all methods that code every entry. With two shots every stretch has its own
            magnitude, and its owner keeps what the second code loses.

    Example:
        >>> from thinwire.methods import EFSign
        >>> str(EFSign(reduce="gather"))
        "efsign(reduce='gather')"

    Reference: Karimireddy, Rebjock, Stich and Jaggi, "Error feedback fixes SignSGD and other gradient
    compression schemes", 2019.

    Differences from the paper: the error is kept in units of the gradient, not of gradient times step
    size; many workers, whose codes are averaged.
    """

    name: ClassVar[str] = "efsign"

    @property
    def feedback(self) -> bool:
        return True
