"""A transformer sharded by FSDP2, with replicas on two hosts of the lab: native HSDP beside thinwire.

Each host has two ranks, which hold the two shards of one replica. Between the hosts is a slow link; bytes are
those that the kernel counts on it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.common import Progress, Trainers, from_rank_0, measuring, median_ratio, show
from thinwire.hosts import attach
from thinwire.net.launch import Worker, run_local
from thinwire.tools.cli.show import JsonFile, save
from thinwire.tools.lab.hosts import hosts_for
from thinwire.tools.lab.inside import Counters, counters

NATIVE = "native HSDP"
METHODS = ("dense", "qsgd(bits=4)", "topk(ratio=0.01)", "powersgd(rank=4)")
VARIANTS = (NATIVE, *(f"thinwire {method}" for method in METHODS))
HOSTS, SHARDS = 2, 2
WORDS, WIDTH, DEPTH, HEADS, LENGTH, BATCH = 1024, 256, 6, 4, 32, 2
WARM_UP = 2


@dataclass(frozen=True)
class Row:
    """One variant; the ratio is the median of step times by those of native HSDP in the same round."""

    variant: str
    milliseconds: float
    ratio: float
    bytes_per_step: float | None
    """What a host sends to the other, TCP/IP headers included; None outside of the lab."""


def command(
    link: Annotated[str, typer.Option(help="Between the hosts; the lab needs root.")] = "lab:100mbit",
    steps: Annotated[int, typer.Option(min=1, help="Rounds of one step of each.")] = 15,
    json_file: JsonFile = None,
) -> None:
    """A 5 M-parameter transformer on 2 replicas x 2 shards between two hosts: time and bytes of a step."""
    with measuring(steps + len(VARIANTS)) as progress:
        results, size = run(link, steps, progress)
    show(
        f"a step of a {size / 1e6:.1f} M-parameter transformer, 2 replicas x 2 shards, {link} between them",
        results,
        {
            "": lambda r: r.variant,
            "time": lambda r: f"{r.milliseconds:,.0f} ms",
            "time / native": lambda r: f"{r.ratio:.2f}",
            "bytes to the other host": lambda r: (
                "unknown" if r.bytes_per_step is None else f"{r.bytes_per_step:,.0f}"
            ),
        },
    )
    save(json_file, [asdict(r) for r in results])


def run(link: str, steps: int, progress: Progress | None = None) -> tuple[list[Row], int]:
    """The rows, and the number of parameters."""
    with hosts_for(link, HOSTS) as hosts:
        places = None if hosts is None else [host for host in hosts for _ in range(SHARDS)]
        report = from_rank_0(progress)
        return run_local(_measure, HOSTS * SHARDS, steps, timeout=1800, on_report=report, hosts=places)[0]


class Transformer(nn.Module):
    """Predicts the next word; the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(0, 1))


class _Trainers(Trainers):
    """The same turns with words for data."""

    def step(self, name: str) -> None:
        rng = torch.Generator().manual_seed(dist.get_rank())
        words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=rng)
        self.optimizers[name].zero_grad()
        predicted = self.models[name](words[:, :-1])
        nn.functional.cross_entropy(predicted, words[:, 1:].flatten()).backward()
        self.optimizers[name].step()


def _sharded(variant: str, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model, over = Transformer(), mesh if variant == NATIVE else mesh["shard"]
    for part in (*model.layers, model.head):
        fully_shard(part, mesh=over)
    fully_shard(model, mesh=over)
    if variant != NATIVE:
        attach(model, variant.removeprefix("thinwire "), process_group=mesh["replicate"].get_group())
    return model


def _measure(worker: Worker, steps: int) -> tuple[list[Row], int]:
    mesh = init_device_mesh("cpu", (HOSTS, SHARDS), mesh_dim_names=("replicate", "shard"))
    models = {variant: _sharded(variant, mesh) for variant in VARIANTS}
    trainers = _Trainers(cast(Any, models), worker.rank)
    times = trainers.rounds(steps, warm_up=WARM_UP, done=lambda: worker.report("time"))
    rows: list[Row] = []
    for variant, seconds in times.items():
        sent = _sent(lambda chosen=variant: trainers.step(chosen))
        milliseconds = 1e3 * statistics.median(seconds)
        rows.append(Row(variant, milliseconds, median_ratio(seconds, times[NATIVE]), sent))
        worker.report("bytes")
    return rows, sum(p.numel() for p in models[NATIVE].parameters())


def _sent(step: Callable[[], Any], steps: int = 3) -> float | None:
    dist.barrier()
    before: Counters | None = counters()
    for _ in range(steps):
        step()
    dist.barrier()
    after = counters()
    return None if before is None or after is None else (after.sent - before.sent) / steps
