"""Every registered method on a GPU, as far as a machine without one can tell."""

import math
from collections import Counter

import pytest
import torch

from tests.devices.shadow import Device, Shadow, device
from tests.laws.cohort import DEFAULTS, Cohort, same_bits
from thinwire import Session, kernels, parse
from thinwire.drivers import Lockstep
from thinwire.errors import PayloadError
from thinwire.net import frames
from thinwire.net.rank_info import RankInfo

SIZE, STEPS = 2, 2
SHAPES = {"wide": (24, 37), "vector": (301,)}
ALSO = (
    "topk(ratio=0.1, chunk=16)",
    "topk(ratio=0.1, values=qsgd(bits=4))",
    "topk(ratio=0.1, reduce='split')",
    "topk(ratio=0.1, reduce='split', values=qsgd(bits=8))",
    "randomk(ratio=0.1, shared=False)",
    "dgc(ratio=0.1, clip=0.5)",
    "scalecom(chunk=20)",
    "sketched(ratio=0.05, rows=3, cols=100, momentum=0.0)",
    "qsgd(bits=2, bucket=64, rotate=True, reduce='twoshot')",
    "efsign(bucket=4096)",
    "natural(reduce='twoshot')",
    "signsgd(scale=None)",
    "signsgd(rotate=True)",
    "powersgd(rank=2, alternate=True)",
    "adam(warmup=1)",
    "warmup(steps=1, method=topk(ratio=0.1))",
    "hierarchical(outer=topk(ratio=0.1), local=2)",
)
# One of each way to tell all ranks of a number that is not finite.
BROKEN = (
    "topk",
    "randomk",
    "scalecom",
    "sketched",
    "powersgd",
    "qsgd",
    "natural",
    "signsgd",
    "efsign",
    "gspar",
)
each = pytest.mark.parametrize("method", DEFAULTS + ALSO)


class Watched(Lockstep):
    """Counts the operations whose result is a frame, which the host has to check."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.framed = 0

    def perform(self, ops, ranks, *, inside=False):
        self.framed += not isinstance(ops[0], frames.AllReduce | frames.Commit)
        return super().perform(ops, ranks, inside=inside)


def on_device(method: str, cuda: Device) -> Cohort:
    """A cohort whose tensors are all on the device."""
    cohort = Cohort(method, SIZE, SHAPES, driver=Watched(SIZE))
    parameters = [(name, cuda.put(torch.zeros(shape))) for name, shape in SHAPES.items()]
    cohort.sessions = [
        Session(parameters, method, rank_info=RankInfo(rank, SIZE), dense_below=0) for rank in range(SIZE)
    ]
    return cohort


def put(cuda: Device, inputs: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [{name: cuda.put(tensor) for name, tensor in one.items()} for one in inputs]


@each
def test_the_whole_run(method: str) -> None:
    """The bits of the reference on the CPU, results and states on the device, and few waits of the host."""
    with kernels.use_reference():
        expected = Cohort(method, SIZE, SHAPES)
        with device() as cuda:
            cohort = on_device(method, cuda)
            for step in range(STEPS):
                inputs = cohort.inputs(step)
                truth = expected.average(inputs)
                given = put(cuda, inputs)
                cuda.waits, cohort.driver.framed = Counter(), 0
                found = cohort.average(given)
                for one, other in zip(found, truth, strict=True):
                    for name in SHAPES:
                        assert isinstance(one[name], Shadow)
                        assert same_bits(one[name].value, other[name]), name
    # Of the last step: the first ones also compare where the ranks are.
    waits, bound = cuda.waits, parse(method).host_waits
    assert cuda.by("net", "core") <= SIZE * (cohort.driver.framed + bound.per_bucket), waits
    assert cuda.by("methods", "kernels", "core") <= SIZE * (
        bound.most(len(SHAPES), SIZE) + cohort.driver.framed
    ), waits
    if not bound.per_tensor:
        assert not cuda.by("kernels"), waits


@pytest.mark.parametrize("method", BROKEN)
def test_a_broken_gradient_aborts_the_step(method: str) -> None:
    """Also where the host does not look at the numbers before the commit."""
    with device() as cuda, kernels.use_reference():
        cohort = on_device(method, cuda)
        cohort.average(put(cuda, cohort.inputs(0)))
        inputs = cohort.inputs(1)
        inputs[0]["wide"][3, 5] = torch.nan
        broken = cohort.average(put(cuda, inputs))
        for one in broken:
            assert not one["wide"].value.isfinite().all()
        fine = cohort.average(put(cuda, cohort.inputs(2)))
        for one in fine:
            assert all(tensor.value.isfinite().all() for tensor in one.values())


@pytest.mark.parametrize(
    "method", ["topk(ratio=0.1, reduce='gather')", "gspar(reduce='gather')", "scalecom(ratio=0.2)"]
)
def test_bad_indices_from_the_wire_are_refused(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are checked with the commit, and an error still says so."""
    plain = frames.unpack

    def forged(frame, parts, **options):
        received = plain(frame, parts, **options)
        if not options["own"] and frame.numel() > 64:
            code = received[0]
            if code.numel():
                code.copy_(torch.full_like(code, 255) if code.dtype == torch.uint8 else code.flip(0))
        return received

    with device() as cuda, kernels.use_reference():
        cohort = on_device(method, cuda)
        cohort.average(put(cuda, cohort.inputs(0)))
        monkeypatch.setattr(frames, "unpack", forged)
        with pytest.raises(PayloadError):
            cohort.average(put(cuda, cohort.inputs(1)))


def test_a_mixed_device_would_be_noticed() -> None:
    """The test of the test: a CPU tensor among those of the device, and waits that are counted."""
    with device() as cuda:
        x = cuda.put(torch.randn(10))
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.zeros(10)
        assert math.isfinite(x.sum().item())
        assert bool((x < torch.inf).all())
        assert len(x.tolist()) == 10
        x[x > 0] = 1.0
        x.nonzero()
        x.cpu()
    assert sum(cuda.waits.values()) == 6, cuda.waits
