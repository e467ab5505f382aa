"""`python -m benchmarks`: what thinwire itself costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.predict_command import predict
from thinwire.errors import ConfigError
from thinwire.tools.cli.show import JsonFile, Methods, errors, progress, save, table
from thinwire.tools.cli.usage_errors import OneLineErrors

if TYPE_CHECKING:
    from benchmarks.overhead import Overhead

bench = typer.Typer(
    cls=OneLineErrors,
    help="Measure what thinwire itself costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench.command()(predict)

Threads = Annotated[int, typer.Option(min=1, help="Threads for torch and the kernels.")]
Size = Annotated[int, typer.Option(min=1, help="Entries of the float32 tensor.")]


@bench.command()
def overhead(
    steps: Annotated[int, typer.Option(min=1, help="Rounds of one step of each of the three.")] = 200,
    json_file: JsonFile = None,
) -> None:
    """thinwire's dense against DDP without a hook and DDP's own all-reduce hook, interleaved."""
    save(json_file, [_overhead_record(row) for row in _overhead(steps)])


@bench.command()
def kernels(
    size: Size = 10_000_000,
    threads: Threads = 1,
    only: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Every kernel in copies of the same tensor, in GB/s, and against its torch reference."""
    save(json_file, _kernels(size, threads, only))


@bench.command("methods")
def bench_methods(
    size: Size = 10_000_000,
    threads: Threads = 1,
    method: Methods = None,
    json_file: JsonFile = None,
) -> None:
    """One `session.average` of every method at world size 1, in copies of the same tensor."""
    save(json_file, _methods(size, threads, method or ()))


@bench.command()
def peers(
    steps: Annotated[int, typer.Option(min=1, help="Rounds of one step of each.")] = 60,
    json_file: JsonFile = None,
) -> None:
    """thinwire beside the compressing hooks of PyTorch that run on gloo: time and bytes of a step."""
    save(json_file, _peers(steps))


@bench.command()
def scale(
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas.")] = "4,16,64,256,1024",
    size: Size = 1_000_000,
    method: Methods = None,
    json_file: JsonFile = None,
) -> None:
    """How bytes and rounds of every method grow with the workers, on a simulated network."""
    save(json_file, _scale(workers, size, method or ()))


@bench.command()
def digits(
    workers: Annotated[int, typer.Option(min=1, help="Local worker processes.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps for each method.")] = 150,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs with other weights and batches; the mean counts.")
    ] = 1,
    method: Methods = None,
    json_file: JsonFile = None,
) -> None:
    """Train a small network on handwritten digits with every method: accuracy and bytes, without a link."""
    with errors():
        from benchmarks import digits as module

        strings = module.line_up(method or ())
        with progress(len(strings) * steps * seeds) as advance:
            results = module.run(strings, workers, steps, seeds, lambda name, step: advance(name, 1))
    table(
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
    command = f"python -m benchmarks digits --workers {workers} --steps {steps} --seeds {seeds}"
    record = {"command": command, "workers": workers, "steps": steps, "seeds": seeds}
    save(json_file, record | {"results": [asdict(r) for r in results]})


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
    save(json_file, record)


def _overhead(steps: int) -> list[Overhead]:
    from benchmarks import overhead as module

    with errors(), progress(2 * steps) as advance:
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
    table(title, ("buckets", *module.VARIANTS, "by DDP's hook", "target"), rows)
    return results


def _overhead_record(row: Overhead) -> dict[str, Any]:
    return {**asdict(row), "passed": row.passed}


def _kernels(size: int, threads: int, only: str) -> list[dict[str, Any]]:
    from benchmarks import kernels as module

    done = 0
    with errors(), progress(None) as advance:

        def show(name: str, number: int, total: int) -> None:
            nonlocal done
            advance(name, number - done, total)
            done = number

        results = module.run(size, threads, show, only=only)
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
    table(title, ("kernel", "copies", "target", "GB/s", "faster than torch"), rows)
    if not only:
        _beside_kernels(size)
    return [{field.name: getattr(r, field.name) for field in fields(r)} for r in results]


def _beside_kernels(size: int) -> None:
    """What else kernels must be: light on memory, and out of the training thread's way."""
    from benchmarks import kernels as module

    rows = [(m.name, f"{m.temporary_bytes / 2**20:.1f} MiB") for m in module.peak_memory(size)]
    title = f"peak memory of a step beside residual and gradient ({4 * size / 2**20:.0f} MiB each)"
    table(title, ("", "more than before"), rows)
    beside = module.backward_overlap(size)
    rows = [
        ("alone", f"{beside.alone_ms:.2f} ms"),
        ("while another thread runs kernels", f"{beside.beside_kernels_ms:.2f} ms"),
        ("while another thread runs Python", f"{beside.beside_python_ms:.2f} ms"),
    ]
    table("a small forward and backward pass", ("", "median"), rows)


def _methods(size: int, threads: int, chosen: Sequence[str]) -> list[dict[str, Any]]:
    from benchmarks import methods as module
    from thinwire.methods.registry import list_methods as registered

    with errors(), progress(len(chosen or registered())) as advance:
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
    table(title, ("method", "into a new tensor", "in place", "target"), rows)
    return [asdict(r) for r in results]


def _peers(steps: int) -> list[dict[str, Any]]:
    from benchmarks import peers as module

    with errors(), progress(steps + len(module.VARIANTS)) as advance:
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
    table(title, ("", "time", "by plain DDP", "bytes on the interface"), rows)
    return [asdict(r) for r in results]


def _scale(workers: str, size: int, chosen: Sequence[str]) -> list[dict[str, Any]]:
    from benchmarks import scale as module

    with errors():
        try:
            counts = sorted({int(part) for part in workers.split(",")})
        except ValueError:
            raise ConfigError(f"--workers takes numbers with commas, like 4,64, not {workers!r}") from None
        if not counts or counts[0] < 1:
            raise ConfigError(f"--workers takes numbers from 1 up, not {workers!r}")
        asked = list(chosen) or module.line_up()
        with progress(len(asked) * len(counts)) as advance:
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
    table(title, header, rows)
    return [asdict(row) for row in results]
