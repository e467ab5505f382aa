"""The files of docs/clusters.md: the batch file runs with two stand-ins for nodes, the manifest parses."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/clusters.md").read_text()
COMMANDS = {
    "scontrol": "echo 127.0.0.1",
    "srun": '"$@" & first=$!; "$@"; last=$?; wait $first && exit $last',  # once per node
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


@pytest.mark.slow
def test_the_batch_file(tmp_path: Path) -> None:
    (text,) = re.findall(r"```text\n(#!/bin/bash\n.*?)```", PAGE, re.DOTALL)
    for name, script in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = text.replace("train.py", f"{ROOT}/examples/ddp_after.py --steps 5").replace(":29500", f":{port}")
    (tmp_path / "train.sbatch").write_text(here)
    given = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "1"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(tmp_path / "train.sbatch")],
        env={**os.environ, **given, "PATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "topk(ratio=0.01) on 2 ranks" in done.stderr
    assert "accuracy" in done.stdout


def test_the_manifest() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in replicas.items()} == {"Master": 1, "Worker": 3}
    for one in replicas.values():
        (container,) = one["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["command"] == ["python", "train.py"]
