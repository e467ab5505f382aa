"""On CUDA a lane works on a stream of its own, behind the work that the training loop has queued so far.

The tests of this project do not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thinwire.drivers.lanes import DeviceScope


class _StreamScope(DeviceScope):
    def __init__(self, stream: Any, ready: Any) -> None:
        self._context = torch.cuda.stream(stream)
        self._stream = stream
        self._ready = ready

    def __enter__(self) -> None:
        self._context.__enter__()
        self._stream.wait_event(self._ready)

    def __exit__(self, *exc: object) -> None:
        self._context.__exit__(*exc)


class LaneStreams:
    """One side stream per lane and device, made when first needed."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, torch.device], Any] = {}

    def scope(self, lane: int, device: torch.device) -> Callable[[], DeviceScope]:
        """A scope for work submitted now; a lane enters it each time it runs a part of that work."""
        if device.type != "cuda":
            return DeviceScope
        stream = self._streams.setdefault((lane, device), torch.cuda.Stream(device))
        ready = torch.cuda.current_stream(device).record_event()
        return lambda: _StreamScope(stream, ready)


def future_for(device: torch.device) -> torch.futures.Future[torch.Tensor]:
    """A future; on CUDA, waiting for it also waits for the stream of the lane."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)
