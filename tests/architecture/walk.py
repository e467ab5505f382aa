"""`python -m tests.architecture.walk`: the files that Python enters for one step of `topk` under DDP.

From DDP's hook to the wire and back, on two ranks, after a few steps to warm up. The model has no tensor
so small that it would go `dense`. What Numba has compiled is not seen; the Python around it is.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.net.launch import Worker, run_local


def files(method: str = "topk(ratio=0.01)") -> list[str]:
    """Paths below `src/thinwire`, sorted."""
    return run_local(_walk, 2, method)[0]


def _walk(worker: Worker, method: str) -> list[str]:
    import thinwire

    del worker
    root = os.path.dirname(thinwire.__file__)
    seen: set[str] = set()
    watching = False

    def trace(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if watching and name.startswith(root):
            seen.add(os.path.relpath(name, root))

    threading.settrace(trace)  # before attach, so that the lanes' threads have it
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(256, 256, bias=False))
    session = thinwire.attach(model, method)
    batch = torch.randn(8, 256)
    for step in range(5):
        watching = step == 4
        sys.settrace(trace if watching else None)
        model(batch).sum().backward()
    sys.settrace(None)
    threading.settrace(None)
    watching = False
    session.detach()
    return sorted(seen)


if __name__ == "__main__":
    found = files()
    kernels = [name for name in found if name.startswith("kernels")]
    print("\n".join(found))
    print(f"{len(found)} files, {len(kernels)} of them kernels")
