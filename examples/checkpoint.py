"""Checkpoint and resume: a run that survives crashes and continues, also with another number of ranks.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/checkpoint.py --folder out/checkpoints

Kill a worker (`kill -9`) and torchrun starts all of them again; they continue from the last checkpoint. Or
run the command again with more steps or another --nproc-per-node.
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
from ddp_before import data
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire

BATCH = 64  # of all ranks together, so that another number of ranks sees the same batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--method", default="topk(ratio=0.01)")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)
    session = thinwire.attach(model, arguments.method, optimizer=optimizer)
    checkpointer = thinwire.Checkpointer(
        arguments.folder, session, model, optimizer, every=arguments.every, also={"scheduler": scheduler}
    )

    begin = checkpointer.load_latest()
    if rank == 0:
        print(f"begins at step {begin} with {ranks} ranks", flush=True)
    points, labels = data()
    for step in range(begin, arguments.steps):
        # The batch depends on the step alone, so a resumed run sees the batches that it would have seen.
        rng = torch.Generator().manual_seed(step)
        batch = torch.randint(len(points), (BATCH,), generator=rng)[rank::ranks]
        optimizer.zero_grad()
        cross_entropy(model(points[batch]), labels[batch]).backward()
        optimizer.step()
        scheduler.step()
        checkpointer.step()
        if rank == 0 and (step + 1) % arguments.every == 0:
            print(f"saves step {step + 1}", flush=True)
    checkpointer.wait()

    if rank == 0:
        accuracy = (model.module(points).argmax(1) == labels).float().mean()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
        print(f"accuracy {accuracy:.3f} after {arguments.steps} steps, parameters {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
