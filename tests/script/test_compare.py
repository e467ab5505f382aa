"""`thinwire compare` with a script: its own values beside bytes and times."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.script.common import command, write
from thinwire.errors import ConfigError
from thinwire.tools.compare.records import Records, Setting, read
from thinwire.tools.compare.scripts import most_telling
from thinwire.tools.compare.settings import Comparison, Script, prepare
from thinwire.tools.report.summary import summarise, winner
from thinwire.tools.script.output import Lines, read_patterns

SOURCE = """
import thinwire
from pathlib import Path
model = DDP(net())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
try:
    for step in range(int(sys.argv[2])):
        try:
            loss = train(model, optimizer, 1)
        except Exception:
            print("caught", flush=True)
        thinwire.record(loss=loss, seed=float(sys.argv[1]))
        print(f"rank {rank} val_loss={loss + rank:.4f}")
finally:
    if rank == 1:
        Path(f"left{sys.argv[1]}").touch()
    dist.destroy_process_group()
"""
METHODS = ("pytorch", "topk(ratio=0.1)", "alone")
STEPS = 4
COMPARE = ("-m", "thinwire", "compare")
OPTIONS = ("--link", "1gbit", "--workers", "2", "--metric", "val_loss=([0-9.]+)", "--steps", str(STEPS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("compare")
    write(root, SOURCE)
    chosen = ("-m", ",".join(METHODS), "--baseline", "pytorch")
    done = command(root, "train.py", *chosen, *OPTIONS, "--", "{seed}", "9", launcher=COMPARE)
    assert done.returncode == 0, done.stdout + done.stderr
    (root / "said").write_text(done.stdout)
    return root


@pytest.fixture(scope="module")
def records(folder: Path) -> Records:
    return read(folder / "out/compare/records.jsonl")


def test_every_run_stops_after_the_steps_and_leaves_the_script_properly(
    folder: Path, records: Records
) -> None:
    assert [run.method for run in records.runs] == list(METHODS)
    assert all((run.steps, run.failed) == (STEPS, None) for run in records.runs)
    assert [step.step for step in records.steps] == list(range(1, STEPS + 1)) * len(records.runs)
    assert (folder / "left0").exists()
    assert "caught" not in (folder / "out/compare/logs/pytorch/rank0.log").read_text()


def test_values_come_from_records_and_from_the_output_of_rank_0(records: Records) -> None:
    assert records.names == ["val_loss", "loss", "seed"]
    for run in records.runs:
        own = [row for row in records.values if row.method == run.method]
        recorded = [row for row in own if "loss" in row.values]
        assert [row.step for row in recorded] == list(range(1, STEPS + 1))
        printed = [row for row in own if "val_loss" in row.values]
        assert [row.values["val_loss"] for row in printed] == [
            pytest.approx(row.values["loss"], abs=1e-4) for row in recorded
        ]
        assert run.values["seed"] == 0
        assert all(row.seconds > 0 for row in own)


def test_the_setting_is_filled_in_by_the_first_run(records: Records) -> None:
    setting = records.setting
    assert (setting.model, setting.measure, setting.steps) == ("train.py", "val_loss", STEPS)
    assert setting.script == "train.py '{seed}' 9"
    assert (setting.optimizer, setting.learning_rate) == ("Adam", 0.01)
    assert setting.layers["0.weight"] == (100, 40)
    assert setting.parameters == 40 * 100 * 2 + 140


def test_bytes_and_times_are_those_of_the_methods(records: Records) -> None:
    runs = {run.method.partition("(")[0]: run for run in records.runs}
    assert runs["alone"].sent == 0
    assert runs["pytorch"].sent > 4 * 8140 * STEPS
    assert 0 < runs["topk"].sent < 0.5 * runs["pytorch"].sent
    for name, run in runs.items():
        assert run.compute_seconds > 0
        assert (run.wait_seconds > 0) == (name != "alone")
    assert sum(runs["topk"].layers.values()) == pytest.approx(runs["topk"].payload)


def test_table_csv_and_report_have_the_script_s_values(folder: Path) -> None:
    said = (folder / "said").read_text()
    assert re.search(r"method +val_loss +loss +seed +sent +wait +step +speed-up", said)
    with (folder / "out/compare/runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(METHODS)
    assert float(rows[0]["val_loss"]) > 0
    assert "accuracy" not in rows[0]
    page = (folder / "out/compare/report.html").read_text()
    assert "train.py, 8,140 parameters" in page
    assert "val_loss" in page
    assert "examples per worker" not in page


def test_resume_runs_only_what_is_missing(folder: Path, records: Records) -> None:
    write(folder, "raise SystemExit(3)")  # it must not be run again
    words = ("train.py", "-m", "alone,pytorch", *OPTIONS, "--resume", "--", "{seed}", "9")
    done = command(folder, *words, launcher=COMPARE)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = read(folder / "out/compare/records.jsonl")
    assert [run.method for run in kept.runs] == ["pytorch", "alone"]
    assert kept.runs[0] == records.runs[0]
    assert kept.setting.layers == records.setting.layers


@pytest.mark.slow
def test_a_script_that_fails_names_its_log(tmp_path: Path) -> None:
    write(tmp_path, PLAIN_FAILURE)
    done = command(tmp_path, "train.py", "-m", "dense", "--workers", "2", launcher=COMPARE)
    assert done.returncode == 1
    failed = next(line for line in done.stdout.splitlines() if "failed: " in line)
    assert failed == "dense failed: worker 1: KeyError: 'why' (see out/compare/logs/dense/rank1.log)"
    assert "KeyError: 'why'" in (tmp_path / "out/compare/logs/dense/rank1.log").read_text()
    (run,) = read(tmp_path / "out/compare/records.jsonl").runs
    assert run.steps == 2


PLAIN_FAILURE = """
model = DDP(net())
train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
if rank == 1:
    {}["why"]
