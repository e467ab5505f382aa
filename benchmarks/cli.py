"""`python -m benchmarks`: the commands of all benchmarks, each from its own module."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks import (
    checksums,
    digits,
    gpu_kernels,
    hsdp,
    kernels,
    language,
    language_page,
    memory,
    methods,
    overhead,
    peers,
    pieces,
    predictions,
    recovery,
    run,
    scale,
)
from benchmarks.common import Size, Threads
from thinwire.tools.cli.show import JsonFile, save
from thinwire.tools.cli.usage_errors import OneLineErrors

bench = typer.Typer(
    cls=OneLineErrors,
    help="Measure what thinwire itself costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench.command("overhead")(overhead.command)
bench.command("run")(run.command)
bench.command("kernels")(kernels.command)
bench.command("gpu-kernels")(gpu_kernels.command)
bench.command("methods")(methods.command)
bench.command("checksums")(checksums.command)
bench.command("memory")(memory.command)
bench.command("peers")(peers.command)
bench.command("hsdp")(hsdp.command)
bench.command("scale")(scale.command)
bench.command("recovery")(recovery.command)
bench.command("digits")(digits.command)
bench.command("language")(language.command)
bench.command("language-page")(language_page.command)
bench.command("pieces")(pieces.command)
bench.command("predict")(predictions.command)


@bench.command("all")
def bench_all(
    size: Size = kernels.DEFAULT_SIZE,
    threads: Threads = 1,
    steps: Annotated[int, typer.Option(min=1, help="Rounds of `overhead`.")] = 200,
    json_file: JsonFile = None,
) -> None:
    """Overhead, kernels and methods, one after the other."""
    record = {
        "overhead": overhead.report(steps),
        "kernels": kernels.report(size, threads),
        "methods": methods.report(size, threads),
    }
    save(json_file, record)
