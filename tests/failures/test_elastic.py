"""Elastic runs: `torchrun --nnodes 2:4` with nodes that die and join, each an agent of this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A dead node is missed after ten seconds. With three, a rendezvous on a busy machine has failed.
CONF = "last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=5"
PATIENCE = 120.0


class Run:
    """The nodes of an elastic run. The first one holds the store of the rendezvous."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def join(self) -> None:
        """Start one more node."""
        place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "run"]
        size = ["--nnodes", "2:4", "--nproc-per-node", "1", "--max-restarts", "5"]
        times = ["--rdzv-conf", CONF, "--monitor-interval", "0.2", "--local-addr", "127.0.0.1"]
        launcher = [sys.executable, "-m", "torch.distributed.run", *size, *place, *times]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.folder / f"node-{len(self.nodes)}").open("wb") as log:
            node = subprocess.Popen(
                [*launcher, "-m", "tests.failures.elastic", str(self.folder)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.nodes.append(node)

    def open(self) -> None:
        """Start the first node, and wait for its store: the others would try to hold it themselves."""
        self.join()
        self.until("the rendezvous is open", self._listens)

    def _listens(self) -> bool:
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self, number: int) -> None:
        """The node is gone: its agent and its workers."""
        agent = self.nodes[number]
        workers = children(agent.pid)
        for pid in (agent.pid, *workers):
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def attempts(self) -> list[dict]:
        file = self.folder / "attempts"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def reached(self) -> int:
        file = self.folder / "reached"
        return int(file.read_text() or 0) if file.exists() else 0

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            ended = [n for n, node in enumerate(self.nodes) if node.poll() not in (None, -signal.SIGKILL)]
            assert not ended, f"node {ended[0]} has ended before {what}:\n{self.logs()}"
            assert time.monotonic() < end, f"not reached: {what}\n{self.logs()}"
            time.sleep(0.05)

    def until_ranks(self, ranks: int, steps: int) -> None:
        """Until the newest attempt has so many ranks, and has taken so many steps."""

        def there() -> bool:
            newest = self.attempts()[-1:]
            return (
                bool(newest) and newest[0]["ranks"] == ranks and self.reached() > newest[0]["begin"] + steps
            )

        self.until(f"{steps} steps with {ranks} ranks", there)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-2500:]}" for path in sorted(self.folder.glob("node-*"))
        )

    def close(self) -> None:
        for number, node in enumerate(self.nodes):
            if node.poll() is None:
                self.kill(number)


def children(parent: int) -> list[int]:
    found: list[int] = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(status.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.slow
def test_nodes_die_and_join_and_nothing_is_lost(tmp_path: Path) -> None:
    run = Run(tmp_path)
    try:
        run.open()
        run.join()
        run.join()
        run.until_ranks(3, steps=20)
        run.kill(2)
        run.until_ranks(2, steps=20)
        run.join()
        run.until_ranks(3, steps=20)
        (tmp_path / "end").touch()
        codes = [node.wait(timeout=PATIENCE) for node in run.nodes]
        assert codes == [0, 0, -signal.SIGKILL, 0], run.logs()
    finally:
        run.close()
    attempts = run.attempts()
    shrunk = next(one for one in attempts if one["begin"] and one["ranks"] == 2)
    grown = attempts[-1]
    assert grown["ranks"] == 3
    assert 0 < shrunk["begin"] < grown["begin"], "a restart began anew"
    assert min(shrunk["residual"], grown["residual"]) > 0, "there was nothing to deal out"
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(set(result["steps"])) == 1
    assert all(result["alike"])
    assert result["residual"] > 0.02, "the residuals are too small to be missed"
    assert result["lost"] < 1e-5
