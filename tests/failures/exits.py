"""Runs whole programs as forked processes, which end as a script ends: with `atexit` and all.

    python -m tests.failures.exits FOLDER

One process imports torch and forks the ranks of every scenario, because the import takes most of the time.
What each writes is in FOLDER, under the name of the scenario and the rank, with its exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

STEPS = 8


@dataclass(frozen=True)
class Scenario:
    """A run that ends with its last sync round under way."""

    method: str
    size: int = 2
    destroyed: bool = True
    late: float = 0.0
    """The last rank comes to the sync round so many seconds after the others."""
    absent: bool = False
    """The last rank is alive and never comes to the sync round."""
    dead: bool = False
    """The last rank dies before the sync round."""

    @property
    def name(self) -> str:
        how = f"late {self.late}" if self.late else "absent" if self.absent else "dead" if self.dead else ""
        return f"{self.method}, {self.size} ranks, {'destroyed' if self.destroyed else 'left'}, {how}"

    def gone(self, rank: int) -> bool:
        return rank == self.size - 1 and (self.absent or self.dead)


SCENARIOS = (
    Scenario("localsgd(every=8, overlap=4)", destroyed=False),
    Scenario("diloco(every=8, fragments=2)", late=1.0),
    Scenario("localsgd(every=8, overlap=4)", absent=True),
    Scenario("localsgd(every=8, overlap=4)", absent=True, destroyed=False),
    Scenario("localsgd(every=8, overlap=4)", dead=True),
    Scenario("diloco(every=8, fragments=2)", 4, absent=True),
)


def program(scenario: Scenario, rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    import thinwire

    store = dist.FileStore(str(folder / "store"), scenario.size)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=scenario.size, timeout=timeout)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = thinwire.attach(model, scenario.method, optimizer=optimizer)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model(torch.ones(2, 40)).square().mean().backward()
        if step == STEPS and rank == scenario.size - 1:
            if scenario.dead:
                os._exit(0)
            if scenario.absent:
                while not (folder / "ended").exists():
                    time.sleep(0.1)
                os._exit(0)
            time.sleep(scenario.late)
        optimizer.step()
    assert session.under_way
    if scenario.destroyed:
        dist.destroy_process_group()
    print("complete", flush=True)


def main() -> None:
    from thinwire.drivers import lanes

    # Before the ranks are forked, once: an optimizer's first step imports the second, for seconds.
    for module in ("thinwire.hosts.attach", "torch._dynamo"):
        importlib.import_module(module)

    lanes.EXIT_TIMEOUT = 2.0
    root = Path(sys.argv[1])
    children: dict[int, tuple[Scenario, int]] = {}
    for scenario in SCENARIOS:
        folder = root / scenario.name
        folder.mkdir()
        for rank in range(scenario.size):
            pid = os.fork()
            if pid == 0:
                for stream, name in ((1, "out"), (2, "err")):
                    os.dup2(os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY, 0o600), stream)
                program(scenario, rank, folder)
                return  # and the interpreter ends
            children[pid] = scenario, rank
    codes: dict[str, dict[int, int]] = {}
    while children:
        pid, status = os.wait()
        scenario, rank = children.pop(pid)
        codes.setdefault(scenario.name, {})[rank] = os.waitstatus_to_exitcode(status)
        if (
            sum(scenario.gone(rank) for rank in range(scenario.size)) + len(codes[scenario.name])
            == scenario.size
        ):
            (root / scenario.name / "ended").touch()
    (root / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
