"""On CUDA a lane works on a stream of its own, behind what the training loop has queued so far.

Not run on a GPU by this project's tests.
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
        """For work handed over now: a scope that a lane enters each time it takes the work up."""
        if device.type != "cuda":
            return DeviceScope
        stream = self._streams.setdefault((lane, device), torch.cuda.Stream(device))
        ready = torch.cuda.current_stream(device).record_event()
        return lambda: _StreamScope(stream, ready)


def future_for(device: torch.device) -> torch.futures.Future[torch.Tensor]:
    """A future that, on CUDA, makes whoever waits for it wait for the lane's stream as well."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)
