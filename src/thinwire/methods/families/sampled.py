"""The code of sampled entries: some are sent with values, the others share a magnitude and have a sign."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire import kernels
from thinwire.errors import PayloadError
from thinwire.methods.families import indices as index_code
from thinwire.methods.families.feedback import Entries

INDEX_BITS = 2**31 - 1


def encode(
    n: int, sure: torch.Tensor, values: torch.Tensor, drawn: torch.Tensor, magnitude: float
) -> list[torch.Tensor]:
    """Parts for the wire, from the result of `kernels.gspar_sample`: `drawn` has the sign in its highest bit.

    The parts are the indices of the sure entries, their values and the magnitude, then the number of drawn
    entries, their indices and their signs.
    """
    shared = torch.tensor([magnitude if drawn.numel() else 0.0], dtype=torch.float32, device=values.device)
    return [
        index_code.encode(sure, n),
        torch.cat([values, shared]),
        torch.tensor([drawn.numel()], dtype=torch.int32, device=values.device),
        index_code.encode(drawn & INDEX_BITS, n),
        kernels.sign_pack(drawn.float()),
    ]


def longest(n: int) -> list[int]:
    """The largest lengths of the parts."""
    indices = index_code.longest(n)
    return [indices, n + 1, 1, indices, -(-n // 8)]


def decode(parts: Sequence[torch.Tensor], n: int) -> tuple[Entries, Entries]:
    """The sure and the drawn entries. Raises PayloadError if the parts do not fit together."""
    sure_code, floats, count, drawn_code, signs = parts
    if not floats.numel() or count.numel() != 1:
        raise PayloadError(f"sampled entries came with {floats.numel()} values and {count.numel()} counts")
    sure = index_code.decode(sure_code, n, floats.numel() - 1)
    k = int(count[0])
    drawn = index_code.decode(drawn_code, n, k)
    values = torch.empty(k, dtype=torch.float32, device=floats.device)
    kernels.sign_unpack(signs, float(floats[-1]), k, values)
    return Entries(sure, floats[:-1]), Entries(drawn, values)
