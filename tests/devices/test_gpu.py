"""What has to be shown on a card: `make gpu-test`. docs/gpu.md says what each test proves.

None of them has been run yet. Without a GPU they are skipped.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import thinwire
from tests.devices.kernel_calls import CALLS
from tests.devices.test_methods import ALSO, SHAPES, SIZE
from tests.hosts.common import MANY, batch, mlp
from tests.laws.cohort import DEFAULTS, Cohort
from thinwire import Session, kernels, parse
from thinwire.errors import ThinwireError
from thinwire.net.launch import Worker, run_local
from thinwire.net.rank_info import RankInfo
from thinwire.net.streams import CUDA

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False: no GPU"),
]
# Sums in another order: equal up to rounding, not to the last bit.
SUMS = {
    *("a2sgd_apply", "two_means", "onebit_pack", "sign_pack_mean", "sign_pack_means", "sign_scales"),
    *("dct", "inverse_dct", "rotate", "rotate_back", "sketch_insert", "laq_norms", "laq_apply", "quantise"),
    *("gspar_probabilities", "gspar_budget", "gaussiank", "feedback_gaussiank", "select_feedback_gaussiank"),
    *("ternary_quantise", "scatter_mean", "feedback_signs", "signs_again", "adam_momentum"),
}
METHODS = [method for method in DEFAULTS + ALSO if "demo" not in method and "adam" not in method]


@pytest.mark.parametrize("name", CALLS)
def test_kernels_have_the_results_of_the_cpu(name: str) -> None:
    expected = pytree.tree_leaves(CALLS[name](torch.clone))
    found = pytree.tree_leaves(CALLS[name](lambda tensor: tensor.cuda()))
    for mine, other in zip(found, expected, strict=True):
        if not isinstance(other, torch.Tensor):
            assert mine == pytest.approx(other, rel=1e-5)
        elif name in SUMS and other.is_floating_point():
            assert torch.allclose(mine.cpu(), other, rtol=1e-5, atol=1e-6)
        elif name not in SUMS:
            assert torch.equal(mine.cpu(), other)


def cohorts(method: str) -> tuple[Cohort, Cohort]:
    """In lock-step: on the card, and on the CPU."""
    there, here = Cohort(method, SIZE, SHAPES), Cohort(method, SIZE, SHAPES)
    parameters = [(name, torch.zeros(shape, device="cuda")) for name, shape in SHAPES.items()]
    there.sessions = [
        Session(parameters, method, rank_info=RankInfo(rank, SIZE), dense_below=0) for rank in range(SIZE)
    ]
    return there, here


@pytest.mark.parametrize("method", METHODS)
def test_methods_have_the_results_of_the_cpu(method: str) -> None:
    there, here = cohorts(method)
    for step in range(3):
        inputs = here.inputs(step)
        moved = [{name: tensor.cuda() for name, tensor in one.items()} for one in inputs]
        for mine, other in zip(there.average(moved), here.average(inputs), strict=True):
            for name in SHAPES:
                assert mine[name].is_cuda
                # An entry at the edge of a selection may fall on either side of it.
                close = torch.isclose(mine[name].cpu(), other[name], rtol=1e-3, atol=1e-4)
                assert close.double().mean() > 0.98, name


@pytest.mark.parametrize("method", METHODS)
def test_the_host_waits_as_seldom_as_the_pages_say(method: str) -> None:
    """Torch itself tells of every operation that blocks the host."""
    there, _ = cohorts(method)
    for step in range(2):
        there.average([{n: t.cuda() for n, t in one.items()} for one in there.inputs(step)])
    moved = [{n: t.cuda() for n, t in one.items()} for one in there.inputs(2)]
    before = there.driver.meters[0].rounds
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            there.average(moved)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing" in str(each.message) for each in told)
    rounds = there.driver.meters[0].rounds - before
    assert waits <= SIZE * (parse(method).host_waits.most(len(SHAPES), SIZE) + 2 * rounds)


def trained(worker: Worker, backend: str, method: str, overlap: bool) -> list[list[float]]:
    """The parameters after some steps of DDP."""
    device = torch.device("cuda", worker.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = None if backend == "gloo" else dist.new_group(backend=backend)
    model = mlp().to(device)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=MANY)
    session = thinwire.attach(ddp, method, overlap=overlap)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(8):
        optimizer.zero_grad()
        ddp(batch(worker.rank, step).to(device)).square().mean().backward()
        optimizer.step()
    session.detach()
    return [parameter.detach().cpu().flatten().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("method", ["dense", "qsgd(bits=8)", "topk(ratio=0.2)", "powersgd(rank=2)"])
def test_ddp_over_gloo_has_no_race(method: str) -> None:
    """With lanes on streams of their own, and without threads: the same bits on all ranks, every time."""
    runs = [run_local(trained, 2, "gloo", method, overlap) for overlap in (True, False, True)]
    for ranks in runs:
        assert ranks[0] == ranks[1]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("method", ["dense", "qsgd(bits=8)", "topk(ratio=0.2)", "gaussiank(ratio=0.2)"])
def test_ddp_over_nccl(method: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU per rank, and there is one")
    nccl = run_local(trained, 2, "nccl", method, True)
    gloo = run_local(trained, 2, "gloo", method, True)
    assert nccl[0] == nccl[1]
    for mine, other in zip(nccl[0], gloo[0], strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)


def captured(worker: Worker) -> str:
    device = torch.device("cuda", worker.rank % torch.cuda.device_count())
    session = Session([("w", torch.zeros(64, 64, device=device))], "qsgd", dense_below=0)
    x = {"w": torch.ones(64, 64, device=device)}
    session.average(copy.copy(x))
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            session.average(x)
    except ThinwireError as error:
        return str(error)
    return ""


def test_a_cuda_graph_is_refused() -> None:
    for message in run_local(captured, 2):
        assert "CUDA graph is being captured" in message


def test_staging_memory_is_pinned() -> None:
    assert CUDA.pinned(100).is_pinned()


def test_triton_or_reference_is_taken() -> None:
    """Whichever is there: the dispatcher accepts tensors of the card."""
    x = torch.randn(100_000, device="cuda")
    taken, values = kernels.topk(x, 100)
    assert taken.is_cuda
    assert torch.equal(values, x[taken.long()])
