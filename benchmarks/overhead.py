"""What thinwire itself costs: its `dense` against DDP without a hook and DDP's own all-reduce hook.

Both send the same bytes, so every difference is overhead. The three models take their steps in turn, one
step each, in an order that rotates: what disturbs the machine disturbs all three.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.net.launch import Worker, run_local

LAYERS, WIDTH, BATCH = 20, 360, 32
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


def run(
    steps: int = 200,
    workers: int = 2,
    buckets: tuple[int, ...] = (1, LAYERS),
    progress: Callable[[int], None] | None = None,
) -> list[Overhead]:
    """One measurement per number of buckets; `progress` is told of every step of all three."""

    def on_report(rank: int, count: int) -> None:
        if rank == 0 and progress is not None:
            progress(count)

    return [run_local(_measure, workers, steps, count, on_report=on_report)[0] for count in buckets]


def deep_mlp() -> nn.Module:
    """2.6 million parameters in equal layers."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def _wrap(variant: str, buckets: int) -> DistributedDataParallel:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from thinwire.hosts import attach

    torch.manual_seed(0)
    module = deep_mlp()
    # A layer's weight alone stays just below the limit and its bias lifts it above: one bucket a layer,
    # in whichever order the two become ready.
    layer_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    limit = (layer_bytes - 64) * LAYERS / buckets / 2**20 if buckets > 1 else 1024.0
    model = DistributedDataParallel(module, bucket_cap_mb=limit)  # pyright: ignore[reportArgumentType]
    if variant == HOOK:
        model.register_comm_hook(None, allreduce_hook)
    elif variant == DENSE:
        attach(model, "dense")
    return model


def _measure(worker: Worker, steps: int, buckets: int) -> Overhead:
    models = {variant: _wrap(variant, buckets) for variant in VARIANTS}
    optimizers = {v: torch.optim.SGD(m.parameters(), lr=1e-3) for v, m in models.items()}
    data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(worker.rank))
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    warm_up = max(5, steps // 10)
    for step in range(warm_up + steps):
        turn = step % len(VARIANTS)
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            began = time.perf_counter()
            optimizers[variant].zero_grad()
            models[variant](data).square().mean().backward()
            optimizers[variant].step()
            if step >= warm_up:
                seconds[variant].append(time.perf_counter() - began)
        if step >= warm_up:
            worker.report(1)
    real = _bucket_count(models[DENSE])
    if real != buckets:
        raise RuntimeError(f"DDP made {real} buckets, not {buckets}: the measurement would mislead")
    return Overhead(
        buckets,
        sum(p.numel() for p in models[DENSE].parameters()),
        {variant: 1e3 * statistics.median(times) for variant, times in seconds.items()},
        statistics.median(a / b for a, b in zip(seconds[DENSE], seconds[HOOK], strict=True)),
    )


def _bucket_count(model: DistributedDataParallel) -> int:
    data: dict[str, Any] = model._get_ddp_logging_data()  # pyright: ignore[reportPrivateUsage]
    sizes = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes"))
    return len(sizes.split(","))
