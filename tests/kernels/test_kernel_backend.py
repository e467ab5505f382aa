"""What holds for all kernels together: threads, forks, imports, compilation, memory."""

import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
from kernel_inputs import same, torch_threads, vector

from thinwire import kernels
from thinwire.kernels import cpu, reference
from thinwire.kernels.cpu import FAMILIES, _pool, warm
from thinwire.kernels.dispatch import dispatch

pytestmark = pytest.mark.skipif(
    os.environ.get("THINWIRE_KERNELS") == "reference", reason="about the compiled kernels"
)

N = 3 * _pool.GRAIN + 1234


def everything(x):
    """One result of every kernel whose work is cut among threads."""
    n = x.numel()
    out = torch.empty(n)
    results = [kernels.topk(x, n // 100), kernels.threshold(x, 1.0), kernels.gaussiank(x, n // 100)]
    for rule, argument in (("topk", n // 100), ("gaussiank", n // 100), ("threshold", 2.0)):
        residual, undo = vector("normal", n, 9), torch.empty(n)
        taken = getattr(kernels, f"feedback_{rule}")(residual, x, argument, undo=undo)
        results += [taken, residual.clone(), undo]
        results.append(getattr(kernels, f"select_feedback_{rule}")(residual, x, argument))
    kernels.commit_feedback(residual, x, taken[0])
    results += [residual.clone(), kernels.feedback_block(residual, x, n - 5, 100), residual]
    for bits, bucket, norm in ((4, 512, "max"), (2, 77, "l2"), (8, n, "l2"), (1, n, "max")):
        packed, scales = kernels.quantise(x, bits, bucket, norm, 5)
        kernels.dequantise_mean([packed] * 3, [scales] * 3, bits, bucket, n, out)
        results += [packed, scales, out.clone()]
    last = vector("normal", n, 4)
    packed, radius = kernels.laq_quantise(x, last, 4)
    results += [packed, radius, kernels.laq_norms(x, last, packed, radius, 4)]
    kernels.laq_apply(last, packed, radius, 4)
    results.append(last.clone())
    results += [kernels.sign_pack_mean(x), kernels.onebit_pack(x), kernels.two_means(x)]
    signs = kernels.sign_pack(x)
    kernels.sign_mean([signs] * 3, [torch.tensor([s]) for s in (0.1, 0.2, 0.3)], n, out)
    results += [signs, out.clone(), kernels.sign_majority([signs] * 3, n)]
    results += [kernels.ternary_quantise(x, 2.5, 1), kernels.natural_quantise(x, 1)]
    lam = kernels.gspar_probabilities(x, 0.01)
    results += [lam, kernels.gspar_budget(x, 1.0), kernels.gspar_sample(x, lam, 1)]
    results += [kernels.chunk_argmax(x, 100), kernels.chunk_argmax_sum(last, x, 100)]
    table = torch.zeros(5, 1000)
    kernels.sketch_insert(x, 5, 1000, 1, table)
    kernels.sketch_query(table, n, 1, out)
    results += [table, out.clone(), kernels.sketch_query_topk(table, n, 1, n // 100)]
    indices, values = kernels.topk(x, n // 10)
    kernels.scatter_mean([indices] * 3, [values] * 3, out)
    kernels.a2sgd_apply(x, torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4]), last)
    results += [kernels.sign_scales(x, 512), kernels.chunk_topk(x, kernels.PerChunk(7, 512))]
    for transform in (kernels.rotate, kernels.rotate_back):
        turned = torch.empty(n)
        transform(x, 5, turned)
        results.append(turned)
    chunks, again = kernels.Chunks(64, n // 64, 64, 64), torch.empty(n // 64 * 64)
    coefficients = torch.empty(chunks.total)
    kernels.dct(x[: again.numel()], chunks, coefficients)
    results.append(coefficients.clone())
    kernels.inverse_dct(coefficients, chunks, again)
    results.append(again)
    return (*results, out, last, kernels.all_finite(x))


@pytest.fixture
def small_cuts(monkeypatch):
    """Cut small tensors among threads too."""
    monkeypatch.setattr(_pool, "PARALLEL_FROM", 1)


@pytest.mark.usefixtures("small_cuts")
@pytest.mark.parametrize("kind", ["normal", "heavy", "ties"])
def test_results_do_not_depend_on_the_number_of_threads(kind):
    x = vector(kind, N, 0)
    with torch_threads(1):
        alone = everything(x)
    for threads in (2, 4):
        with torch_threads(threads):
            assert len(_pool.cuts(N)) > 1
            same(everything(x), alone)


@pytest.mark.usefixtures("small_cuts")
def test_lanes_may_call_at_the_same_time():
    inputs = [vector("normal", N, seed) for seed in range(3)]
    expected = [everything(x) for x in inputs]
    results: dict[int, object] = {}

    def lane(i):
        for _ in range(2):
            results[i] = everything(inputs[i])

    lanes = [threading.Thread(target=lane, args=(i,)) for i in range(3)]
    for t in lanes:
        t.start()
    for t in lanes:
        t.join()
    for i, wanted in enumerate(expected):
        same(results[i], wanted)


def _child(connection, x, expected):
    with torch_threads(1):  # torch's own OpenMP threads do not survive a fork; ours must
        _pool.cuts = lambda numel, grain=_pool.GRAIN: [(0, grain), (grain, numel)]
        indices, _ = kernels.topk(x, 100)
    connection.send(torch.equal(indices, expected))


@pytest.mark.usefixtures("small_cuts")
def test_a_forked_child_gets_a_pool_of_its_own():
    x = vector("normal", N, 0)
    expected, _ = kernels.topk(x, 100)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, x, expected))
    child.start()
    try:
        assert ours.poll(200), "the child hangs"
        assert ours.recv() is True
    finally:
        child.join(60)
        if child.is_alive():
            child.kill()


def test_importing_loads_neither_numba_nor_a_cpu_kernel():
    code = (
        "import sys, thinwire.kernels as k\n"
        "assert 'numba' not in sys.modules\n"
        "assert not [m for m in sys.modules if m.startswith('thinwire.kernels.cpu')]\n"
        "import torch\n"
        "with k.use_reference():\n"
        "    k.topk(torch.ones(3), 1)\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


def test_prepare_reports_every_family():
    seen = []
    kernels.prepare(lambda family, done, total: seen.append((family, done, total)))
    assert [family for family, _, _ in seen] == [*FAMILIES, ""]
    assert seen[-1][1:] == (len(FAMILIES), len(FAMILIES))


def test_after_prepare_nothing_is_compiled_or_loaded():
    """The types that `warm` uses are those that real calls use: otherwise the first step would stall."""
    code = (
        "import gc, sys, torch\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from thinwire import kernels\n"
        "kernels.prepare()\n"
        "from numba.core.dispatcher import Dispatcher\n"
        "ours = [d for d in gc.get_objects() if isinstance(d, Dispatcher) and 'thinwire' in d.__module__]\n"
        "ready = {d: set(d.overloads) for d in ours}\n"
        "assert sum(map(len, ready.values())) > 50\n"
        "from kernel_inputs import vector\n"
        "from test_kernel_backend import everything\n"
        "from thinwire.kernels.cpu import _pool\n"
        "_pool.PARALLEL_FROM = 1\n"
        "x = vector('normal', 3 * _pool.GRAIN + 1234, 0)\n"
        "everything(x)\n"
        "kernels.topk(x.bfloat16(), 50)\n"
        "late = {d.__name__: set(d.overloads) - ready[d] for d in ours if set(d.overloads) != ready[d]}\n"
        "assert not late, late\n"
    )
    here = __file__.rsplit("/", 1)[0]
    subprocess.run([sys.executable, "-c", code, here], check=True, timeout=400)


def test_every_kernel_of_the_reference_has_a_compiled_version_with_the_same_parameters():
    package = Path(reference.__file__).parent
    families = {file.stem for file in package.glob("[a-z]*.py")}
    assert families <= set(FAMILIES)
    seen = []
    for file in sorted(package.parent.glob("[a-z]*.py")):
        for module, name in re.findall(r"dispatch\(\s*(\w+)\.(\w+)", file.read_text()):
            family = file.stem if module == "reference" else module
            plain = getattr(import_module(f"thinwire.kernels.reference.{family}"), name)
            backend = "triton" if name.startswith("static_") else "cpu"  # these are for GPUs alone
            compiled = getattr(import_module(f"thinwire.kernels.{backend}.{family}"), name)
            assert signature(compiled) == signature(plain), (family, name)
            seen.append(family)
    assert set(seen) == families


def test_a_kernel_runs_without_the_interpreter_lock():
    """With the lock no attempt would succeed; on a busy machine one of some does."""
    assert any(_ticks_beside_a_kernel() for _ in range(5))


def _ticks_beside_a_kernel() -> bool:
    """Whether this thread ran while another one was in the middle of a kernel."""
    x, table = vector("normal", 8_000_000, 0), torch.zeros(7, 20_000)
    times = []

    def work():
        kernels.sketch_insert(x[:1000], 7, 20_000, 1, table)
        times.append(time.perf_counter())
        kernels.sketch_insert(x, 7, 20_000, 1, table)
        times.append(time.perf_counter())

    with torch_threads(1):
        thread = threading.Thread(target=work)
        thread.start()
        ticks = []
        while thread.is_alive():
            time.sleep(0.001)  # so that the worker never waits for the lock, only we might
            ticks.append(time.perf_counter())
        thread.join()
    begin, end = times
    quarter = (end - begin) / 4
    return any(begin + quarter < tick < end - quarter for tick in ticks)


def test_families_are_the_modules_without_underscore_and_can_be_warmed_one_by_one():
    assert {file.stem for file in Path(cpu.__file__).parent.glob("[a-z]*.py")} == set(FAMILIES)
    for family in FAMILIES:
        warm(family)


def test_tensors_that_compiled_kernels_cannot_read_go_to_the_reference():
    calls = []

    def fake(tensors, x, k, name, nothing):
        calls.append(k)
        return "reference"

    fake.__module__ = "thinwire.kernels.reference.finite"
    x = torch.ones(4)
    for unreadable in (torch.ones(8)[::2], x.double(), torch.ones(4, device="meta")):
        for arguments in (([x], unreadable), ([x, unreadable], x), ((unreadable,), x)):
            assert dispatch(fake, *arguments, 1, "max", None) == "reference"
    assert len(calls) == 9
    with pytest.raises(AttributeError, match="fake"):  # looked for among the compiled kernels
        dispatch(fake, [x], x, 1, "max", None)
