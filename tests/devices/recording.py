"""Streams that only write down what is asked of them."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RecordingStreams:
    """For tensors on the CPU, as if they were on a GPU. `log` has what was asked, in order."""

    kinds = frozenset({"cpu"})

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.capturing = False
        self._numbers = itertools.count()
        self._events = itertools.count()
        self._here = threading.local()

    def new(self, device: torch.device) -> str:
        return f"stream {next(self._numbers)}"

    def current(self, device: torch.device) -> str:
        return getattr(self._here, "stream", "main")

    @contextmanager
    def use(self, stream: str) -> Iterator[None]:
        before = self.current(torch.device("cpu"))
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def record(self, stream: str) -> int:
        event = next(self._events)
        self.log.append(("record", stream, event))
        return event

    def wait(self, stream: str, event: int) -> None:
        self.log.append(("wait", stream, event))

    def wait_on_host(self, event: int) -> None:
        self.log.append(("host waits", event))

    def pinned(self, count: int) -> torch.Tensor:
        self.log.append(("pinned", count))
        return torch.empty(count, dtype=torch.uint8)

    def is_capturing(self) -> bool:
        return self.capturing

    def note(self, what: str) -> None:
        """Work that is queued by the calling thread."""
        self.log.append((what, self.current(torch.device("cpu"))))
