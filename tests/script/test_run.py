"""`thinwire run`: scripts as they are, in worker processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.script.common import PLAIN, TOPK, TORCHRUN, command, run, summary, write


def test_a_plain_script_is_trained_with_the_method(tmp_path: Path) -> None:
    source = """
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("name")
    given = parser.parse_args()
    import beside
    import thinwire
    from pathlib import Path
    assert sys.path[0] == str(Path(__file__).resolve().parent) and __name__ == "__main__"
    model = DDP(net())
    assert isinstance(model, DDP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = train(model, optimizer, given.steps)
    thinwire.record(loss=loss, rank=rank, half=torch.tensor(0.5), worst=float("nan"))
    if rank == 0:
        print(given.name, beside.VALUE, sys.argv)
    dist.destroy_process_group()
    sys.exit(0)
    """
    (tmp_path / "code").mkdir()
    (tmp_path / "code/beside.py").write_text("VALUE = 7\n")
    write(tmp_path / "code", source)
    # The last two words look like options of thinwire, but they come after the script.
    words = (*TOPK, "--nproc", "2", "code/train.py", "--steps", "5", "--", "--method")
    done = command(tmp_path, *words, process=True)
    assert done.returncode == 0, done.stderr
    assert "--method 7 ['code/train.py', '--steps', '5', '--', '--method']" in done.stdout
    found = summary(tmp_path)
    assert (found["workers"], found["steps"]) == (2, 5)
    assert found["values"] == {
        "loss": pytest.approx(found["values"]["loss"]),
        "rank": 0,
        "half": 0.5,
        "worst": None,
    }
    (model,) = found["models"]
    assert (model["model"], model["method"][:4], model["steps"]) == ("Sequential", "topk", 5)
    assert model["parameters"] == 40 * 100 * 2 + 140
    assert 0.05 < model["ratio_to_dense"] < 0.5
    assert model["sent_bytes"] > 0
    assert model["received_bytes"] > 0
    assert model["rounds"] >= 5
    assert "Sequential" in done.stdout
    assert "of dense" in done.stdout


def test_under_torchrun(tmp_path: Path) -> None:
    done = run(tmp_path, PLAIN, *TOPK, "--json", "made/it.json", launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of dense") == 1
    assert (tmp_path / "made/it.json").exists()
    assert re.search(r"rank 1 loss 0\.\d+", done.stdout)


@pytest.mark.slow
def test_torchrun_shows_the_traceback_of_the_worker_that_failed(tmp_path: Path) -> None:
    source = """
    dist.barrier()
    if rank == 1:
        raise ValueError("this is why")
    dist.barrier()
    """
    done = run(tmp_path, source, *TOPK, launcher=TORCHRUN)
    assert done.returncode == 1
    assert "ValueError: this is why" in done.stderr.rpartition("Root Cause")[2]


def test_several_models_accumulation_and_a_module(tmp_path: Path) -> None:
    source = """
    first, second = DDP(net()), DDP(nn.Linear(40, 40))
    optimizers = [torch.optim.Adam(each.parameters()) for each in (first, second)]
    first.eval()
    with torch.no_grad():
        if rank == 0:
            first.module(torch.zeros(1, 40))  # an evaluation before the first step, on one rank
    first.train()
    for step in range(3):
        for model, optimizer in zip((first, second), optimizers):
            x = torch.randn(8, 40)
            with model.no_sync():
                model(x).square().mean().backward()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    total = sum(p.sum() for p in [*first.parameters(), *second.parameters()]).reshape(1).detach()
    both = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(both, total)
    assert both[0] == both[1], both
    """
    write(tmp_path, source, "made.py")
    done = command(tmp_path, *TOPK, "--module", "made")
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path)
    assert [(one["model"], one["steps"]) for one in found["models"]] == [("Sequential", 3), ("Linear", 3)]
    assert found["steps"] == 3


@pytest.mark.slow
def test_amp_with_a_scaler_and_compile(tmp_path: Path) -> None:
    source = """
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    wrapped = torch.compile(DDP(net()), backend="aot_eager")
    inner = DDP(torch.compile(net(), backend="eager"))
    for model in (wrapped, inner):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [p.clone() for p in model.parameters()]
        for step in range(3):
            x = torch.randn(8, 40)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert all((p != q).any() for p, q in zip(model.parameters(), before))
    """
    done = run(tmp_path, source, *TOPK)
    assert done.returncode == 0, done.stderr
    assert [(one["model"], one["steps"]) for one in summary(tmp_path)["models"]] == [
        ("Sequential 1", 3),
        ("Sequential 2", 3),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "steps", "expected"), [("pqasgd(every=2)", 4, "pqasgd"), ("auto", 8, "auto: ")]
)
def test_other_kinds_of_methods(method: str, steps: int, expected: str, tmp_path: Path) -> None:
    source = PLAIN.replace("train(model, optimizer)", f"train(model, optimizer, {steps})")
    done = run(tmp_path, source, "--method", method, "--link", "1gbit")
    assert done.returncode == 0, done.stderr
    (model,) = summary(tmp_path)["models"]
    assert model["method"].startswith(expected)
    assert model["steps"] == steps
    assert model["sent_bytes"] > 0


def test_a_sharded_model(tmp_path: Path) -> None:
    source = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = net(), init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.AdamW(model.parameters()))
    dist.destroy_process_group()
    """
    done = run(tmp_path, source, "--method", "qsgd(bits=8)")
    assert done.returncode == 0, done.stderr
    (model,) = summary(tmp_path)["models"]
    assert (model["model"], model["steps"]) == ("FSDPSequential", 4)
    assert 0.2 < model["ratio_to_dense"] < 0.3


SEVERAL = """
model = DDP(net())
parameters = list(model.parameters())
muon = torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01)
adamw = torch.optim.AdamW([p for p in parameters if p.dim() < 2], lr=0.002)
for step in range({steps}):
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(2 * step + rank))
    loss = (model(x) - x).square().mean()
    loss.backward()
    for optimizer in (muon, {turns}):
        optimizer.step()
    for optimizer in (muon, adamw):
        optimizer.zero_grad()
total = sum(p.sum() for p in parameters).detach().reshape(1)
both = [torch.zeros(1), torch.zeros(1)]
dist.all_gather(both, total)
assert both[0] == both[1], both
"""


@pytest.mark.parametrize("method", ["topk(ratio=0.1)", "localsgd(every=2)"])
def test_muon_and_adamw_side_by_side(method: str, tmp_path: Path) -> None:
    """A step is one of both; after the last the replicas are equal."""
    done = run(tmp_path, SEVERAL.format(steps=4, turns="adamw"), "--method", method)
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path)
    (model,) = found["models"]
    assert (found["steps"], model["steps"]) == (4, 4)
    assert (model["optimizer"], model["kind"]) == ("Muon and AdamW", "adaptive")
    assert model["learning_rate"] == 0.01


