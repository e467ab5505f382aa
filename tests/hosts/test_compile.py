"""torch.compile and DDP: the compiled model trains as the plain one does, whichever of both is attached."""

import shutil

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.hosts.common import buckets_of, mlp, train, wrap
from thinwire.errors import ConfigError
from thinwire.net.launch import Worker, run_local

# A method, and whether it is attached before the model is compiled.
CASES = {"aot_eager": (("dense", True), ("topk(ratio=0.2)", False)), "inductor": (("topk(ratio=0.2)", True),)}


def two_buckets() -> DistributedDataParallel:
    return wrap(mlp(width=400, depth=3), bucket_cap_mb=1)  # with less, the compiler refuses DDP


def compiled(worker: Worker, backend: str) -> dict[str, float]:
    found = {}
    for method, first in CASES[backend]:
        plain = two_buckets()
        session = thinwire.attach(plain, method)
        expected = train(plain, worker.rank, range(4))
        session.detach()
        model = two_buckets()
        fast = torch.compile(model, backend=backend)
        session = thinwire.attach(model if first else fast, method)
        trained = train(fast, worker.rank, range(4))
        found[method] = float((trained - expected).abs().max())
        assert session.meter.steps == 4
        session.detach()
    assert buckets_of(plain) == 2
    return found


@pytest.mark.parametrize("backend", CASES)
def test_a_compiled_model_trains_alike(backend: str) -> None:
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler")
    for found in run_local(compiled, 2, backend, timeout=400):
        assert max(found.values()) < 1e-6, found


def with_python_reducer(worker: Worker) -> str:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    model = two_buckets()
    with pytest.raises(ConfigError) as refusal:
        thinwire.attach(model, "topk")
    return str(refusal.value)


def test_the_python_reducer_is_refused() -> None:
    for text in run_local(with_python_reducer, 2):
        assert "python_reducer" in text
