"""How each method's bytes and rounds grow with the number of workers, on a simulated network.

The very coroutines that train run here, one per worker, in lock-step. Workers share a few gradients and
one output tensor, so that a thousand of them fit in memory; what each remembers is its own. For more workers
one of them stands for all (`thinwire.predict`), and its operations are extrapolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer

from benchmarks.common import Progress, Size, chosen_methods, measuring
from thinwire import predict
from thinwire.core.routing import View
from thinwire.drivers.simulated import Simulated
from thinwire.errors import ConfigError
from thinwire.methods.registry import list_methods, parse_exchange
from thinwire.net import costs
from thinwire.net.costs import Cost, Link
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.gradient import Session
from thinwire.tools.cli.show import JsonFile, Methods, errors, save, table

WORKERS = (4, 16, 64, 256, 1024, 4096)
# With more workers than this one stands for all.
PLAYED = 1024
DEFAULT_SIZE = 1_000_000
# Forms of a method whose growth differs from that of its default.
ALSO = (
    "topk(reduce='gather')",
    "topk(reduce='split')",
    "qsgd(reduce='gather')",
    "hierarchical(outer=topk, local=4)",
)
# Every worker of a gather decodes every other one's code of the whole tensor: hours beyond this.
DECODED_ENTRIES = 3e10
DISTINCT_GRADIENTS = 8


@dataclass(frozen=True)
class Row:
    """One method at one number of workers; bytes are per worker and step."""

    method: str
    workers: int
    sent_bytes: int
    received_bytes: int
    rounds: int
    link_seconds: float


def command(
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas.")] = ",".join(
        map(str, WORKERS)
    ),
    size: Size = DEFAULT_SIZE,
    method: Methods = None,
    json_file: JsonFile = None,
) -> None:
    """How bytes and rounds of every method grow with the workers, on a simulated network."""
    with errors():
        counts, asked = worker_counts(workers), chosen_methods(method) or line_up()
    with measuring(len(asked) * len(counts)) as progress:
        results = run(asked, counts, size, progress=progress)
    rows: list[tuple[str, ...]] = []
    for text in asked:
        own = {row.workers: row for row in results if row.method == text}
        sent = (f"{own[n].sent_bytes:,}" if n in own else "not run" for n in counts)
        rows.append((text, *sent, *_summary(list(own.values()))))
    title = f"bytes sent per worker and step, {size:,} entries, by the number of workers"
    table(title, ("method", *map(str, counts), "received at the most", "rounds", "growth"), rows)
    save(json_file, [asdict(row) for row in results])


def worker_counts(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"--workers takes numbers with commas, like 4,64, not {text!r}") from None
    if counts[0] < 1:
        raise ConfigError(f"--workers takes numbers from 1 up, not {text!r}")
    return counts


def _summary(rows: Sequence[Row]) -> tuple[str, str, str]:
    """Bytes received and rounds with the most workers, and how the bytes sent have grown until there."""
    if not rows:
        return "-", "-", "-"
    most = max(rows, key=lambda row: row.workers)
    return f"{most.received_bytes:,}", str(most.rounds), f"{growth(rows):.2f} x"


def line_up() -> list[str]:
    """Two levels only with the number of ranks per host."""
    defaults = [str(cls()) for cls in list_methods().values() if not cls().traits.two_levels]
    return defaults + [str(parse_exchange(text)) for text in ALSO]


def run(
    chosen: Sequence[str] = (),
    workers: Sequence[int] = WORKERS,
    size: int = DEFAULT_SIZE,
    link: Link | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """One step of every method at every number of workers; what would take hours is extrapolated."""
    rows: list[Row] = []
    for text in chosen or line_up():
        for count in workers:
            if progress is not None:
                progress(f"{text} x {count}")
            if count > PLAYED or not feasible(text, count, size):
                rows.append(extrapolate(text, count, size, link or Link()))
            else:
                rows.append(measure(text, count, size, link or Link()))
    return rows


def extrapolate(text: str, workers: int, size: int, link: Link) -> Row:
    """The same from one worker that stands for all, without gloo's control messages."""
    found = predict.profile(text, {"matrix": shape_of(size)}, workers, link=link, host="average", repeats=1)
    local = getattr(parse_exchange(text), "local", None) or 1
    hosts = -(-workers // local)
    steps = [[_without_control(each, hosts) for job in jobs for each in job.rounds] for jobs in found.steps]
    counted = [cost for step in steps for cost in step if cost is not None]
    return Row(
        text,
        workers,
        round(sum(cost.sent for cost in counted) / len(steps)),
        round(sum(cost.received for cost in counted) / len(steps)),
        round(found.rounds),
        sum(link.seconds_for(cost) for cost in counted) / len(steps),
    )


def _without_control(each: predict.Round, workers: int) -> Cost | None:
    """None for an operation inside a host."""
    if each.inside:
        return None
    match each.operation:
        case "all_reduce":
            return costs.all_reduce(workers, each.payload)
        case "all_gather":
            return costs.all_gather(workers, each.payload)
        case "broadcast":
            sent = received = costs.tree_children(0, workers)
        case _:
            sent = received = workers - 1
    control = costs.with_gloo_control(Cost(0, 0, 0), sent, received)
    return Cost(max(0, each.sent - control.sent), max(0, each.received - control.received), each.hops)


def shape_of(size: int) -> tuple[int, int]:
    columns = max(1, int(size**0.5))
    return max(1, size // columns), columns


def feasible(text: str, workers: int, size: int) -> bool:
    """Whether a laptop can play all workers of this method in minutes."""
    method = parse_exchange(text)
    codes_everything = getattr(method, "reduce", "") == "gather" and not hasattr(method, "ratio")
    return not codes_everything or workers**2 * size <= DECODED_ENTRIES


def measure(text: str, workers: int, size: int, link: Link) -> Row:
    """The second step: what a method sends only once, at its beginning, is not what it costs."""
    shape = shape_of(size)
    rng = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=rng).view(-1) for _ in range(min(workers, DISTINCT_GRADIENTS))]
    network = Simulated(workers, link)
    sessions = [
        Session(
            [("matrix", torch.empty(shape, device="meta"))],
            text,
            rank_info=RankInfo(rank, workers),
            link=link,
        )
        for rank in range(workers)
    ]
    layout = sessions[0].engine.layout(["matrix"], torch.device("cpu"))
    out = torch.empty(shape[0] * shape[1])
    before = network.meters[0].total
    clock = 0.0
    for _ in range(2):
        before, clock = network.meters[0].total, max(network.clocks)
        programs = [
            session.engine.program([View(layout, gradients[rank % len(gradients)], out)])
            for rank, session in enumerate(sessions)
        ]
        for session in sessions:
            session.engine.begin_step()
        committed = network.run(programs)
        for session in sessions:
            session.engine.end_step(committed)
    spent = network.meters[0].total.minus(before)
    return Row(
        text,
        workers,
        spent.sent_bytes,
        spent.received_bytes,
        spent.operations,
        max(network.clocks) - clock,
    )


def growth(rows: Sequence[Row]) -> float:
    """How much more the busiest measured worker count sends than the fewest."""
    ordered = sorted(rows, key=lambda row: row.workers)
    return ordered[-1].sent_bytes / max(1, ordered[0].sent_bytes)
