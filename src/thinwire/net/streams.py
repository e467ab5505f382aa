"""Streams and events of a GPU, as few functions as the library needs, so that a test can stand in for them.

A stream is a queue of work on a device, an event a place in it. Nothing here makes the host wait, except
`Streams.wait_on_host`. docs/gpu.md says which operation runs on which stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from thinwire.errors import ThinwireError

Stream = Any
Event = Any


class Streams(Protocol):
    """What lanes and the executor ask of a device."""

    @property
    def kinds(self) -> frozenset[str]:
        """The types of devices whose work is queued, so that its order has to be taken care of."""
        ...

    def new(self, device: torch.device) -> Stream:
        """A stream of one's own."""
        ...

    def current(self, device: torch.device) -> Stream:
        """The stream that the calling thread queues its work on."""
        ...

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Let the calling thread queue its work on this stream."""
        ...

    def record(self, stream: Stream) -> Event:
        """The place behind all work that the stream has now."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what is queued on the stream from now on run behind this place."""
        ...

    def wait_on_host(self, event: Event) -> None:
        """Block the calling thread until the device has reached this place."""
        ...

    def pinned(self, count: int) -> torch.Tensor:
        """So many bytes of host memory from which and to which a device copies by itself."""
        ...

    def is_capturing(self) -> bool:
        """Whether the calling thread's work is recorded into a CUDA graph instead of being run."""
        ...


class CudaStreams:
    """The real ones."""

    kinds = frozenset({"cuda"})

    def new(self, device: torch.device) -> Stream:
        return torch.cuda.Stream(device)

    def current(self, device: torch.device) -> Stream:
        return torch.cuda.current_stream(device)

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: Stream) -> Event:
        return stream.record_event()

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def wait_on_host(self, event: Event) -> None:
        event.synchronize()

    def pinned(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def is_capturing(self) -> bool:
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


CUDA: Streams = CudaStreams()


def refuse_capture(streams: Streams = CUDA) -> None:
    """Raise an error if an exchange would become part of a CUDA graph."""
    if streams.is_capturing():
        raise ThinwireError(
            "a CUDA graph is being captured: an exchange cannot be part of one, because the host takes part "
            "in it (it waits for the other ranks and decides whether the step is committed). Capture the "
            "forward and backward pass of the bare model, and average its gradients with "
            "thinwire.Session(...).average() between two replays"
        )
