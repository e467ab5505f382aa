"""Checkpoint and resume: a run that survives crashes and continues, also with another number of ranks.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/checkpoint.py --folder out/checkpoints

Kill a worker (`kill -9`) and torchrun starts all of them again; they continue from the last checkpoint. Or
run the command again with more steps or another --nproc-per-node. All ranks must see the same folder.
"""

import argparse
import hashlib
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_before import data
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire

BATCH = 64  # of all ranks together, so that another number of ranks sees the same batches
KEEP = 2  # so many checkpoints


class Run:
    """Everything that a checkpoint holds."""

    def __init__(self, method: str) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
        self.model = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 100, 0.5)
        self.session = thinwire.attach(self.model, method, optimizer=self.optimizer)
        self.step = 0

    def save(self, folder: Path) -> None:
        """Write a new folder under a temporary name, then rename it: a checkpoint is whole or not there."""
        if hasattr(self.session, "sync"):  # a schedule: make the replicas equal, so that any rank's will do
            self.session.sync()
        rank = dist.get_rank()
        final, unfinished = folder / f"step-{self.step:08d}", folder / "unfinished"
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run that crashed here
            unfinished.mkdir(parents=True)
        dist.barrier()
        # Residuals differ, so every rank saves its own session state. The rest is equal on all ranks.
        write(self.session.state_dict(), unfinished / f"session-{rank}.pt")
        if rank == 0:
            common = {
                "step": self.step,
                "ranks": dist.get_world_size(),
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
            }
            write(common, unfinished / "common.pt")
        dist.barrier()
        if rank == 0:
            unfinished.rename(final)
            for old in sorted(folder.glob("step-*"))[:-KEEP]:
                shutil.rmtree(old)

    def load(self, folder: Path) -> None:
        """Continue from the newest checkpoint, if there is one."""
        # Rank 0 chooses for all: every rank must load the same one.
        newest = [str(max(folder.glob("step-*"), default=""))] if dist.get_rank() == 0 else [""]
        dist.broadcast_object_list(newest)
        if not newest[0]:
            return
        common = read(Path(newest[0]) / "common.pt")
        self.step = common["step"]
        self.model.module.load_state_dict(common["model"])
        self.optimizer.load_state_dict(common["optimizer"])
        self.scheduler.load_state_dict(common["scheduler"])
        self.load_session(Path(newest[0]), common["ranks"])

    def load_session(self, folder: Path, old_ranks: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if ranks == old_ranks:
            self.session.load_state_dict(read(folder / f"session-{rank}.pt"))
            return
        # Each old rank's residual goes to exactly one new rank, and nothing is lost.
        mine = [read(folder / f"session-{old}.pt") for old in range(rank, old_ranks, ranks)]
        if mine:
            self.session.load_state_dict(mine, on_resize="sum")
        else:  # there are more ranks than before
            self.session.load_state_dict(read(folder / "session-0.pt"), on_resize="drop")


def write(state: dict, file: Path) -> None:
    with file.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def read(file: Path) -> dict:
    return torch.load(file, weights_only=True)


def check_launcher() -> None:
    """Refuse a launcher under which restarted workers may hang."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise SystemExit(
            "torchrun's store outlives a restart, and new workers may find the addresses of the dead ones: "
            "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )


def main() -> None:
    check_launcher()
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--method", default="topk(ratio=0.01)")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Run(arguments.method)
    run.load(arguments.folder)
    if rank == 0:
        print(f"begins at step {run.step} with {ranks} ranks", flush=True)

    points, labels = data()
    while run.step < arguments.steps:
        # The batch depends on the step alone, so a resumed run sees the batches that it would have seen.
        rng = torch.Generator().manual_seed(run.step)
        batch = torch.randint(len(points), (BATCH,), generator=rng)[rank::ranks]
        run.optimizer.zero_grad()
        cross_entropy(run.model(points[batch]), labels[batch]).backward()
        run.optimizer.step()
        run.scheduler.step()
        run.step += 1
        if run.step % arguments.every == 0 or run.step == arguments.steps:
            run.save(arguments.folder)
            if rank == 0:
                print(f"saved step {run.step}", flush=True)

    if rank == 0:
        accuracy = (run.model.module(points).argmax(1) == labels).float().mean()
        flat = torch.cat([p.detach().flatten() for p in run.model.parameters()])
        digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
        print(f"accuracy {accuracy:.3f} after {run.step} steps, parameters {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
