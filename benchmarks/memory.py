"""How much memory each method needs: its state between steps, and what a step allocates beyond that.

Every method runs on two ranks, in two new processes, with one float32 matrix. State is what the checkpoint
of a session holds. The peak is the growth of rank 0's resident memory during `session.average` in place (or
`session.sync`), by the kernel's own count; state, gradient and model are not part of it. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from benchmarks.common import Progress, Size, chosen_methods, from_rank_0, measuring, show
from thinwire.averaging.base import Schedule
from thinwire.methods.registry import list_methods, list_schedules, parse
from thinwire.net.launch import Worker, run_local
from thinwire.tools.cli.show import JsonFile, Methods, save

DEFAULT_SIZE = 10_000_000
STEPS = 3
# Wrappers need the memory of what they wrap.
WRAPPERS = {"warmup", "route", "hierarchical", "delayed", "periodic"}


@dataclass(frozen=True)
class Row:
    """Bytes per parameter: kept between steps, and allocated during a step on top of it."""

    method: str
    state: float
    peak: float


def command(
    size: Size = DEFAULT_SIZE,
    method: Methods = None,
    json_file: JsonFile = None,
    page: Annotated[Path | None, typer.Option(help="Write the table into this Markdown page.")] = None,
) -> None:
    """State and peak memory of every method, in bytes per parameter."""
    rows = run(size, chosen_methods(method))
    if page is not None:
        page.write_text(filled(page.read_text(), rows))
    save(json_file, [asdict(row) for row in rows])


def run(size: int, chosen: Sequence[str] = ()) -> list[Row]:
    """Measure and show a table."""
    known = [name for name in {**list_methods(), **list_schedules()} if name not in WRAPPERS]
    strings = [str(parse(text)) for text in (chosen or known)]
    with measuring(len(strings)) as progress:
        rows = [_measured(text, size, progress) for text in strings]
    show(
        f"memory of rank 0 of 2, {size:,} float32 parameters, in bytes per parameter",
        rows,
        {
            "method": lambda r: r.method,
            "state": lambda r: f"{r.state:.1f}",
            "peak of a step": lambda r: f"{r.peak:.1f}",
        },
    )
    return rows


def filled(page: str, rows: Sequence[Row]) -> str:
    """The page with this table between its two marks."""
    before, _, rest = page.partition("<!-- table -->\n")
    _, _, after = rest.partition("<!-- end of table -->")
    lines = ["| method | state | peak of a step |", "|---|---|---|"]
    lines += [f"| `{row.method}` | {row.state:.1f} | {row.peak:.1f} |" for row in rows]
    return "\n".join([f"{before}<!-- table -->", *lines, f"<!-- end of table -->{after}"])


def _measured(method: str, size: int, progress: Progress) -> Row:
    row = run_local(_measure, 2, method, size, timeout=600, on_report=from_rank_0(progress))[0]
    return cast(Row, row)


def _measure(worker: Worker, method: str, size: int) -> Row:
    worker.report(method)
    torch.set_num_threads(1)
    columns = max(1, int(size**0.5))
    shape = (max(1, size // columns), columns)
    entries = shape[0] * shape[1]
    chosen = parse(method)
    measure = _of_schedule if isinstance(chosen, Schedule) else _of_exchange
    state, peak = measure(method, shape)
    return Row(method, state / entries, peak / entries)


def _of_exchange(method: str, shape: tuple[int, int]) -> tuple[int, int]:
    from thinwire.sessions.gradient import Session

    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    session = Session([("weight", torch.zeros(shape))], method)
    peak = 0
    for number in range(STEPS):
        work = gradient.clone()
        grown = _growth(lambda given=work: session.average({"weight": given}, in_place=True))
        peak = max(peak, grown if number else 0)  # the first step makes the state
    return _bytes(session.sealed()["state"]), peak


def _of_schedule(method: str, shape: tuple[int, int]) -> tuple[int, int]:
    from thinwire.sessions.periodic import PeriodicSession

    model = torch.nn.Linear(shape[1], shape[0], bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = PeriodicSession(model, cast(Schedule, parse(method)), optimizer)
    peak = 0
    for number in range(STEPS):
        with torch.no_grad():
            model.weight.mul_(0.99)
        session.clock.tick()
        grown = _growth(session.sync)
        peak = max(peak, grown if number else 0)
    saved = session.sealed()
    kept = {name: saved[name] for name in ("anchors", "velocities")}
    return _bytes(kept) + _bytes(saved["engine"]["state"]), peak


def _bytes(entries: Any) -> int:
    """Of all tensors in nested mappings."""
    if isinstance(entries, torch.Tensor):
        return entries.numel() * entries.element_size()
    if isinstance(entries, Mapping):
        return sum(_bytes(value) for value in cast("Mapping[str, Any]", entries).values())
    return 0


def _growth(action: Callable[[], object]) -> int:
    """The largest resident memory during the action, over that before it, in bytes."""
    gc.collect()
    _trim()
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts again from here
    begin = _status("VmRSS")
    action()
    return max(0, _status("VmHWM") - begin)


def _status(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def _trim() -> None:
    """Give freed memory back, so that it is not mistaken for memory in use."""
    ctypes.CDLL(None).malloc_trim(0)
