"""Commands that are interrupted, meet a full disk or another command: one line each, and nothing is lost."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.errors import ConfigError
from thinwire.tools.cli import app
from thinwire.tools.compare.records import Step, read
from thinwire.tools.compare.runner import Observer, run
from thinwire.tools.compare.settings import Comparison

COMPARE = ("compare", "-m", "dense", "--workers", "2", "--link", "none", "--hidden", "16")


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "thinwire", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
    )


def wait_for(path: Path, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "to_all",
    [
        pytest.param(False, id="to the command"),
        pytest.param(True, id="to all its processes", marks=pytest.mark.slow),
    ],
)
def test_sigterm_is_one_line_and_runs_that_had_ended_are_kept(to_all: bool, tmp_path: Path) -> None:
    # The second method takes long enough; the first has ended when the signal comes.
    arguments = (*COMPARE, "-m", "fp16", "--steps", "1000", "--evaluate-every", "1000")
    process = start(*arguments, "--out", str(tmp_path))
    try:
        wait_for(tmp_path / "records.jsonl")
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    lines = [line for line in errors.splitlines() if line and not line.startswith("method, step")]
    assert lines == [f"thinwire: interrupted; {tmp_path} has the runs that had ended: go on with --resume"]
    assert [one.method for one in read(tmp_path / "records.jsonl").runs] == ["dense"]


def test_a_reader_that_ends_early_is_no_traceback() -> None:
    process = start("methods")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(300), errors) == (1, "")
    process.stderr.close()


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_earlier_records_survive(tmp_path: Path) -> None:
    arguments = (*COMPARE, "--steps", "2", "--out", str(tmp_path))
    first = start(*arguments)
    assert first.communicate(timeout=400)[1].count("thinwire:") == 0
    before = (tmp_path / "records.jsonl").read_bytes()

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    second = start(*arguments, preexec_fn=no_room)
    errors = second.communicate(timeout=400)[1]
    assert second.returncode == 1
    assert errors.splitlines()[-1].startswith("thinwire: File too large")
    assert "Traceback" not in errors
    assert (tmp_path / "records.jsonl").read_bytes() == before
    assert not list(tmp_path.glob("*.new"))


class Meddler(Observer):
    """Starts another comparison into the same folder while the first one trains."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.answers: list[str] = []

    def step(self, record: Step) -> None:
        if record.step == 1:
            arguments = (*COMPARE, "--steps", "1", "--out", str(self.out))
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 2
            self.answers.append(result.output.splitlines()[-1])


def test_two_comparisons_do_not_share_a_folder(tmp_path: Path) -> None:
    meddler = Meddler(tmp_path)
    asked = Comparison(["dense"], workers=2, link="none", steps=2, hidden=(16,))
    records = run(asked, tmp_path, meddler)
    assert len(meddler.answers) == 1
    assert f"another comparison is writing to {tmp_path}" in meddler.answers[0]
    assert read(tmp_path / "records.jsonl") == records


def test_resume_trains_only_what_is_missing(tmp_path: Path) -> None:
    def asked(*methods: str, seeds: int = 1, steps: int = 2) -> Comparison:
        return Comparison(list(methods), workers=2, link="none", steps=steps, hidden=(16,), seeds=seeds)

    first = run(asked("dense", "fp16"), tmp_path)
    trained = Trained()
    second = run(asked("dense", "topk", seeds=2), tmp_path, trained, resume=True)
    assert trained.runs == [("dense", 1), ("topk", 0), ("topk", 1)]
    assert second.runs[0] == first.runs[0]
    assert [step for step in second.steps if (step.method, step.seed) == ("dense", 0)] == [
        step for step in first.steps if step.method == "dense"
    ]
    assert read(tmp_path / "records.jsonl") == second
    with pytest.raises(ConfigError, match=r"cannot be resumed: its steps is 2, now it is 3"):
        run(asked("dense", steps=3), tmp_path, resume=True)


class Trained(Observer):
    """Notes which runs really trained."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, int]] = []

    def step(self, record: Step) -> None:
        if (record.method, record.seed) not in self.runs:
            self.runs.append((record.method, record.seed))
