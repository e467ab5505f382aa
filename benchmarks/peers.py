"""thinwire beside the compressing hooks that PyTorch ships and that run on gloo.

PyTorch's PowerSGD hook works on gloo with one bucket only, so all models here have one. Bytes are those of
the loopback interface, so nobody's own counting is trusted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Progress, Trainers, deep_mlp, from_rank_0, measuring, median_ratio, show
from thinwire.net.launch import Worker, run_local
from thinwire.tools.cli.show import JsonFile, save

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


def command(
    steps: Annotated[int, typer.Option(min=1, help="Rounds of one step of each.")] = 60,
    json_file: JsonFile = None,
) -> None:
    """thinwire beside the compressing hooks of PyTorch that run on gloo: time and bytes of a step."""
    with measuring(steps + len(VARIANTS)) as progress:
        results = run(steps, progress=progress)
    show(
        "a step of a 2.6 M-parameter MLP on 2 ranks over loopback, one bucket",
        results,
        {
            "": lambda r: r.variant,
            "time": lambda r: f"{r.milliseconds:.1f} ms",
            "time / plain DDP": lambda r: f"{r.ratio:.2f}",
            "bytes on the interface": lambda r: (
                "unknown" if r.bytes_per_step is None else f"{r.bytes_per_step:,.0f}"
            ),
        },
    )
    save(json_file, [asdict(r) for r in results])


def run(steps: int = 60, workers: int = 2, progress: Progress | None = None) -> list[Row]:
    return run_local(_measure, workers, steps, timeout=1800, on_report=from_rank_0(progress))[0]


def _wrap(variant: str) -> DistributedDataParallel:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    from thinwire.hosts import attach

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
    trainers = Trainers({variant: _wrap(variant) for variant in VARIANTS}, worker.rank)
    seconds = trainers.rounds(steps, warm_up=5, done=lambda: worker.report("time"))
    rows: list[Row] = []
    for variant, times in seconds.items():
        carried = _carried(lambda chosen=variant: trainers.step(chosen), worker.size)
        ratio = median_ratio(times, seconds[PLAIN])
        rows.append(Row(variant, 1e3 * statistics.median(times), ratio, carried))
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
