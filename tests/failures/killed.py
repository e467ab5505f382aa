"""A run that is killed again and again, at random moments, and continued each time.

    python -m tests.failures.killed FOLDER SEED

One process imports torch and forks the ranks of every attempt. After a random time it kills one of them with
SIGKILL, sometimes all, and damages what a write in progress may leave. It prints the parameters of a run that
nobody disturbed, those of the killed run, and the number of attempts.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

STEPS = 30
RANKS = 2


def program(rank: int, attempt: Path, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    import thinwire

    store = dist.FileStore(str(attempt / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=5))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 200), torch.nn.Tanh(), torch.nn.Linear(200, 40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = thinwire.attach(model, "localsgd(every=3, overlap=1)", optimizer=optimizer)
    checkpointer = thinwire.Checkpointer(folder, session, model, optimizer, every=1)
    begin = checkpointer.load_latest()
    for step in range(begin, STEPS):
        rng = torch.Generator().manual_seed(1000 * rank + step)
        optimizer.zero_grad()
        model(torch.randn(4, 40, generator=rng)).square().mean().backward()
        optimizer.step()
        checkpointer.step()
        (attempt / f"stepped-{rank}").touch()
    checkpointer.wait()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    (attempt / f"digest-{rank}").write_text(hashlib.sha256(flat.numpy().tobytes()).hexdigest())
    os._exit(0)


def start(attempt: Path, folder: Path) -> list[int]:
    attempt.mkdir()
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            for stream in (1, 2):
                os.dup2(os.open(attempt / f"log-{rank}", os.O_CREAT | os.O_WRONLY, 0o600), stream)
            program(rank, attempt, folder)
        pids.append(pid)
    return pids


def ended(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def digests(attempt: Path) -> str:
    return " ".join((attempt / f"digest-{rank}").read_text() for rank in range(RANKS))


def main() -> None:
    import torch._dynamo  # noqa: F401

    from thinwire.sessions import checkpointer

    checkpointer.EXIT_TIMEOUT = 1.0

    root, rng = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    assert ended(start(root / "straight", root / "undisturbed")) == [0] * RANKS
    straight = digests(root / "straight")
    folder = root / "killed"
    kills = 0
    for number in range(40):
        attempt = root / f"attempt-{number}"
        pids = start(attempt, folder)
        if kills < 3:
            while not (attempt / "stepped-0").exists():
                time.sleep(0.01)
            time.sleep(rng.random() * 0.5)
            for pid in pids if rng.random() < 0.3 else [rng.choice(pids)]:
                os.kill(pid, signal.SIGKILL)
            kills += 1
            if rng.random() < 0.5:
                time.sleep(0.2)
        codes = ended(pids)
        if codes == [0] * RANKS:
            print(straight, digests(attempt), number + 1, sep="\n")
            return
        unfinished = [path for path in folder.glob("step-*") if not (path / "manifest.json").exists()]
        for path in unfinished:
            for file in path.glob("*.pt"):
                file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])
    raise SystemExit("it never came to its end")


if __name__ == "__main__":
    main()
