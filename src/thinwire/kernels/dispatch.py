"""One decision for all kernels: which backend gets these tensors?

A kernel is a function of `thinwire.kernels.reference.<family>`, in plain torch. A backend is a package beside
it for one type of device, whose `<family>` modules have functions of the same names and parameters.
"""

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar, TypeVarTuple, cast

import torch
from torch import Tensor

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

BACKENDS = {"cpu": "thinwire.kernels.cpu", "cuda": "thinwire.kernels.triton"}
"""The package with the compiled kernels for a type of device; every other device gets the reference."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int32)
_SCALARS = (int, float, str, type(None))
# Subclasses, such as torch's fake tensors, may have no memory that a kernel could read.
_PLAIN = (Tensor, torch.nn.Parameter)
_compiled: dict[tuple[str, Callable[..., Any]], Callable[..., Any]] = {}


class _Choice:
    """Process-wide: the drivers' threads must see what the test or the benchmark asked for."""

    reference: bool = os.environ.get("THINWIRE_KERNELS", "") == "reference"


@contextmanager
def use_reference() -> Generator[None]:
    """Send every kernel call to the torch reference inside the block (in all threads)."""
    before = _Choice.reference
    _Choice.reference = True
    try:
        yield
    finally:
        _Choice.reference = before


def dispatch(reference: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Call the compiled kernel of the same family and name where there is one, else `reference` itself."""
    backend = None if _Choice.reference else _backend(arguments)
    if backend is None:
        return reference(*arguments)
    kernel = _compiled.get((backend, reference))
    if kernel is None:
        kernel = _compiled[backend, reference] = _find(backend, reference)
    return kernel(*arguments)


def _find(backend: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The backend's kernel; the reference itself for a family that the backend does not have."""
    family = reference.__module__.rpartition(".")[2]
    if family not in import_module(backend).FAMILIES:
        return reference
    return getattr(import_module(f"{backend}.{family}"), reference.__name__)


def _backend(arguments: Iterable[object]) -> str | None:
    """The backend of the one device that has all tensors; None if there is none that can read them."""
    if _in_host_memory(arguments):
        return BACKENDS["cpu"]
    devices: set[torch.device | None] = set()
    _add_devices(arguments, devices)
    device = devices.pop() if len(devices) == 1 else None
    return None if device is None else BACKENDS.get(device.type)


def _in_host_memory(arguments: Iterable[object]) -> int:
    """The number of tensors if compiled kernels can read all of them there, else 0.

    Small tensors feel what this costs, so it recognises what callers usually pass, and nothing else.
    """
    found = 0
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor:
            tensor = cast(Tensor, argument)
            if not (tensor.is_cpu and tensor.dtype in _DTYPES and tensor.is_contiguous()):
                return 0
            found += 1
        elif kind is list or kind is tuple:
            inside = _in_host_memory(cast("Iterable[object]", argument))
            if not inside:
                return 0
            found += inside
        elif kind not in _SCALARS:
            return 0
    return found


def _add_devices(arguments: Iterable[object], devices: set[torch.device | None]) -> None:
    """The devices of all tensors, also of those in lists; None for what compiled kernels cannot read."""
    for argument in arguments:
        if isinstance(argument, _SCALARS):
            continue
        if isinstance(argument, Tensor):
            readable = argument.dtype in _DTYPES and argument.is_contiguous()
            usable = argument.device.type == "cpu" or type(argument) in _PLAIN
            devices.add(argument.device if readable and usable else None)
        else:
            _add_devices(cast("Iterable[object]", argument), devices)
