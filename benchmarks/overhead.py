"""What thinwire itself costs: its `dense` against DDP without a hook and DDP's own all-reduce hook.

All three send the same bytes, so every difference is overhead.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import (
    LAYERS,
    WIDTH,
    Progress,
    Trainers,
    deep_mlp,
    from_rank_0,
    measuring,
    median_ratio,
    show,
)
from thinwire.net.launch import Worker, run_local
from thinwire.tools.cli.show import JsonFile, save
from thinwire.tools.devices import DeviceOption, Name, checked, of_rank

BUCKETS = (1, LAYERS)
TARGET = 1.10
PLAIN, HOOK, DENSE = "no hook", "DDP's hook", "thinwire"
VARIANTS = (PLAIN, HOOK, DENSE)


@dataclass(frozen=True)
class Overhead:
    """Median step times of the three variants with one number of buckets."""

    buckets: int
    parameters: int
    milliseconds: dict[str, float]
    ratio: float
    """Median over the rounds of thinwire's step time by that of DDP's own hook in the same round."""

    @property
    def passed(self) -> bool:
        return self.ratio <= TARGET


def command(
    steps: Annotated[int, typer.Option(min=1, help="Rounds of one step of each of the three.")] = 200,
    device: DeviceOption = "cpu",
    json_file: JsonFile = None,
) -> None:
    """thinwire's dense against DDP without a hook and DDP's own all-reduce hook, interleaved."""
    save(json_file, report(steps, device))


def report(steps: int, device: Name = "cpu") -> list[dict[str, Any]]:
    """Measure and show a table; returns the record for the JSON file."""
    with measuring(len(BUCKETS) * steps) as progress:
        results = run(steps, progress=progress, device=checked(device))
    show(
        f"a step of a {results[0].parameters:,}-parameter MLP on 2 ranks ({device}), median of {steps}",
        results,
        {
            "buckets": lambda r: str(r.buckets),
            **{v: lambda r, v=v: f"{r.milliseconds[v]:.2f} ms" for v in VARIANTS},
            "thinwire / DDP's hook": lambda r: f"{r.ratio:.3f}",
            "target": lambda r: f"{TARGET:.2f}",
        },
    )
    return [{**asdict(r), "passed": r.passed} for r in results]


def run(
    steps: int = 200, workers: int = 2, progress: Progress | None = None, device: Name = "cpu"
) -> list[Overhead]:
    """One measurement per number of buckets; `progress` is called after every round."""
    on_report = from_rank_0(progress)
    return [run_local(_measure, workers, steps, count, device, on_report=on_report)[0] for count in BUCKETS]


def _wrap(variant: str, buckets: int, device: torch.device) -> DistributedDataParallel:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from thinwire.hosts import attach

    # A layer's weight alone stays just below the limit and its bias lifts it above: one bucket a layer,
    # in whichever order the two become ready.
    layer_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    limit = (layer_bytes - 64) * LAYERS / buckets / 2**20 if buckets > 1 else 1024.0
    inner = deep_mlp().to(device)
    # Each on a group of its own, as thinwire's: a group that others have just used has warmer buffers.
    group = dist.new_group()
    model = DistributedDataParallel(inner, process_group=group, bucket_cap_mb=limit)  # pyright: ignore[reportArgumentType]
    if variant == HOOK:
        model.register_comm_hook(group, allreduce_hook)
    elif variant == DENSE:
        attach(model, "dense")
    return model


def _measure(worker: Worker, steps: int, buckets: int, name: Name) -> Overhead:
    device = of_rank(name, worker.rank)
    models = {variant: _wrap(variant, buckets, device) for variant in VARIANTS}
    seconds = Trainers(models, worker.rank, device).rounds(
        steps, warm_up=max(5, steps // 10), done=lambda: worker.report(f"{buckets} buckets")
    )
    real = _bucket_count(models[DENSE])
    if real != buckets:
        raise RuntimeError(f"DDP made {real} buckets, not {buckets}: the measurement would mislead")
    return Overhead(
        buckets,
        sum(p.numel() for p in models[DENSE].parameters()),
        {variant: 1e3 * statistics.median(times) for variant, times in seconds.items()},
        median_ratio(seconds[DENSE], seconds[HOOK]),
    )


def _bucket_count(model: DistributedDataParallel) -> int:
    data: dict[str, Any] = model._get_ddp_logging_data()  # pyright: ignore[reportPrivateUsage]
    sizes = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes"))
    return len(sizes.split(","))
