"""Host memory for operations that gloo performs on tensors of a GPU.

Gloo sends from the host's memory. It would allocate memory for every operation and copy by itself. Here two
buffers are allocated once, grow if needed, and take turns. A buffer is used again only when the copy out
of it has ended: the event behind that copy says so. With two of them the host hardly ever waits for it, as
another whole operation lies between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.net.streams import Event, Streams

_ALIGNED = 64
"""Parts of a buffer begin at multiples of so many bytes, whatever their type."""


class _Buffer:
    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.until: Event | None = None
        """Behind the last copy from this buffer to the device."""


class Staging:
    """The buffers of one executor, which performs one operation at a time."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._buffers = (_Buffer(), _Buffer())
        self._turn = 0

    def begin(self, *lengths: int) -> list[torch.Tensor]:
        """Room on the host for an operation: one piece of bytes for each length."""
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        if buffer.until is not None:
            self._streams.wait_on_host(buffer.until)
            buffer.until = None
        places = [0]
        for length in lengths:
            places.append(places[-1] + -(-length // _ALIGNED) * _ALIGNED)
        if places[-1] > buffer.memory.numel():
            buffer.memory = self._streams.pinned(max(places[-1], 2 * buffer.memory.numel()))
        return [buffer.memory[at : at + n] for at, n in zip(places[:-1], lengths, strict=True)]

    def take(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy (host, device) pairs from the device, and wait until gloo may read them."""
        if not pairs:
            return
        for host, on_device in pairs:
            host.copy_(on_device, non_blocking=True)
        stream = self._streams.current(pairs[0][1].device)
        self._streams.wait_on_host(self._streams.record(stream))

    def give(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy (host, device) pairs to the device; what is queued behind it sees the result."""
        if not pairs:
            return
        for host, on_device in pairs:
            on_device.copy_(host, non_blocking=True)
        stream = self._streams.current(pairs[0][1].device)
        self._buffers[self._turn].until = self._streams.record(stream)
