"""PyTorch's own hooks, as `compare` and `run` install them."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, time
from types import SimpleNamespace
import torch, torch.distributed as dist
from thinwire.hosts.scripts import add_pytorch_hook

store, rank, hook = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
if hook == "hook":
    add_pytorch_hook(SimpleNamespace(register_comm_hook=lambda state, hook: None), "pytorch-fp16", None)
if rank == "1":
    time.sleep(0.5)
# As in a hook: the callback of a sum holds the group, here until after the group is destroyed.
begun, over = threading.Event(), threading.Event()
future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
ended = future.then(lambda done, held=dist.group.WORLD: (begun.set(), time.sleep(1), over.set()))
begun.wait()
del future, ended
dist.destroy_process_group()
over.wait()  # an interpreter that ends under the callback would abort as well
time.sleep(1)
print("went on")
"""


def run(store: Path, hook: str) -> tuple[int, str]:
    """The exit code and the output of the first rank."""
    words = [sys.executable, "-c", PROGRAM, str(store)]
    with (
        subprocess.Popen([*words, "1", "hook"]),
        subprocess.Popen(
            [*words, "0", hook], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as first,
    ):
        output, _ = first.communicate(timeout=400)
    return first.returncode, output


def test_a_group_destroyed_under_a_hooks_callback_does_not_abort_the_process(tmp_path: Path) -> None:
    code, output = run(tmp_path / "store", "hook")
    assert code == 0, output
    assert "went on" in output


@pytest.mark.slow
def test_torch_needs_that_reference(tmp_path: Path) -> None:
    """If this fails, torch has mended it: remove the reference that `add_pytorch_hook` keeps."""
    code, output = run(tmp_path / "store", "no hook")
    assert code != 0
    assert "Resource deadlock avoided" in output
