"""thinwire beside the compressing hooks that PyTorch ships and that run on gloo.

PyTorch's PowerSGD hook works on gloo with one bucket only, so all models here have one. Steps are timed in
turn, like in `overhead`; bytes are those of the loopback interface, so nobody's own counting is trusted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.overhead import BATCH, WIDTH, deep_mlp
from thinwire.net.launch import Worker, run_local

PLAIN = "DDP, no hook"
PYTORCH_FP16, PYTORCH_POWERSGD = "PyTorch fp16 hook", "PyTorch PowerSGD hook, rank 4"
THINWIRE = ("fp16", "bf16", "powersgd(rank=4)", "topk(ratio=0.01)", "qsgd(bits=4)", "efsign")
VARIANTS = (PLAIN, PYTORCH_FP16, PYTORCH_POWERSGD, *(f"thinwire {method}" for method in THINWIRE))
COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")


@dataclass(frozen=True)
class Row:
    """One variant; the ratio is the median of step times by those of plain DDP in the same round."""

    variant: str
    milliseconds: float
    ratio: float
    bytes_per_step: float | None
    """What the loopback interface carried, per worker and step; None where there is no such counter."""


def run(steps: int = 60, workers: int = 2, progress: Callable[[str], None] | None = None) -> list[Row]:
    def on_report(rank: int, what: str) -> None:
        if rank == 0 and progress is not None:
            progress(what)

    return run_local(_measure, workers, steps, timeout=1800, on_report=on_report)[0]


def _wrap(variant: str) -> DistributedDataParallel:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    from thinwire.hosts import attach

    torch.manual_seed(0)
    model = DistributedDataParallel(deep_mlp(), bucket_cap_mb=1024)
    if variant == PYTORCH_FP16:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif variant == PYTORCH_POWERSGD:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif variant != PLAIN:
        attach(model, variant.removeprefix("thinwire "))
    return model


def _measure(worker: Worker, steps: int) -> list[Row]:
    models = {variant: _wrap(variant) for variant in VARIANTS}
    optimizers = {v: torch.optim.SGD(m.parameters(), lr=1e-3) for v, m in models.items()}
    data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(worker.rank))

    def step(variant: str) -> float:
        began = time.perf_counter()
        optimizers[variant].zero_grad()
        models[variant](data).square().mean().backward()
        optimizers[variant].step()
        return time.perf_counter() - began

    for variant in VARIANTS:
        for _ in range(5):
            step(variant)
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(steps):
        turn = number % len(VARIANTS)
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            seconds[variant].append(step(variant))
        worker.report("time")
    rows: list[Row] = []
    for variant in VARIANTS:
        carried = _carried(lambda chosen=variant: step(chosen), worker.size)
        ratio = statistics.median(a / b for a, b in zip(seconds[variant], seconds[PLAIN], strict=True))
        rows.append(Row(variant, 1e3 * statistics.median(seconds[variant]), ratio, carried))
        worker.report("bytes")
    return rows


def _carried(step: Callable[[], Any], workers: int, steps: int = 10) -> float | None:
    if not COUNTER.exists():
        return None
    dist.barrier()
    before = int(COUNTER.read_text())
    dist.barrier()
    for _ in range(steps):
        step()
    dist.barrier()
    return (int(COUNTER.read_text()) - before) / (steps * workers)
