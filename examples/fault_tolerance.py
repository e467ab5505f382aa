"""Training that outlives its workers, with torchft: a replica group is killed and comes back.

RUST_LOG=error python examples/fault_tolerance.py
RUST_LOG=error python examples/fault_tolerance.py --method "pqasgd(every=8, bits=8)"

Without TORCHFT_LIGHTHOUSE it starts a lighthouse and three groups on this machine, and starts those again
that die; group 1 kills itself. On real machines `torchft_lighthouse` and torchrun do that: see
docs/guides/torchft.md.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
from ddp_before import data
from torch import nn
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

import thinwire
from thinwire.averaging import Schedule


def train(method: str, steps: int, crash_at: int | None) -> None:
    """One replica group."""
    group = int(os.environ["REPLICA_GROUP_ID"])
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        replica_id=f"group {group}",
    )
    session = thinwire.attach(model, method, manager=manager, optimizer=optimizer)
    # A schedule asks for a quorum in its sync rounds; other methods need one in every step, as in any torchft
    # program.
    if not isinstance(session.method, Schedule):
        optimizer = Optimizer(manager, optimizer)

    points, labels = data()
    while session.step < steps:
        if session.step == crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        rng = torch.Generator().manual_seed(1000 * group + session.step)
        batch = torch.randint(len(points), (32,), generator=rng)
        optimizer.zero_grad()
        cross_entropy(model(points[batch]), labels[batch]).backward()
        optimizer.step()
        time.sleep(0.1)  # slow enough for group 1 to come back in time
    session.finish()  # all groups have the same model now
    manager.shutdown(wait=False)
    accuracy = (model(points).argmax(1) == labels).float().mean()
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    print(f"group {group}: accuracy {accuracy:.3f} after {steps} steps, sum of all weights {total:.9f}")


def start(group: int, lighthouse: str, *options: str) -> subprocess.Popen[bytes]:
    """A group on this machine, in the environment that torchrun would give it."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    stores.append(store)
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA_GROUP_ID": str(group), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *sys.argv, *options], env={**os.environ, **environment})


stores: list[TCPStore] = []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--method", default="topk(ratio=0.01)")
    parser.add_argument("--crash-at", type=int)
    given = parser.parse_args()
    if "TORCHFT_LIGHTHOUSE" in os.environ:
        train(given.method, given.steps, given.crash_at)
        return
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=2000)
    address = lighthouse.address()
    crash = f"--crash-at={given.steps // 6}"
    groups = [start(0, address), start(1, address, crash), start(2, address)]
    if groups[1].wait() != 0:
        print("group 1 has died: starting it again", flush=True)
        groups[1] = start(1, address)
    codes = [process.wait() for process in groups]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
