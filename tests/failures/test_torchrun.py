"""Under torchrun, which ends the survivors of a death at once, each one says who is gone and what to do."""

from __future__ import annotations

import logging
import os
import queue
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import thinwire
from tests.hosts.common import loaded_together, mlp, square_loss, wrap
from thinwire.net import torchrun
from thinwire.net.launch import Worker, start_local

ROOT = Path(__file__).parents[2]


def test_every_survivor_names_a_killed_rank_before_torchrun_ends_it(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    # With the default of a tenth of a second a busy machine may come too late.
    logs = ["--monitor-interval", "2", "--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run(
        [*launcher, *logs, "-m", "tests.failures.doomed", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL)" in done.stderr
    died = float((tmp_path / "died").read_text())
    for rank in range(2):
        (log,) = tmp_path.glob(f"logs/*/attempt_0/{rank}/stderr.log")
        lines = [line for line in log.read_text().splitlines() if "torchrun starts all ranks again" in line]
        assert len(lines) == 1, log.read_text()[-3000:]
        written, told = lines[0].split(" ", 1)
        # The second one if this rank has heard it from the other survivor.
        assert re.match("thinwire: rank 2 (was killed by SIGKILL|does not answer)", told)
        assert "a thinwire.Checkpointer goes on from the last checkpoint" in told
        assert float(written) < died + 1.0


# -- without torchrun itself --------------------------------------------------------------------------------


class Heard(logging.Handler):
    """The lines of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def another_ends(worker: Worker, how: str) -> list[str] | None:
    """As if torchrun had started the ranks; what rank 0 says within a second after the end of rank 1."""
    loaded_together(worker, "topk(ratio=0.1)")
    rank = str(worker.rank)
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": rank, "LOCAL_RANK": rank}
    os.environ["LOCAL_WORLD_SIZE"] = str(worker.size)
    logging.getLogger("thinwire").addHandler(heard := Heard())
    model = wrap(mlp())
    session = thinwire.attach(model, "topk(ratio=0.1)")
    square_loss(model, worker.rank, 0).backward()
    if worker.rank == 1:
        match how:
            case "returns":
                return None
            case "raises":
                raise ZeroDivisionError
            case _:
                os._exit(3)
    time.sleep(1.0)
    session.detach()
    return [line for line in heard.lines if "rank 1" in line]


@pytest.mark.parametrize("how", ["returns", "raises", "exits"])
def test_a_line_only_if_a_rank_has_not_said_anything_itself(how: str) -> None:
    lines = start_local(another_ends, 2, how, timeout=100)[0].value
    if how == "exits":
        (line,) = lines
        assert line.startswith("thinwire: rank 1 has ended")
        assert "With --max-restarts torchrun starts all ranks again" in line
    else:
        assert lines == []


@pytest.mark.parametrize(
    ("script", "described"),
    [
        ("exit 0", "has ended with exit code 0"),
        ("exit 3", "has ended with exit code 3"),
        ("kill -9 $$", "was killed by SIGKILL"),
    ],
)
def test_the_end_of_a_process_is_noticed_at_once(script: str, described: str) -> None:
    process = subprocess.Popen(["sh", "-c", f"read wait; {script}"], stdin=subprocess.PIPE)
    found: queue.Queue[tuple[int, int | None]] = queue.Queue()
    watch = torchrun.Watch(lambda: {7: process.pid}, lambda rank, status: found.put((rank, status)))
    with pytest.raises(queue.Empty):
        found.get(timeout=0.1)
    process.stdin.close()
    rank, status = found.get(timeout=10)
    process.wait()
    watch.close()
    assert (rank, torchrun.described(status)) == (7, described)
