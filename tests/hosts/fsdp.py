"""Models sharded by FSDP2 on 2 x 2 ranks, and training loops for them, for worker processes."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import thinwire
from thinwire.core.shards import local, named_shards

WIDTH = 33  # does not divide by two: one shard of every tensor is padded


class Net(nn.Module):
    """A stem that the root keeps, blocks of their own, a head of one row, which one shard has not."""

    def __init__(self, *, reuse: bool = False, reentrant: bool | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.head = nn.Linear(WIDTH, 1)
            self.spare = nn.Linear(WIDTH, 2)
        self.reuse, self.reentrant, self.spared = reuse, reentrant, True

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(x).tanh()
        for block in [*self.blocks, *self.blocks] if self.reuse else self.blocks:
            if self.reentrant is not None:
                x = checkpoint(block, x, use_reentrant=self.reentrant).tanh()
            else:
                x = block(x).tanh()
        out = self.head(x)
        return {"out": out if self.spared else out + self.spare(x).sum(-1, keepdim=True)}


def mesh_2x2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(
    mesh: DeviceMesh, net: nn.Module | None = None, policy: MixedPrecisionPolicy | None = None
) -> Net:
    """Over the mesh: the one with replicas (native HSDP), its shard dimension, or all ranks."""
    net = net or Net()
    options = {"mesh": mesh} if policy is None else {"mesh": mesh, "mp_policy": policy}
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return model(torch.randn(4, WIDTH, generator=rng))["out"].float().square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups of parameters, as people make them."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "lr": 0.05}]
    return torch.optim.SGD(groups, lr=0.2, momentum=0.5)


def train(
    model: nn.Module,
    steps: Iterable[int],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    average: Callable[[], object] | None = None,
) -> list[torch.Tensor]:
    """Returns this rank's shards. `average` is called without a session on the model."""
    optimizer = optimizer or sgd(model)
    for step in steps:
        optimizer.zero_grad()
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro == accumulate - 1)
            loss_of(model, step * accumulate + micro).backward()
        if average is not None:
            average()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return shards(model)


def shards(model: nn.Module) -> list[torch.Tensor]:
    return [local(p).clone() for p in model.parameters()]


def restored(model: nn.Module, weights: Sequence[torch.Tensor], moments: dict) -> torch.optim.Optimizer:
    """The optimizer of a model that gets these shards."""
    optimizer = sgd(model)
    optimizer.load_state_dict(moments)
    with torch.no_grad():
        for p, values in zip(model.parameters(), weights, strict=True):
            local(p).copy_(values)
    return optimizer


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def by_hand(mesh: DeviceMesh, net: nn.Module, method: str, steps: Iterable[int]) -> list[torch.Tensor]:
    """The same training with `session.average` after the backward pass in place of hooks."""
    model = sharded(mesh["shard"], net)
    named = named_shards((n, p) for n, p in model.named_parameters() if p.requires_grad)
    session = thinwire.Session(named.items(), method, mesh["replicate"].get_group(), dense_below=0)

    def average() -> None:
        for p in named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        session.average({name: p.grad for name, p in named.items()}, in_place=True)
        model.spare.zero_grad()  # nobody uses it

    trained = train(model, steps, average=average)
    session.detach()
    return trained


def gathered(shards: Sequence[torch.Tensor], group: dist.ProcessGroup) -> bool:
    """Whether all ranks of the group hold the same bits."""
    flat = torch.cat([shard.flatten() for shard in shards])
    rows = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(rows, flat, group=group)
    return all(torch.equal(row, flat) for row in rows)
