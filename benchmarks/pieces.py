"""Large gathers and all-to-alls on slow links: in one operation, and in pieces, as sessions send them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from benchmarks.common import Progress, measuring, show
from benchmarks.predictions import check_links
from thinwire.core.channel import Channel, together
from thinwire.drivers.blocking import Blocking
from thinwire.net import costs
from thinwire.net.costs import Link
from thinwire.net.executor import ProcessGroupExecutor
from thinwire.net.groups import private_groups
from thinwire.net.launch import Worker, run_local
from thinwire.net.link import slowest_link
from thinwire.net.meter import Meter
from thinwire.net.rank_info import RankInfo
from thinwire.tools.cli.show import JsonFile, errors, save
from thinwire.tools.lab.hosts import hosts_for

LINKS = ("lab:10mbit", "lab:50mbit", "lab:100mbit")
WORKERS = (2, 4)
TIMES = 5
WHOLE = Link()
"""By this link nothing is cut into pieces."""


@dataclass(frozen=True)
class Row:
    """Seconds of one operation; medians, of the slowest rank."""

    link: str
    workers: int
    operation: str
    whole: float
    pieces: float
    bytes_alone: float
    """What its bytes take on the link, with their TCP and Ethernet headers."""


def command(
    link: Annotated[
        list[str] | None, typer.Option(help="Such as lab:10mbit; may be given several times.")
    ] = None,
    workers: Annotated[
        list[int] | None, typer.Option(min=2, help="Hosts; may be given several times.")
    ] = None,
    size: Annotated[int, typer.Option(min=1000, help="Bytes that a rank has for each other one.")] = 480_000,
    json_file: JsonFile = None,
) -> None:
    """Large gathers and all-to-alls, in one operation and in pieces, on slow links (needs root)."""
    links, counts = link or list(LINKS), workers or list(WORKERS)
    with errors():
        check_links(links)
    with measuring(len(links) * len(counts)) as progress:
        rows = [row for count in counts for row in run(links, count, size, progress)]
    show(
        f"{size:,} bytes for each other rank, in milliseconds",
        rows,
        {
            "hosts": lambda r: str(r.workers),
            "link": lambda r: r.link.removeprefix("lab:"),
            "operation": lambda r: r.operation,
            "by its bytes": lambda r: f"{1e3 * r.bytes_alone:.0f}",
            "at once": lambda r: f"{1e3 * r.whole:.0f}",
            "in pieces": lambda r: f"{1e3 * r.pieces:.0f}",
            "at once / in pieces": lambda r: f"{r.whole / r.pieces:.2f}",
        },
    )
    save(json_file, [asdict(row) for row in rows])


def run(links: Sequence[str], workers: int, size: int, progress: Progress | None = None) -> list[Row]:
    rows: list[Row] = []

    def on_report(rank: int, message: object) -> None:
        if rank == 0 and isinstance(message, Row):
            rows.append(message)

    for text in links:
        with hosts_for(text, workers) as hosts:
            run_local(
                _work, workers, text, size, timeout=1800, group_timeout=300, on_report=on_report, hosts=hosts
            )
        if progress is not None:
            progress(f"{text}, {workers} hosts")
    return rows


def _work(worker: Worker, text: str, size: int) -> None:
    torch.set_num_threads(1)
    link = slowest_link(text)
    (group,) = private_groups(None, 1)
    executor = ProcessGroupExecutor(group, Meter())
    moved = costs.TCP_FRAMING * (worker.size - 1) * size
    for operation in ("gather", "all-to-all"):
        taken: dict[Link, list[float]] = {WHOLE: [], link: []}
        for _ in range(1 + TIMES):  # in turn, so that what disturbs one disturbs the other
            for by, own in taken.items():
                own.append(_seconds(operation, size, worker, executor, by))
        whole, pieces = (statistics.median(own[1:]) for own in taken.values())
        worker.report(Row(text, worker.size, operation, whole, pieces, link.seconds(0, moved)))
    executor.close()


def _seconds(operation: str, size: int, worker: Worker, executor: ProcessGroupExecutor, link: Link) -> float:
    """Of the rank that takes longest."""
    rank_info = RankInfo(worker.rank, worker.size)
    ch = Channel(rank_info, step=0, seed=0, key="", device=torch.device("cpu"), link=link)
    block = torch.zeros(size, dtype=torch.uint8)

    async def task() -> None:
        if operation == "gather":
            await ch.gather([block])
        else:
            await ch.scatter([[block]] * worker.size)

    dist.barrier()
    began = time.perf_counter()
    Blocking(executor.execute).run(together([task()], rank_info, step=0, mark=0, link=link))
    told = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)
