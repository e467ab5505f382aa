"""A CUDA device for machines without one: fake tensors say what may run, CPU tensors have the values.

Every operation runs on CPU tensors, so that a method takes its real way and its results can be compared. And
every kind of operation (the operator, and which operands are on the device) runs once on CUDA tensors of
torch's own `FakeTensorMode`, which refuse what CUDA refuses: operands on two devices. On the way it is
counted how often the host has to wait for the device, and on whose behalf.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import thinwire

CUDA = torch.device("cuda:0")
PACKAGE = Path(thinwire.__file__).parent
_aten = torch.ops.aten
# The result of these is a number on the host.
READS = {_aten._local_scalar_dense, _aten.item, _aten.equal, _aten.is_nonzero}
# The length of the result of these depends on the values, so the host waits for it.
SIZES = {_aten.nonzero, _aten.masked_select, _aten._unique2, _aten.unique_dim, _aten.unique_consecutive}
SIZES |= {_aten.repeat_interleave}


class Shadow(torch.Tensor):
    """A tensor that is on CUDA as far as anybody can see."""

    value: torch.Tensor

    @staticmethod
    def __new__(cls, value: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device="meta",  # torch itself has no guard for a CUDA device here; `device` tells everybody else
        )
        made.value = value
        return made

    @property
    def device(self) -> torch.device:
        return CUDA

    def __repr__(self) -> str:
        return f"Shadow({self.value})"

    def __setitem__(self, index: object, value: object) -> None:
        # torch would make a tensor of the number by itself, on the device that it believes this one is on
        given = isinstance(value, torch.Tensor)
        super().__setitem__(index, value if given else torch.full((), value, dtype=self.dtype, device=CUDA))

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, **_: object):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} on a tensor of the shadow device outside of it")


_answers: dict[tuple[object, ...], tuple[bool, ...] | Exception] = {}
"""What fake tensors said of an operation on tensors at these places: which results are on the device."""


class Device(TorchDispatchMode):
    """While it is entered, `device="cuda"` works. `waits` counts by who asked: "kernels", "methods", ..."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __enter__(self):
        self._lazy_init, torch.cuda._lazy_init = torch.cuda._lazy_init, lambda: None
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) comes by here
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        torch._C._set_only_lift_cpu_tensors(self._lifts)
        torch.cuda._lazy_init = self._lazy_init

    def put(self, tensor: torch.Tensor) -> Shadow:
        """A copy on the device."""
        return Shadow(tensor.detach().clone())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        flat, spec = pytree.tree_flatten((args, kwargs))
        on_device = any(isinstance(each, Shadow) for each in flat)
        if not on_device and not any(_is_device(each) for each in flat):
            return func(*args, **kwargs)
        packet = func.overloadpacket
        values = pytree.tree_unflatten([_value(each) for each in flat], spec)
        masked = packet in (_aten.index, _aten.index_put, _aten.index_put_) and _has_mask(args[1])
        if packet in READS or packet in SIZES or masked:
            if on_device:
                self._count(str(packet))
            result = func(*values[0], **values[1])
            return pytree.tree_map_only(torch.Tensor, Shadow, result)
        places = _places(func, flat, spec)
        result = func(*values[0], **values[1])
        known = {id(each.value): each for each in flat if isinstance(each, Shadow)}
        outs, out_spec = pytree.tree_flatten(result)
        if on_device and places and not any(places):
            self._count("a copy to the CPU")
        assert len(set(places)) < 2, f"{func} has results on two devices"
        wrapped: list[object] = []
        for out in outs:
            if isinstance(out, torch.Tensor):
                made = Shadow(out) if any(places) and id(out) not in known else out
                wrapped.append(known.get(id(out), made))
            else:
                wrapped.append(out)
        return pytree.tree_unflatten(wrapped, out_spec)

    def _count(self, what: str) -> None:
        self.waits[f"{_asker()}: {what}"] += 1

    def by(self, *packages: str) -> int:
        """How often the host has waited on behalf of these packages."""
        return sum(times for who, times in self.waits.items() if who.split("/")[0] in packages)


def _places(func, flat: list[object], spec: pytree.TreeSpec) -> tuple[bool, ...]:
    """Which results are on the device, if torch allows this operation on tensors at these places."""
    key = (func, *(_kind(each) for each in flat))
    if key not in _answers:
        mode = FakeTensorMode()
        with _disable_current_modes(), mode:
            args, kwargs = pytree.tree_unflatten([_fake(mode, each) for each in flat], spec)
            try:
                leaves = pytree.tree_leaves(func(*args, **kwargs))
                _answers[key] = tuple(
                    each.device.type == "cuda" for each in leaves if isinstance(each, torch.Tensor)
                )
            except Exception as error:
                _answers[key] = error
    answer = _answers[key]
    if isinstance(answer, Exception):
        raise answer
    return answer


def _kind(each: object) -> object:
    if isinstance(each, torch.Tensor):
        return type(each), each.dtype, each.dim()
    return (type(each), each) if isinstance(each, torch.device | torch.dtype) else type(each)


def _fake(mode: FakeTensorMode, each: object) -> object:
    if not isinstance(each, torch.Tensor):
        return CUDA if _is_device(each) else each
    device = CUDA if isinstance(each, Shadow) else each.device
    return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device)


def _value(each: object) -> object:
    if isinstance(each, Shadow):
        return each.value
    return torch.device("cpu") if _is_device(each) else each


def _is_device(each: object) -> bool:
    """Torch itself asks for "meta", where it believes a tensor of this device to be."""
    return isinstance(each, torch.device) and each.type in ("cuda", "meta")


def _has_mask(indices: Iterable[object]) -> bool:
    return any(isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _asker() -> str:
    """The innermost function of the package on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE).with_suffix('')}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "test"


@contextmanager
def device() -> Iterator[Device]:
    with Device() as entered:
        yield entered
