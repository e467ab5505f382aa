"""A momentum of which coefficients of a cosine transform are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from thinwire import kernels
from thinwire.core import Layout
from thinwire.methods.families.feedback import Entries, Residual


@dataclass
class CosineMomentum(Residual):
    """`error` is the momentum m. `chunks` follow from the tensor's shape, so they are not saved."""

    chunks: kernels.Chunks = field(kw_only=True)

    def subtract(
        self,
        m: torch.Tensor,
        c: Entries,
        lost: Sequence[tuple[torch.Tensor | slice, torch.Tensor]],
        room: torch.Tensor,
    ) -> None:
        """error = m - DCT^-1(c); what the codes of c have lost was not sent. `room` holds coefficients."""
        room.zero_()[c.indices.long()] = c.values
        for where, amount in lost:
            room[where] -= amount
        kernels.inverse_dct(room, self.chunks, self.error)
        torch.sub(m, self.error, out=self.error)


def chunks_of(layout: Layout, side: int) -> kernels.Chunks:
    """The chunks of the one tensor of a layout."""
    return kernels.Chunks.of(layout.slots[0].shape, side)
