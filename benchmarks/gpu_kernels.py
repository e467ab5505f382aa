"""What the GPU kernels will use, without a GPU: registers and shared memory of every program, compiled ahead
of time, and the memory passes of every kernel, counted in Triton's interpreter, beside those on the CPU.

The kernels that `torch.compile` makes are not in these tables: how it fuses them shows on a device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import measuring, show
from benchmarks.gpu_programs import TARGETS, Launch, compiled, one_of_each, use_of
from thinwire.tools.cli.show import JsonFile, save

ROOT = Path(__file__).parents[1]


def command(
    only: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Registers, shared memory and memory passes of the Triton kernels; needs no GPU."""
    save(json_file, report(only))


def report(only: str = "") -> dict[str, Any]:
    """Interpret, compile and show two tables; returns the record for the JSON file."""
    cases = interpreted(only)
    show(
        "memory passes (1 = the bytes of the tensor, read or written)",
        cases,
        {
            "kernel": lambda case: case["name"],
            "Triton": lambda case: f"{case['passes']:.2f}",
            "CPU": lambda case: f"{case['cpu']:.2f}",
            "lists and tables (Triton)": lambda case: f"{case['lists']:.2f}",
            "programs": lambda case: str(len({launch["name"] for launch in case["launches"]})),
        },
    )
    chosen = one_of_each([launch for case in cases for launch in case["launches"]])
    rows: list[dict[str, Any]] = []
    with measuring(len(chosen)) as progress:
        for name, launch in sorted(chosen.items()):
            progress(name)
            rows.append({"program": name, **_uses(launch)})
    show(
        "registers of a thread / bytes of shared memory / bytes spilled",
        rows,
        {
            "program": lambda row: row["program"],
            **{t: lambda row, t=t: "/".join(map(str, row[t])) for t in TARGETS},
        },
    )
    slim = [{key: case[key] for key in ("name", "passes", "lists", "cpu")} for case in cases]
    return {"passes": slim, "programs": rows}


def interpreted(only: str) -> list[dict[str, Any]]:
    """The record of every case whose name contains `only`, from a process in which Triton interprets."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_interpreted", only],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


def _uses(launch: Launch) -> dict[str, tuple[int, int, int]]:
    uses = {target: use_of(compiled(launch, target)) for target in TARGETS}
    return {target: (use.registers, use.shared, use.spilled) for target, use in uses.items()}
