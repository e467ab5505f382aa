"""What Triton's interpreter runs: the programs with the types of their arguments, and the bytes they move.

Only for a process with TRITON_INTERPRET=1. Bytes are those of the distinct addresses of every load, store and
atomic, and of the tensors that torch's own operations read and write; that a whole cache line is read for one
entry of it is not seen. Memory of the size of the tensor is told from lists, tables and candidates.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_SETTINGS = ("num_warps", "enable_fp_fusion")
_NOT_MOVED = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view", "lift_fresh")
_ONLY_WRITTEN = ("zero_", "fill_", "copy_")

Launch = dict[str, Any]
"""Module and name of a program, `types` and `constants` by parameter, and `settings`."""


@dataclass(slots=True)
class Record:
    """All launches, each kind once, and the bytes moved in memory of at least `large` bytes, and in other."""

    large: int = 0
    launches: list[Launch] = field(default_factory=list[Launch])
    tensor_bytes: int = 0
    list_bytes: int = 0

    def add(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        launch: Launch = {
            "module": function.__module__,
            "name": function.__name__,
            "types": {},
            "constants": {},
        }
        launch["settings"] = {key: named[key] for key in _SETTINGS if key in named}
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        constants = {key: value for key, value in named.items() if key not in _SETTINGS}
        for name, value in zip(names, arguments, strict=False):
            if value is None:
                launch["types"][name], constants[name] = "constexpr", None
            elif isinstance(value, Tensor):
                launch["types"][name] = "*" + TYPES[value.dtype]
            else:
                launch["types"][name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        for name in names[len(arguments) :]:
            launch["types"][name] = "constexpr"
        launch["constants"] = constants
        if launch not in self.launches:
            self.launches.append(launch)


class _TorchBytes(TorchDispatchMode):
    """Counts what torch's own operations read and write; a view moves nothing."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _NOT_MOVED:
            read = args[1:] if name in _ONLY_WRITTEN else args
            for x in _tensors((read, result)):
                if x.untyped_storage().nbytes() >= self.record.large:
                    self.record.tensor_bytes += x.nbytes
                else:
                    self.record.list_bytes += x.nbytes
        return result


def _tensors(values: object) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, tuple | list):
        several = cast("Iterable[object]", values)
        return [tensor for value in several for tensor in _tensors(value)]
    return []


@contextmanager
def recording(large: int = 0) -> Generator[Record]:
    """Record everything that the interpreter runs inside the block; `large` is the size of the tensor."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    function: Any = interpreter.InterpretedFunction
    before = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store")}
    before["create_atomic_rmw"] = builder.create_atomic_rmw
    run = function.run
    record = Record(large)
    ranges: list[tuple[int, int]] = []

    def count(pointers: Any, mask: Any, times: int) -> None:
        wide = np.broadcast_to(mask.data.astype(bool), pointers.data.shape)
        width = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        places = np.unique(pointers.data[wide])
        inside = sum(int(((places >= first) & (places < end)).sum()) for first, end in ranges)
        record.tensor_bytes += times * width * inside
        record.list_bytes += times * width * (len(places) - inside)

    def load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        count(ptrs, mask, 1)
        return before["create_masked_load"](self, ptrs, mask, *rest)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count(ptrs, mask, 1)
        return before["create_masked_store"](self, ptrs, value, mask, *rest)

    def atomic(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        count(ptr, mask, 2)
        return before["create_atomic_rmw"](self, operation, ptr, val, mask, *rest)

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        record.add(self.fn, args, kwargs)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(args)}
        ranges[:] = [(first, first + size) for first, size in storages.items() if size >= large]
        with _disable_current_modes():
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    builder.create_masked_load, builder.create_masked_store = load, store
    builder.create_atomic_rmw, function.run = atomic, recorded
    try:
        with _TorchBytes(record):
            yield record
    finally:
        for name, original in before.items():
            setattr(builder, name, original)
        function.run = run