def test_optimizers_that_step_unequally_often(tmp_path: Path) -> None:
    """No matter to gradients, which are averaged when they are computed. A schedule names them."""
    source = SEVERAL.format(steps=4, turns="adamw, adamw")
    done = run(tmp_path, source, *TOPK)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path)["models"][0]["steps"] == 4
    done = run(tmp_path, source, "--method", "localsgd(every=2)")
    assert done.returncode == 1
    assert "ConfigError: AdamW (optimizer[1]) steps a second time before Muon" in done.stderr.splitlines()[-1]


def test_a_failing_worker_ends_all_with_its_traceback_last_and_its_code(tmp_path: Path) -> None:
    source = """
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    if rank == 1:
        raise ValueError("this is why")
    train(model, optimizer, 1)
    import time
    time.sleep(1000)
    """
    begin = time.monotonic()
    done = run(tmp_path, source, *TOPK)
    assert done.returncode == 1
    assert time.monotonic() - begin < 300
    *_, failed, first, where, _, last = done.stderr.strip().splitlines()
    assert failed == "thinwire: worker 1 failed:"
    assert (first, last) == ("Traceback (most recent call last):", "ValueError: this is why")
    assert 'train.py", line' in where
    assert not (tmp_path / "out/run.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("sys.exit(7)", 7, "worker 1 left with exit code 7"),
        ("sys.exit('enough')", 1, "enough"),
        ("os.kill(os.getpid(), 9)", 137, "exit code 137"),
        ("os._exit(5)", 5, "exit code 5"),
    ],
)
def test_the_exit_code_is_kept(how: str, code: int, said: str, tmp_path: Path) -> None:
    source = f"""
    if rank == 1:
        {how}
    dist.barrier()
    """
    done = run(tmp_path, source, *TOPK)
    assert done.returncode == code, done.stderr
    assert said in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("source", "options", "code", "said"),
    [
        ("net()(torch.zeros(1, 40))", TOPK, 0, "trained no DistributedDataParallel model"),
        ("torch.multiprocessing.spawn(net, nprocs=2)", TOPK, 2, "the script starts its own workers"),
        (
            "import thinwire\nmodel = DDP(net())\nthinwire.attach(model, 'qsgd')\nmodel(torch.zeros(1, 40))",
            TOPK,
            2,
            "the script calls thinwire.attach itself",
        ),
        pytest.param(
            "model = DDP(net())\nmodel(torch.zeros(1, 40))",
            ("--method", "localsgd"),
            2,
            "the script has made none for this model",
            marks=pytest.mark.slow,
        ),
        (
            "model = DDP(net())\nmodel(torch.zeros(1, 40))",
            (),
            2,
            "auto chooses by the model's optimizer, and the script has made none for this model",
        ),
        pytest.param(
            "model = DDP(net())\nmodel(torch.zeros(1, 40))",
            ("--method", "adam"),
            2,
            "takes the steps of the model's optimizer, and the script has made none for this model",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "model = DDP(net())\ntrain(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))",
            ("--method", "dgc"),
            2,
            "it would act twice",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no DDP", "spawn", "own attach", "no optimizer", "auto", "adam", "momentum"],
)
def test_what_cannot_be_served_is_one_line(
    source: str, options: tuple[str, ...], code: int, said: str, tmp_path: Path
) -> None:
    done = run(tmp_path, source, "--nproc", "1", *options)
    assert done.returncode == code, done.stderr
    assert said in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_wrong_options_are_one_line(tmp_path: Path) -> None:
    write(tmp_path, PLAIN)
    for words, said in {
        ("nothing.py",): "there is no script nothing.py",
        ("--method", "tpk", "train.py"): "did you mean 'topk'",
        ("--link", "fast", "train.py"): "link 'fast'",
    }.items():
        done = command(tmp_path, *words)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_interrupting_ends_all_workers(tmp_path: Path) -> None:
    source = """
    from pathlib import Path
    dist.barrier()
    Path(f"pid{rank}").write_text(str(os.getpid()))
    import time
    try:
        time.sleep(100)
    except KeyboardInterrupt:
        Path(f"saved{rank}").touch()
        raise
    """
    write(tmp_path, source)
    words = [sys.executable, "-m", "thinwire", "run", *TOPK, "train.py"]

    def hears_ctrl_c() -> None:  # a job in the background of a shell does not
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=hears_ctrl_c,  # noqa: PLW1509
    )
    try:
        deadline = time.monotonic() + 100
        while not all((tmp_path / f"pid{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode != 0
    assert (tmp_path / "saved0").exists()
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)
