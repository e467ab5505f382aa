"""How much every kernel costs, in copies of the same float32 tensor, measured in the same run.

A copy is the yardstick for memory bandwidth. Copy and kernel are timed in turn, many times, and the best of
each counts: other processes only ever add to a time. With one thread it is the thread's processor time, so
waiting for a core does not count; with several it is the time on the clock. Below about 1e7 entries the copy
stays in the cache and every ratio looks worse than it is.

With several threads, a kernel right after an operation of torch can take as long as with one thread, or
longer; torch's OpenMP threads still spinning on the cores would explain that, and OMP_WAIT_POLICY=passive
shortens it. Here both wait a while and run once before they are timed: the figures are those of a steady
state.
"""

import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels

DEFAULT_SIZE = 10_000_000
WORKERS = 8
BUCKET = 512
SPINNING = 0.02
"""Seconds after which torch's OpenMP threads have certainly stopped waiting for work on a core."""
REFERENCE_SIZE = 1_000_000
"""The torch reference needs up to 400 copies: the ratio to it is taken at this size at most."""

Progress = Callable[[str, int, int], None]
Action = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel: copies of the tensor, GB of float32 input per second, how many times faster than torch."""

    name: str
    copies: float
    gb_per_s: float
    reference_ratio: float
    target: float | None


@dataclass(frozen=True, slots=True)
class Case:
    """`make(size)` gives the action to time and what to do before it, untimed."""

    name: str
    target: float | None
    make: Callable[[int], tuple[Action, Action]]


def run(
    size: int = DEFAULT_SIZE,
    threads: int = 1,
    progress: Progress | None = None,
    repeats: int = 15,
    only: str = "",
) -> list[Row]:
    """Time every kernel whose name contains `only`, with `threads` threads of torch and as many of ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        chosen = [case for case in CASES if only in case.name]
        rows: list[Row] = []
        for done, case in enumerate(chosen):
            if progress is not None:
                progress(case.name, done, len(chosen))
            rows.append(_measure(case, size, repeats))
        if progress is not None:
            progress("", len(chosen), len(chosen))
        return rows
    finally:
        torch.set_num_threads(before)


def _measure(case: Case, size: int, repeats: int) -> Row:
    action, reset = case.make(size)
    source, target = torch.randn(size), torch.zeros(size)
    reset()
    action()  # whatever compiles or allocates for the first time does it here
    copy, kernel = math.inf, math.inf
    for _ in range(repeats):
        copy = min(copy, _steady_seconds(lambda: target.copy_(source), _nothing))
        kernel = min(kernel, _steady_seconds(action, reset))
    return Row(
        name=case.name,
        copies=kernel / copy,
        gb_per_s=4 * size / kernel / 1e9,
        reference_ratio=_reference_ratio(case, min(size, REFERENCE_SIZE)),
        target=case.target,
    )


def _steady_seconds(action: Action, reset: Action) -> float:
    threads = torch.get_num_threads()
    if threads == 1:
        reset()
        return _seconds(action, time.thread_time)
    time.sleep(SPINNING)
    _alone(reset, threads)
    action()
    _alone(reset, threads)
    return _seconds(action)


def _alone(reset: Action, threads: int) -> None:
    """In this thread only, so that no OpenMP thread spins afterwards."""
    torch.set_num_threads(1)
    try:
        reset()
    finally:
        torch.set_num_threads(threads)


def _reference_ratio(case: Case, size: int) -> float:
    action, reset = case.make(size)

    def best(repeats: int) -> float:
        seconds: list[float] = []
        for _ in range(repeats):
            reset()
            seconds.append(_seconds(action))
        return min(seconds)

    fast = best(5)
    with kernels.use_reference():
        return best(2) / fast


