"""Small models, their data, and training loops with and without DDP, for worker processes."""

import copy
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.net.launch import Worker
from thinwire.sessions.preparation import prepare_for

WIDTH = 40
MANY = 0.005  # megabytes a bucket: about one layer of `mlp` each
# `adam` needs an optimizer: tests/hosts/test_frozen_adam.py.
METHODS = tuple(str(cls()) for cls in thinwire.list_methods().values() if cls().traits.optimizer != "Adam")
# With a delay, what is not finite shows in the next step: tests/hosts/test_delayed.py.
PROMPT = tuple(method for method in METHODS if not thinwire.parse(method).traits.delayed)
# One of every kind of round and memory. Many defaults keep 1 %, at this size little more than nothing:
# these send, and keep, a fair part.
BUSY = ("dense", "qsgd", "topk(ratio=0.2)", "randomblock(ratio=0.3)", "powersgd(rank=1)")

Loss = Callable[[nn.Module, int, int], torch.Tensor]


def mlp(dtype: torch.dtype = torch.float32, width: int = WIDTH, depth: int = 4) -> nn.Sequential:
    """The same weights wherever it is called."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.Tanh()]
        return nn.Sequential(*layers[:-1]).to(dtype)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon takes only matrices."""
    parameters = list(model.parameters())
    matrices, rest = ([p for p in parameters if (p.dim() == 2) is two] for two in (True, False))
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, width, generator=rng).to(dtype)


def square_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    parameter = next(iter(model.parameters()))
    return model(batch(rank, step, parameter.dtype, parameter.shape[-1])).float().square().mean()


def flat(model: nn.Module | Iterable[torch.Tensor]) -> torch.Tensor:
    tensors = model.parameters() if isinstance(model, nn.Module) else model
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def wrap(module: nn.Module, **options: object) -> DistributedDataParallel:
    return DistributedDataParallel(module, **{"bucket_cap_mb": MANY, **options})


def buckets_of(model: DistributedDataParallel) -> int:
    return len(model.reducer._get_zeros_like_grad_buckets())


def train(
    model: nn.Module,
    rank: int,
    steps: Iterable[int],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss = square_loss,
    accumulate: int = 1,
    clip: float | None = None,
    average: Callable[[], object] | None = None,
) -> torch.Tensor:
    """A training loop as people write it; returns the parameters. `average` is called without DDP."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.SGD(trained, lr=0.2, momentum=0.5)
    for step in steps:
        optimizer.zero_grad()
        for micro in range(accumulate):
            last = micro == accumulate - 1
            silent = isinstance(model, DistributedDataParallel) and not last
            with model.no_sync() if silent else nullcontext():
                loss(model, rank, step * accumulate + micro).backward()
        if average is not None:
            average()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
    return flat(model)


def reference(
    worker: Worker, module: nn.Module, method: object, steps: Iterable[int], **options
) -> torch.Tensor:
    """The same training with `session.average` in place of DDP."""
    module = copy.deepcopy(module)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    session = thinwire.Session(named.items(), method)

    def average() -> None:
        means = session.average({name: p.grad for name, p in named.items()})
        for name, p in named.items():
            p.grad = means[name]

    trained = train(module, worker.rank, steps, average=average, **options)
    session.detach()
    return trained


def under_ddp(
    worker: Worker,
    module: nn.Module,
    method: object,
    steps: Iterable[int],
    *,
    ddp: dict[str, object] | None = None,
    overlap: bool = True,
    **options,
) -> torch.Tensor:
    model = wrap(copy.deepcopy(module), **(ddp or {}))
    session = thinwire.attach(model, method, overlap=overlap)
    trained = train(model, worker.rank, steps, **options)
    session.detach()
    return trained


def consents(label: str) -> bool:
    """Whether the method in this label gives all ranks the same bits."""
    return not any(method in label for method in METHODS if not thinwire.parse(method).traits.consensus)


def assert_same_everywhere(per_rank: list[dict[str, torch.Tensor]], within: float = 0.0) -> None:
    """Per rank: results by label, the reference's under the same label and " reference"."""
    assert per_rank[0]
    for label, expected in per_rank[0].items():
        for rank, results in enumerate(per_rank):
            if consents(label):
                assert torch.equal(results[label], expected), f"{label}: rank {rank} has other parameters"
            if f"{label} reference" in results:
                difference = float((results[label] - results[f"{label} reference"]).abs().max())
                assert difference <= within, f"{label}: rank {rank} is {difference} away from the reference"


def loaded_together(worker: Worker, method: str) -> None:
    """Load the method's kernels and wait for the other ranks, however long that takes.

    Tests with a short timeout of the group begin with this: a loaded machine may need seconds for it.
    """
    prepare_for([thinwire.parse(method)], loud=False)
    store = torch.distributed.distributed_c10d._get_default_store()
    store.add("loaded", 1)
    while store.add("loaded", 0) < worker.size:
        time.sleep(0.02)