dist.barrier()
"""


@pytest.mark.slow
def test_plan_takes_model_time_buckets_and_optimizer_from_the_script(tmp_path: Path) -> None:
    source = """
    import time
    model = DDP(net(), bucket_cap_mb=3)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(100):
        time.sleep(0.05)
        train(model, optimizer, 1)
    """
    write(tmp_path, source)
    launcher = ("-m", "thinwire", "plan")
    done = command(tmp_path, "train.py", "--link", "10mbit", "-m", "topk", launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert re.search(
        r"train.py: 8 steps of one worker, forward .* backward .* rest .*; Adam; buckets of 3 MiB", said
    )
    assert "8,140 parameters" in said
    found = json.loads(
        command(tmp_path, "train.py", "--link", "10mbit", "-m", "topk", "--json", launcher=launcher).stdout
    )
    assert found["compute"] > 0.05
    wrong = command(tmp_path, "train.py", "--step-time", "5ms", launcher=launcher)
    assert wrong.returncode == 2
    assert "leave out --model" in wrong.stderr


@pytest.mark.slow
def test_plan_times_the_steps_of_all_optimizers(tmp_path: Path) -> None:
    """A script may step one of them less often than another."""
    source = """
    import time
    model = DDP(net())
    first, *rest = model.parameters()

    class Slow(torch.optim.SGD):
        def step(self):
            time.sleep(0.02)

    often, seldom = Slow(rest, lr=0.1), torch.optim.Adam([first])
    for step in range(100):
        train(model, often, 1)
        if step % 3 == 2:
            seldom.step()
    """
    write(tmp_path, source)
    words = ("train.py", "--link", "10mbit", "-m", "topk")
    done = command(tmp_path, *words, launcher=("-m", "thinwire", "plan"))
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert re.search(r"train.py: \d+ steps of one worker, .*; Slow and Adam", said)
    (rest,) = re.findall(r"rest ([0-9.]+) ms", said)
    assert float(rest) >= 20


# -- without processes -------------------------------------------------------------------------------------


def test_options_of_the_built_in_tasks_are_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path, ""))
    for options, said in [
        ({"epochs": 1.0}, "--epochs"),
        ({"learning_rate": 0.1}, "--lr"),
        ({"batch": 3}, "--batch"),
    ]:
        with pytest.raises(ConfigError, match=f"^{said} is for the built-in tasks"):
            prepare(Comparison(["dense"], script=Script(path), **options))
    with pytest.raises(ConfigError, match="there is no script"):
        prepare(Comparison(["dense"], script=Script(str(tmp_path / "none.py"))))
    with pytest.raises(ConfigError, match="auto measures 5 steps"):
        prepare(Comparison(["auto"], script=Script(path), steps=3))


def test_patterns_have_names() -> None:
    texts = ["val_loss=([0-9.]+)", r"Test Loss:\s*([0-9.]+)", "(?P<acc>[0-9.]+) %"]
    assert list(read_patterns(texts)) == ["val_loss", "Test Loss", "acc"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("loss", "has 0 groups"),
        ("(a) (b)", "has 2 groups"),
        ("([0-9.]+)", "has no name"),
        ("loss (", "is not a regular expression"),
    ],
)
def test_a_wrong_pattern_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_patterns([text])


def test_values_are_found_in_lines_however_they_are_written() -> None:
    found: list[dict[str, float]] = []
    out = io.StringIO()
    patterns = {"loss": re.compile("loss=([0-9.einf-]+)"), "acc": re.compile("acc ([0-9.]+)")}
    lines = Lines(out, patterns, found.append)
    for text in ("epoch 1 lo", "ss=0.25 acc 0.5\nnothing\nlo", "ss=1e-3\rloss=0.75.\nloss=...\n", "loss=inf"):
        lines.write(text)
    lines.finish()
    assert found == [{"loss": 0.25, "acc": 0.5}, {"loss": 1e-3}, {"loss": 0.75}, {"loss": float("inf")}]
    assert out.getvalue().startswith("epoch 1 loss=0.25")
    assert lines.getvalue() == out.getvalue()


def test_which_value_counts_and_which_way() -> None:
    assert most_telling(["loss", "val_loss", "test_acc"]) == "test_acc"
    assert most_telling(["lr", "accuracy"]) == "accuracy"
    assert most_telling(["loss", "lr"]) == "loss"
    assert most_telling([]) == ""

    def setting(measure: str) -> Setting:
        return prepare(Comparison(["dense"], script=Script("thinwire", module=True, patterns={measure: ""})))

    assert all(setting(name).higher_is_better for name in ("accuracy", "val_acc", "F1", "top5", "ROC AUC"))
    assert not any(setting(name).higher_is_better for name in ("loss", "perplexity", "error", "val_loss"))


@pytest.mark.parametrize(
    ("measure", "values", "best", "worse"),
    [
        ("loss", (1.0, 1.01), "topk", None),
        ("loss", (1.0, 1.2), "dense", 1.2),
        ("score", (1.0, 0.99), "topk", None),
        ("score", (2.0, 1.0), "dense", 0.5),
        ("loss", (-2.0, -1.99), "topk", None),
        ("", (0.0, 0.0), "topk", None),
    ],
)
def test_the_winner_is_as_good_by_the_script_s_value(
    measure: str, values: tuple[float, float], best: str, worse: float | None, records: Records
) -> None:
    import msgspec

    dense, topk = records.runs[0], records.runs[1]

    def changed(run: Any, name: str, value: float, seconds: float) -> Any:
        return msgspec.structs.replace(
            run, method=name, values={measure: value} if measure else {}, seconds=seconds
        )

    runs = [changed(dense, "dense", values[0], 2.0), changed(topk, "topk", values[1], 1.0)]
    made = Records(msgspec.structs.replace(records.setting, measure=measure), runs=runs)
    summaries = summarise(made)
    found = winner(summaries, made.setting)
    assert found is not None
    assert found.method == best
    assert summaries[1].worse == (None if worse is None else pytest.approx(worse))
