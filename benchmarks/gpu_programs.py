"""Compile Triton programs ahead of time, for devices that are not here, and read what they will use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
TILE = 1024
STEP = 8192
PACKAGE = "thinwire.kernels.triton.programs"

Launch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Use:
    """Registers of a thread, bytes of shared memory of a program, and bytes of registers spilled."""

    registers: int
    shared: int
    spilled: int


def programs() -> dict[str, Any]:
    """Every program that is launched (not a function that programs call), by "module.name"."""
    from triton.runtime.jit import JITFunction

    found: dict[str, Any] = {}
    called: set[str] = set()
    folder = Path(import_module(PACKAGE).__file__ or "").parent
    for file in sorted(folder.glob("[a-z]*.py")):
        module = import_module(f"{PACKAGE}.{file.stem}")
        text = file.read_text()
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__:
                found[f"{file.stem}.{name}"] = value
        called |= set(re.findall(r"(?<!def )\b(\w+)\(", text))
    return {name: value for name, value in found.items() if name.partition(".")[2] not in called}


def name_of(launch: Launch) -> str:
    return f"{launch['module'].rpartition('.')[2]}.{launch['name']}"


def one_of_each(launches: Sequence[Launch]) -> dict[str, Launch]:
    """For every program the launch with the most tensors: the one that does the most."""
    found: dict[str, Launch] = {}
    for launch in launches:
        name = name_of(launch)
        if name not in found or _tensors(launch) > _tensors(found[name]):
            found[name] = launch
    return found


def _tensors(launch: Launch) -> int:
    return sum(kind.startswith("*") for kind in launch["types"].values())


def compiled(launch: Launch, target: str) -> Any:
    """The compiled program, for a target of `TARGETS`; tiles are as large as on a device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(import_module(launch["module"]), launch["name"])
    constants = dict(launch["constants"])
    for name, size in (("BLOCK", TILE), ("BLOCKS", TILE // 64), ("STEP", STEP)):
        if name in constants:
            constants[name] = size
    if "SIZE" in constants and "ROWS" in constants:  # chunks of a program
        constants["ROWS"] = max(1, TILE // constants["SIZE"])
    source = ASTSource(fn=function, signature=launch["types"], constexprs=constants)
    return cast(Any, triton.compile)(source, target=GPUTarget(*TARGETS[target]), options=launch["settings"])


def use_of(program: Any) -> Use:
    """From the artefact: the compiler's own notes in AMD's assembly, `cuobjdump` for a cubin."""
    shared = int(program.metadata.shared)
    if "amdgcn" in program.asm:
        notes = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", program.asm["amdgcn"]))
        return Use(int(notes["vgpr_count"]), shared, int(notes["private_segment_fixed_size"]))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [_cuobjdump(), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", text)[0]
    return Use(int(registers), shared, int(stack))


def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
