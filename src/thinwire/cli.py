"""The `thinwire` command."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.bench.overhead import Overhead

app = typer.Typer(
    help="Train PyTorch models over thin wires: the same accuracy for a small part of the bytes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure what thinwire itself costs.", no_args_is_help=True)
app.add_typer(bench, name="bench")

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as JSON, too.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method", "-m", help='Such as "topk(ratio=0.01)"; may be given several times. Default: all.'
    ),
]
Threads = Annotated[int, typer.Option(min=1, help="Threads for torch and the kernels.")]
Size = Annotated[int, typer.Option(min=1, help="Entries of the float32 tensor.")]


@app.callback()
def main() -> None:
    """Train PyTorch models over thin wires: the same accuracy for a small part of the bytes."""


@app.command()
def demo(
    workers: Annotated[int, typer.Option(min=1, help="Local worker processes.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps for each method.")] = 150,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs with other weights and batches; the mean counts.")
    ] = 1,
    method: Methods = None,
    json_file: JsonFile = None,
) -> None:
    """Train a small network on handwritten digits, dense and with each method, and compare."""
    with _errors():
        from thinwire.bench import digits

        strings = digits.line_up(method or ())
        with _progress(len(strings) * steps * seeds) as advance:
            results = digits.run(strings, workers, steps, seeds, lambda name, step: advance(name, 1))
    _table(
        f"digits, {workers} workers, {steps} steps; bytes per step and worker",
        ("method", "accuracy", "payload", "rounds", "sent", "of dense"),
        [
            (
                r.method,
                f"{100 * r.accuracy:.1f} %",
                f"{r.payload:,.0f}",
                f"{r.rounds:.3g}",
                f"{r.sent:,.0f}",
                f"{r.ratio:.4f}",
            )
            for r in results
        ],
    )
    command = f"thinwire demo --workers {workers} --steps {steps} --seeds {seeds}"
    record = {"command": command, "workers": workers, "steps": steps, "seeds": seeds}
    _save(json_file, record | {"results": [asdict(r) for r in results]})


@app.command()
def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write the page of all methods to this file.")] = None,
    digits: Annotated[Path | None, typer.Option(help="Results for the page, by `demo --json`.")] = None,
) -> None:
    """List the methods: options with their defaults, and what may be relied on."""
    from thinwire.registry import methods as registered

    if page is not None:
        from thinwire.pages import methods_page

        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(methods_page(json.loads(digits.read_text()) if digits is not None else None))
        return
    described: list[dict[str, Any]] = []
    for name, cls in registered().items():
        instance = cls()
        described.append(
            {
                "name": name,
                "options": instance.options(),
                "traits": asdict(instance.traits),
                "summary": (cls.__doc__ or "").strip().splitlines()[0],
            }
        )
    if as_json:
        _console().print_json(json.dumps(described))
        return
    rows = [
        (
            one["name"],
            ", ".join(f"{key}={value!r}" for key, value in one["options"].items()) or "-",
            ", ".join(key for key, value in one["traits"].items() if value is True) or "-",
            one["summary"],
        )
        for one in described
    ]
    _table("methods", ("name", "options", "traits", ""), rows, numbers=False)


@bench.command()
def overhead(
    steps: Annotated[int, typer.Option(min=1, help="Rounds of one step of each of the three.")] = 200,
    json_file: JsonFile = None,
) -> None:
    """thinwire's dense against DDP without a hook and DDP's own all-reduce hook, interleaved."""
    _save(json_file, [_overhead_record(row) for row in _overhead(steps)])


@bench.command()
def kernels(
    size: Size = 10_000_000,
    threads: Threads = 1,
    only: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Every kernel in copies of the same tensor, in GB/s, and against its torch reference."""
    _save(json_file, _kernels(size, threads, only))


@bench.command("methods")
def bench_methods(
    size: Size = 10_000_000,
    threads: Threads = 1,
    method: Methods = None,
    json_file: JsonFile = None,
) -> None:
    """One `session.average` of every method at world size 1, in copies of the same tensor."""
    _save(json_file, _methods(size, threads, method or ()))


@bench.command()
def peers(
    steps: Annotated[int, typer.Option(min=1, help="Rounds of one step of each.")] = 60,
    json_file: JsonFile = None,
) -> None:
    """thinwire beside the compressing hooks of PyTorch that run on gloo: time and bytes of a step."""
    _save(json_file, _peers(steps))


@bench.command()
def scale(
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas.")] = "4,16,64,256,1024",
    size: Size = 1_000_000,
    method: Methods = None,
    json_file: JsonFile = None,
) -> None:
    """How bytes and rounds of every method grow with the workers, on a simulated network."""
    _save(json_file, _scale(workers, size, method or ()))


@bench.command("all")
def bench_all(
    size: Size = 10_000_000,
    threads: Threads = 1,
    steps: Annotated[int, typer.Option(min=1, help="Rounds of `overhead`.")] = 200,
    json_file: JsonFile = None,
) -> None:
    """Overhead, kernels and methods, one after the other."""
    record = {
        "overhead": [_overhead_record(row) for row in _overhead(steps)],
        "kernels": _kernels(size, threads, ""),
        "methods": _methods(size, threads, ()),
    }
    _save(json_file, record)


def _overhead(steps: int) -> list[Overhead]:
    from thinwire.bench import overhead as module

    with _errors(), _progress(2 * steps) as advance:
        results = module.run(steps, progress=lambda count: advance("overhead", count))
    rows = [
        (
            str(r.buckets),
            *(f"{r.milliseconds[variant]:.2f} ms" for variant in module.VARIANTS),
            f"{r.ratio:.3f}",
            f"{module.TARGET:.2f}",
        )
        for r in results
    ]
    title = f"a step of a {results[0].parameters:,}-parameter MLP on 2 ranks, median of {steps}"
    _table(title, ("buckets", *module.VARIANTS, "by DDP's hook", "target"), rows)
    return results