def _seconds(action: Action, clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    action()
    return clock() - begin


def _nothing() -> None:
    pass


def _reading(call: Callable[[Tensor], object]) -> Callable[[int], tuple[Action, Action]]:
    def make(size: int) -> tuple[Action, Action]:
        x = torch.randn(size)
        return lambda: call(x), _nothing

    return make


def _heavy(call: Callable[[Tensor], object]) -> Callable[[int], tuple[Action, Action]]:
    """Laplace instead of normal: Gaussian-k's first guess is off."""

    def make(size: int) -> tuple[Action, Action]:
        x = torch.randn(size) * torch.empty(size).exponential_().sqrt_()
        return lambda: call(x), _nothing

    return make


def _feedback(call: Callable[[Tensor, Tensor], object]) -> Callable[[int], tuple[Action, Action]]:
    def make(size: int) -> tuple[Action, Action]:
        residual, grad, saved = torch.zeros(size), torch.empty(size), torch.randn(size)

        def reset() -> None:
            residual.zero_()
            grad.copy_(saved)

        return lambda: call(residual, grad), reset

    return make


def _dequantise(bits: int, workers: int) -> Callable[[int], tuple[Action, Action]]:
    def make(size: int) -> tuple[Action, Action]:
        x, out = torch.randn(size), torch.zeros(size)
        sent = [kernels.quantise(x, bits, BUCKET, "max", seed) for seed in range(workers)]
        packed, scales = [p for p, _ in sent], [s for _, s in sent]
        return lambda: kernels.dequantise_mean(packed, scales, bits, BUCKET, size, out), _nothing

    return make


def _laq(at_once: bool) -> Callable[[int], tuple[Action, Action]]:
    def make(size: int) -> tuple[Action, Action]:
        grad, last, saved = torch.randn(size), torch.zeros(size), 0.1 * torch.randn(size)

        def action() -> None:
            packed, radius = kernels.laq_quantise(grad, last, 4, update=at_once)
            if not at_once:
                kernels.laq_apply(last, packed, radius, 4)

        return action, lambda: last.copy_(saved)

    return make


def _sign_mean(size: int) -> tuple[Action, Action]:
    packed = [kernels.sign_pack(torch.randn(size)) for _ in range(WORKERS)]
    out = torch.zeros(size)
    return lambda: kernels.sign_mean(packed, [1.0] * WORKERS, size, out), _nothing


def _majority(size: int) -> tuple[Action, Action]:
    packed = [kernels.sign_pack(torch.randn(size)) for _ in range(WORKERS)]
    return lambda: kernels.sign_majority(packed, size), _nothing


def _natural_mean(size: int) -> tuple[Action, Action]:
    packed = [kernels.natural_quantise(torch.randn(size), seed) for seed in range(WORKERS)]
    out = torch.zeros(size)
    return lambda: kernels.natural_mean(packed, size, out), _nothing


def _scatter(size: int) -> tuple[Action, Action]:
    sent = [kernels.topk(torch.randn(size), max(size // 100, 1)) for _ in range(WORKERS)]
    indices, values = [i for i, _ in sent], [v for _, v in sent]
    out = torch.zeros(size)
    return lambda: kernels.scatter_mean(indices, values, out), _nothing


def _a2sgd(size: int) -> tuple[Action, Action]:
    x, saved = torch.zeros(size), torch.randn(size)

    def action() -> None:
        mu = kernels.two_means(x)
        kernels.a2sgd_apply(x, *mu, 0.5, -0.5, x)

    return action, lambda: x.copy_(saved)


def _gspar_sample(size: int) -> tuple[Action, Action]:
    x = torch.randn(size)
    lam = kernels.gspar_probabilities(x, 0.01)
    return lambda: kernels.gspar_sample(x, lam, 1), _nothing


def _sketch_insert(cols: int) -> Callable[[int], tuple[Action, Action]]:
    def make(size: int) -> tuple[Action, Action]:
        x, table = torch.randn(size), torch.zeros(5, cols)
        return lambda: kernels.sketch_insert(x, 5, cols, 1, table), _nothing

    return make


def _sketch_query(cols: int) -> Callable[[int], tuple[Action, Action]]:
    def make(size: int) -> tuple[Action, Action]:
        table = torch.zeros(5, cols)
        kernels.sketch_insert(torch.randn(size), 5, cols, 1, table)
        return lambda: kernels.sketch_query_topk(table, size, 1, max(size // 1000, 1)), _nothing

    return make


def _k(x: Tensor, ratio: float) -> int:
    return max(int(ratio * x.numel()), 1)


CASES: tuple[Case, ...] = (
    Case("topk 0.1 %", 1.0, _reading(lambda x: kernels.topk(x, _k(x, 0.001)))),
    Case("topk 1 %", None, _reading(lambda x: kernels.topk(x, _k(x, 0.01)))),
    Case("threshold 1 %", None, _reading(lambda x: kernels.threshold(x, 2.5758))),
    Case("feedback + topk 0.1 %", 1.5, _feedback(lambda r, g: kernels.feedback_topk(r, g, _k(r, 0.001)))),
    Case("feedback + topk 1 %", 2.0, _feedback(lambda r, g: kernels.feedback_topk(r, g, _k(r, 0.01)))),
    Case(
        "feedback + topk 1 %, undo in the gradient",
        None,
        _feedback(lambda r, g: kernels.feedback_topk(r, g, _k(r, 0.01), undo=g)),
    ),
    Case(
        "select on the sum 1 %", None, _feedback(lambda r, g: kernels.select_feedback_topk(r, g, _k(r, 0.01)))
    ),
    Case(
        "feedback + random block 1 %",
        None,
        _feedback(lambda r, g: kernels.feedback_block(r, g, 7, _k(r, 0.01))),
    ),
    Case("gaussiank 0.1 %, normal", 2.5, _reading(lambda x: kernels.gaussiank(x, _k(x, 0.001)))),
    Case("gaussiank 0.1 %, Laplace", 2.5, _heavy(lambda x: kernels.gaussiank(x, _k(x, 0.001)))),
    Case(
        "feedback + gaussiank 0.1 %",
        None,
        _feedback(lambda r, g: kernels.feedback_gaussiank(r, g, _k(r, 0.001))),
    ),
    Case("quantise 1 bit", None, _reading(lambda x: kernels.quantise(x, 1, BUCKET, "max", 1))),
    Case("quantise 2 bit", 1.3, _reading(lambda x: kernels.quantise(x, 2, BUCKET, "max", 1))),
    Case("quantise 4 bit", 1.3, _reading(lambda x: kernels.quantise(x, 4, BUCKET, "max", 1))),
    Case("quantise 8 bit", 1.3, _reading(lambda x: kernels.quantise(x, 8, BUCKET, "max", 1))),
    Case("quantise 4 bit, l2", None, _reading(lambda x: kernels.quantise(x, 4, BUCKET, "l2", 1))),
    Case("dequantise 4 bit", 0.7, _dequantise(4, 1)),
    Case("dequantise 2 bit, 8 workers", 1.5, _dequantise(2, WORKERS)),
    Case("dequantise 4 bit, 8 workers", 1.5, _dequantise(4, WORKERS)),
    Case("dequantise 8 bit, 8 workers", None, _dequantise(8, WORKERS)),
    Case("LAQ 4 bit: radius, codes, update", 2.0, _laq(at_once=True)),
    Case("LAQ 4 bit: the update later", None, _laq(at_once=False)),
    Case("sign pack", 1.0, _reading(kernels.sign_pack)),
    Case("sign pack + mean |x|", None, _reading(kernels.sign_pack_mean)),
    Case("sign mean, 8 workers", None, _sign_mean),
    Case("sign majority, 8 workers", None, _majority),
    Case("A2SGD: means + correction in place", 1.2, _a2sgd),
    Case("ternary quantise", None, _reading(lambda x: kernels.ternary_quantise(x, 2.5, 1))),
    Case("natural quantise", None, _reading(lambda x: kernels.natural_quantise(x, 1))),
    Case("natural mean, 8 workers", None, _natural_mean),
    Case("GSpar probabilities, 2 rounds", None, _reading(lambda x: kernels.gspar_probabilities(x, 0.01))),
    Case("GSpar sample 1 %", None, _gspar_sample),
    Case("chunk arg-max, chunks of 100", None, _reading(lambda x: kernels.chunk_argmax(x, 100))),
    Case("scatter mean of 8 x 1 %", 1.2, _scatter),
    Case("all finite", None, _reading(kernels.all_finite)),
    Case("sketch insert 5 x 20k", 4.0, _sketch_insert(20_000)),
    Case("sketch insert 5 x 100k", 4.0, _sketch_insert(100_000)),
    Case("sketch insert 5 x 500k", 5.0, _sketch_insert(500_000)),
    Case("sketch query + topk 5 x 20k", 5.0, _sketch_query(20_000)),
    Case("sketch query + topk 5 x 100k", 5.0, _sketch_query(100_000)),
    Case("sketch query + topk 5 x 500k", 6.0, _sketch_query(500_000)),
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


def backward_overlap(size: int = DEFAULT_SIZE, seconds: float = 1.0) -> Overlap:
    """Does training keep going while a kernel runs? Median times of many small forward and backward passes.

    With one core per thread the kernels slow them only by sharing memory bandwidth; a thread that holds the
    GIL slows them much more, which shows that this measures what it should.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        grad, residual = torch.randn(size), torch.zeros(size)

        def kernel() -> None:
            kernels.feedback_topk(residual, grad, max(size // 100, 1))

        def python() -> None:
            sum(range(200_000))

        kernel()
        return Overlap(
            alone_ms=_backward_ms(None, seconds),
            beside_kernels_ms=_backward_ms(kernel, seconds),
            beside_python_ms=_backward_ms(python, seconds),
        )
    finally:
        torch.set_num_threads(before)


def _backward_ms(beside: Action | None, seconds: float) -> float:
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
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            times.append(_seconds(lambda: model(data).square().mean().backward()))
        return 1e3 * statistics.median(times)
    finally:
        stop.set()
        thread.join()
