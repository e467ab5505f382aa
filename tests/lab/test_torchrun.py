"""The command of docs/clusters.md, on two hosts of the lab."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from thinwire.tools.lab import namespaces

ROOT = Path(__file__).parents[2]


def test_torchrun_on_plain_hosts() -> None:
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)
    page = (ROOT / "docs/clusters.md").read_text()
    (line,) = re.findall(r"^    (torchrun .*HOST.* train\.py)$", page, re.MULTILINE)
    with namespaces.network(2, rate="100mbit") as hosts:
        processes = []
        for rank, host in enumerate(hosts):
            here = line.replace("HOST", hosts[0].address).replace("--node-rank 0", f"--node-rank {rank}")
            words = shlex.split(here.replace("train.py", f"{ROOT}/examples/ddp_after.py --steps 20"))
            command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
            processes.append(host.start(command, {"OMP_NUM_THREADS": "1"}))
        ended = [process.communicate(timeout=400) for process in processes]
        codes = [process.returncode for process in processes]
        links = [
            json.loads(namespaces.ip("-j", "-s", "-n", h.name, "link", "show", "dev", "eth0")) for h in hosts
        ]
    assert codes == [0, 0], ended
    printed = "".join(out for out, _ in ended)
    assert "accuracy" in printed
    sent = int(re.search(r"([0-9,]+) bytes sent per step", printed)[1].replace(",", ""))
    assert all(one["stats64"]["rx"]["bytes"] >= 20 * sent for (one,) in links), "they did not use their links"


def test_a_c10d_rendezvous_whose_host_is_told() -> None:
    """Both hosts have the same name, which resolves to neither: without is_host nobody holds the store."""
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)
    page = (ROOT / "docs/clusters.md").read_text()
    assert "`--rdzv-conf is_host=1` on `HOST` and `is_host=0` on the others" in page
    assert "`--local-addr ADDRESS`" in page
    with namespaces.network(2, rate="100mbit") as hosts:
        processes = []
        for rank, host in enumerate(hosts):
            where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:29500"]
            who = ["--rdzv-conf", f"is_host={int(rank == 0)}", "--local-addr", host.address]
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *where, *who]
            script = [f"{ROOT}/examples/ddp_after.py", "--steps", "5"]
            processes.append(host.start([*launcher, *script], {"OMP_NUM_THREADS": "1"}))
        ended = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    assert "accuracy" in "".join(out for out, _ in ended)