def _overhead_record(row: Overhead) -> dict[str, Any]:
    return {**asdict(row), "passed": row.passed}


def _kernels(size: int, threads: int, only: str) -> list[dict[str, Any]]:
    from thinwire.bench import kernels as module

    done = 0
    with _errors(), _progress(None) as advance:

        def progress(name: str, number: int, total: int) -> None:
            nonlocal done
            advance(name, number - done, total)
            done = number

        results = module.run(size, threads, progress, only=only)
    rows = [
        (
            r.name,
            f"{r.copies:.2f}",
            "-" if r.target is None else f"{r.target:.2f}",
            f"{r.gb_per_s:.1f}",
            f"{r.reference_ratio:.1f} x",
        )
        for r in results
    ]
    title = f"kernels, {size:,} entries, {threads} thread{'s' * (threads > 1)}"
    _table(title, ("kernel", "copies", "target", "GB/s", "faster than torch"), rows)
    if not only:
        _beside_kernels(size)
    return [{field.name: getattr(r, field.name) for field in fields(r)} for r in results]


def _beside_kernels(size: int) -> None:
    """What else kernels must be: light on memory, and out of the training thread's way."""
    from thinwire.bench import kernels as module

    rows = [(m.name, f"{m.temporary_bytes / 2**20:.1f} MiB") for m in module.peak_memory(size)]
    title = f"peak memory of a step beside residual and gradient ({4 * size / 2**20:.0f} MiB each)"
    _table(title, ("", "more than before"), rows)
    beside = module.backward_overlap(size)
    rows = [
        ("alone", f"{beside.alone_ms:.2f} ms"),
        ("while another thread runs kernels", f"{beside.beside_kernels_ms:.2f} ms"),
        ("while another thread runs Python", f"{beside.beside_python_ms:.2f} ms"),
    ]
    _table("a small forward and backward pass", ("", "median"), rows)


def _methods(size: int, threads: int, chosen: Sequence[str]) -> list[dict[str, Any]]:
    from thinwire.bench import methods as module
    from thinwire.registry import methods as registered

    with _errors(), _progress(len(chosen or registered())) as advance:
        results = module.run(chosen, size, threads=threads, progress=lambda name: advance(name, 1))
    rows = [
        (
            r.method,
            f"{r.copies:.2f}",
            f"{r.copies_in_place:.2f}",
            "-" if r.target is None else f"{r.target:.2f}",
        )
        for r in results
    ]
    title = f"session.average at world size 1, {size:,} entries, in copies of the tensor"
    _table(title, ("method", "into a new tensor", "in place", "target"), rows)
    return [asdict(r) for r in results]


def _peers(steps: int) -> list[dict[str, Any]]:
    from thinwire.bench import peers as module

    with _errors(), _progress(steps + len(module.VARIANTS)) as advance:
        results = module.run(steps, progress=lambda what: advance(what, 1))
    rows = [
        (
            r.variant,
            f"{r.milliseconds:.1f} ms",
            f"{r.ratio:.2f}",
            "unknown" if r.bytes_per_step is None else f"{r.bytes_per_step:,.0f}",
        )
        for r in results
    ]
    title = "a step of a 2.6 M-parameter MLP on 2 ranks over loopback, one bucket"
    _table(title, ("", "time", "by plain DDP", "bytes on the interface"), rows)
    return [asdict(r) for r in results]


def _scale(workers: str, size: int, chosen: Sequence[str]) -> list[dict[str, Any]]:
    from thinwire.bench import scale as module

    with _errors():
        try:
            counts = sorted({int(part) for part in workers.split(",")})
        except ValueError:
            raise ConfigError(f"--workers takes numbers with commas, like 4,64, not {workers!r}") from None
        if not counts or counts[0] < 1:
            raise ConfigError(f"--workers takes numbers from 1 up, not {workers!r}")
        asked = list(chosen) or module.line_up()
        with _progress(len(asked) * len(counts)) as advance:
            results = module.run(asked, counts, size, progress=lambda name, n: advance(f"{name} x {n}", 1))
    rows: list[tuple[str, ...]] = []
    for text in asked:
        own = {row.workers: row for row in results if row.method == text}
        sent = (f"{own[n].sent_bytes:,}" if n in own else "not run" for n in counts)
        last = own[max(own)]
        received = f"{last.received_bytes:,}"
        rows.append((text, *sent, received, str(last.rounds), f"{module.growth(list(own.values())):.2f} x"))
    title = f"bytes sent per worker and step, {size:,} entries, by the number of workers"
    header = ("method", *map(str, counts), "received at the most", "rounds", "growth")
    _table(title, header, rows)
    return [asdict(row) for row in results]


# -- how things are shown ---------------------------------------------------------------------------------


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:  # a file or a pipe has room for the whole table
        console.width = 140
    return console


@contextmanager
def _errors() -> Generator[None, None, None]:
    """A mistake in what was asked for is one line and exit code 2, not a traceback."""
    try:
        yield
    except ConfigError as error:
        typer.echo(f"thinwire: {error}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def _progress(total: int | None) -> Generator[Callable[..., None], None, None]:
    """Gives `advance(description, count, total=None)`; the bar goes to the terminal's error output."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)

        def advance(description: str, count: int, new_total: int | None = None) -> None:
            bar.update(task, description=description, advance=count, total=new_total or total)

        yield advance


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, name in enumerate(header):
        # Figures are never cut; a long method string is folded instead.
        figure = numbers and number > 0
        table.add_column(name, justify="right" if figure else "left", no_wrap=figure, overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def _save(path: Path | None, record: object) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n")
