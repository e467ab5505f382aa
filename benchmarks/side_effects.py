"""What else kernels must be: light on memory, and out of the training thread's way."""

import statistics
import sys
import threading
import time
from dataclasses import dataclass

import torch

from benchmarks.common import Action, seconds, show, threads_of_torch
from thinwire import kernels

DEFAULT_SIZE = 10_000_000


def show_side_effects(size: int) -> None:
    """Measure both and show tables."""
    if sys.platform == "linux":
        show(
            f"peak memory of a step beside residual and gradient ({4 * size / 2**20:.0f} MiB each)",
            peak_memory(size),
            {"": lambda m: m.name, "more than before": lambda m: f"{m.temporary_bytes / 2**20:.1f} MiB"},
        )
    overlap = backward_overlap(size)
    rows = {
        "alone": overlap.alone_ms,
        "while another thread runs kernels": overlap.beside_kernels_ms,
        "while another thread runs Python": overlap.beside_python_ms,
    }
    show(
        "a small forward and backward pass",
        list(rows.items()),
        {"": lambda row: row[0], "median": lambda row: f"{row[1]:.2f} ms"},
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """What an error-feedback step allocates beside the residual and the gradient, at its peak."""

    name: str
    tensor_bytes: int
    temporary_bytes: int

    @property
    def share(self) -> float:
        return self.temporary_bytes / self.tensor_bytes


def peak_memory(size: int = DEFAULT_SIZE, steps: int = 3) -> list[Memory]:
    """Peak resident memory of steps at steady state, above what was resident before (Linux only)."""
    grad = torch.randn(size)
    residual = torch.zeros(size)
    k = max(size // 100, 1)
    actions: dict[str, Action] = {
        "feedback + topk 1 %": lambda: kernels.feedback_topk(residual, grad, k, undo=grad),
        "feedback + gaussiank 1 %": lambda: kernels.feedback_gaussiank(residual, grad, k, undo=grad),
        "feedback + random block 1 %": lambda: kernels.feedback_block(residual, grad, 7, k, undo=grad),
        "select and commit 1 %": lambda: kernels.commit_feedback(
            residual, grad, kernels.select_feedback_topk(residual, grad, k)[0]
        ),
    }
    return [Memory(name, 4 * size, _peak_above(action, steps)) for name, action in actions.items()]


def _peak_above(action: Action, steps: int) -> int:
    for _ in range(2):
        action()
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # the peak starts again from what is resident now
    before = _status("VmRSS")
    for _ in range(steps):
        action()
    return max(_status("VmHWM") - before, 0)


def _status(field: str) -> int:
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(field + ":"):
                return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and backward pass in one thread while another runs kernels without pause."""

    alone_ms: float
    beside_kernels_ms: float
    beside_python_ms: float
    """The control: the same beside a Python loop, which holds the interpreter lock."""


def backward_overlap(size: int = DEFAULT_SIZE, duration: float = 1.0) -> Overlap:
    """Does training keep going while a kernel runs? Median times of many small forward and backward passes.

    With one core per thread the kernels slow them only by sharing memory bandwidth; a thread that holds the
    GIL slows them much more, which shows that this measures what it should.
    """
    grad, residual = torch.randn(size), torch.zeros(size)

    def kernel() -> None:
        kernels.feedback_topk(residual, grad, max(size // 100, 1))

    def python() -> None:
        sum(range(200_000))

    with threads_of_torch(1):
        kernel()
        return Overlap(
            alone_ms=_backward_ms(None, duration),
            beside_kernels_ms=_backward_ms(kernel, duration),
            beside_python_ms=_backward_ms(python, duration),
        )


def _backward_ms(beside: Action | None, duration: float) -> float:
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(20)))
    data = torch.randn(16, 128)
    stop = threading.Event()

    def loop() -> None:
        while beside is not None and not stop.is_set():
            beside()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        times: list[float] = []
        end = time.perf_counter() + duration
        while time.perf_counter() < end:
            times.append(seconds(lambda: model(data).square().mean().backward()))
        return 1e3 * statistics.median(times)
    finally:
        stop.set()
        thread.join()
