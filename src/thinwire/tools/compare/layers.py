"""How a step's payload is distributed over the parameters."""

from __future__ import annotations

import torch

from thinwire.core.engine import Engine


def payload_by_parameter(engine: Engine, payload: float) -> dict[str, float]:
    """A step's measured payload, shared out by what the method promises for each parameter alone.

    Where a payload depends on the data, shares go by the number of entries. A parameter that periodic
    averaging cuts in pieces gets the sum of theirs.
    """
    layouts = {name: engine.layout([name], torch.device("cpu")) for name in engine.parameters}
    promised = {name: engine.payload_bytes([layout]) for name, layout in layouts.items()}
    varies = any(share is None for share in promised.values())
    shares: dict[str, float] = {}
    for name, layout in layouts.items():
        parameter = name.partition("[")[0]
        shares[parameter] = shares.get(parameter, 0.0) + (layout.numel if varies else promised[name] or 0)
    total = sum(shares.values())
    return {name: payload * share / total for name, share in shares.items()} if total else {}
