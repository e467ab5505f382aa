"""Which parameters a method's payload is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from thinwire.core.layout import Layout


class Promising(Protocol):
    """What is needed of a session."""

    def layout(self, names: Sequence[str], device: torch.device) -> Layout: ...
    def payload_bytes(self, layouts: Sequence[Layout] | None = None) -> float | None: ...


def payload_by_parameter(session: Promising, names: Sequence[str], payload: float) -> dict[str, float]:
    """A step's measured payload, shared out by what the method promises for each parameter alone.

    Where a payload depends on the data, shares go by the number of entries.
    """
    cpu = torch.device("cpu")
    layouts = {name: session.layout([name], cpu) for name in names}
    promised = {name: session.payload_bytes([layout]) for name, layout in layouts.items()}
    ragged = any(share is None for share in promised.values())
    shares = {name: float(layouts[name].numel if ragged else promised[name] or 0) for name in names}
    total = sum(shares.values())
    return {name: payload * share / total for name, share in shares.items()} if total else {}
