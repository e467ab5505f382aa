"""LAG with full gradients: ranks that are not asked compute nothing.

    torchrun --standalone --nproc-per-node 3 examples/lag.py
    torchrun --standalone --nproc-per-node 3 examples/lag.py --compute-all

Every rank has data of its own, and trains on all of it in every step. With rule="ps" a rank knows before the
forward pass whether its gradient is needed; it is not if the parameters have hardly moved since its last one.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

STEPS = 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--compute-all", action="store_true", help="compute every gradient, for comparison")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(50, 200), nn.Tanh(), nn.Linear(200, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = thinwire.attach(model, "lag(rule='ps')", optimizer=optimizer)

    rng = torch.Generator().manual_seed(rank)
    inputs = torch.randn(20_000, 50, generator=rng) * (1.0 if rank == 0 else 0.2)
    targets = (inputs[:, :1] * inputs[:, 1:2]).tanh()

    computed = 0
    begin = time.perf_counter()
    for _ in range(options.steps):
        if options.compute_all or session.wants_gradient():
            computed += 1
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
        else:
            session.skip_gradient()
        optimizer.step()
    seconds = time.perf_counter() - begin

    loss = nn.functional.mse_loss(model.module(inputs), targets).item()
    print(f"rank {rank}: {computed} of {options.steps} gradients, {seconds:.1f} s, loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
