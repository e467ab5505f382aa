"""The code of sampled entries: some are sent with their values, the others have one magnitude and a sign."""

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
    """Parts for the wire, from what `kernels.gspar_sample` returns: `drawn` has the sign in its highest bit.

    The indices of the sure entries, their values and the magnitude; the number of the drawn ones, their
    indices, their signs.
    """
    shared = torch.tensor([magnitude if drawn.numel() else 0.0], dtype=torch.float32, device=values.device)
    return [
        index_code.encode(sure, n),
        torch.cat([values, shared]),
        torch.tensor([drawn.numel()], dtype=torch.int32, device=values.device),
        index_code.encode(drawn & INDEX_BITS, n),
        kernels.sign_pack(drawn.float()),
    ]


def decode(parts: Sequence[torch.Tensor], n: int) -> tuple[Entries, Entries]:
    """The sure entries and the drawn ones, or PayloadError."""
    sure_code, floats, count, drawn_code, signs = parts
    if not floats.numel() or count.numel() != 1:
        raise PayloadError(f"{floats.numel()} values and {count.numel()} counts came with sampled entries")
    sure = index_code.decode(sure_code, n, floats.numel() - 1)
    k = int(count[0])
    drawn = index_code.decode(drawn_code, n, k)
    values = torch.empty(k, dtype=torch.float32, device=floats.device)
    kernels.sign_unpack(signs, float(floats[-1]), k, values)
    return Entries(sure, floats[:-1]), Entries(drawn, values)
