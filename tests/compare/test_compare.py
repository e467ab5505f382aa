"""A comparison from end to end: real worker processes, a throttled link, records, table and report."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.errors import ConfigError
from thinwire.tools.cli import app
from thinwire.tools.compare import summary
from thinwire.tools.compare.engine import Comparison, run
from thinwire.tools.compare.records import Evaluation, Records, Step, read, to_line

# The third diverges at once: what is learned from it must not cost the others their runs.
METHODS = ["dense", "topk(ratio=0.05)", "localsgd(every=4)"]


class Seen:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, method: str, seed: int, seeds: int) -> None:
        self.events.append(f"begin {method}")

    def step(self, record: Step) -> None:
        self.events.append(f"step {record.step}")

    def evaluation(self, record: Evaluation) -> None:
        self.events.append(f"evaluation {record.step}")

    def end(self, method: str, failed: str | None) -> None:
        self.events.append(f"end {method} {failed}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Records, Path, Seen]:
    out = tmp_path_factory.mktemp("compare")
    seen = Seen()
    wanted = Comparison(METHODS, workers=2, link="20mbit", steps=12, evaluate_every=6, hidden=(64, 64))
    return run(wanted, out, seen), out, seen


def test_every_method_ran_from_the_same_start(finished: tuple[Records, Path, Seen]) -> None:
    records, _, seen = finished
    assert records.methods == METHODS
    firsts = [step for step in records.steps if step.step == 1]
    # Before the first step is applied nothing has been compressed yet.
    assert len({step.loss for step in firsts}) == 1
    assert [run.steps for run in records.runs] == [12, 12, 12]
    assert all(run.failed is None for run in records.runs)
    assert seen.events[0] == "begin dense"
    assert seen.events.count("evaluation 6") == 3


def test_bytes_and_times_are_those_of_the_link(finished: tuple[Records, Path, Seen]) -> None:
    records, _, _ = finished
    dense, topk, local = records.runs
    parameters = records.setting.parameters
    assert dense.sent / dense.steps == pytest.approx(4 * parameters, rel=0.2)  # 2 (W-1)/W = 1, and headers
    assert topk.sent < dense.sent / 2
    assert local.sent == pytest.approx(dense.sent / 4, rel=0.2)
    on_the_link = dense.sent / dense.steps / 2.5e6
    assert dense.wait_seconds >= 0.9 * on_the_link
    assert dense.step_seconds >= 0.9 * on_the_link
    assert topk.compress_seconds > 0


def test_layers_add_up_to_the_payload(finished: tuple[Records, Path, Seen]) -> None:
    for one in finished[0].runs:
        assert sum(one.layers.values()) == pytest.approx(one.payload)


def test_records_survive_the_file(finished: tuple[Records, Path, Seen]) -> None:
    records, out, _ = finished
    assert read(out / "records.jsonl") == records


def test_a_broken_record_names_its_line(finished: tuple[Records, Path, Seen], tmp_path: Path) -> None:
    records, _, _ = finished
    path = tmp_path / "records.jsonl"
    path.write_text(to_line(records.setting) + '\n{"kind": "run", "metod": 1}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="one comparison"):
        read(path)


def test_the_table_has_a_row_for_each(finished: tuple[Records, Path, Seen], tmp_path: Path) -> None:
    records, _, _ = finished
    rows = summary.rows(records)
    assert [row[0] for row in rows] == METHODS
    assert all(len(row) == len(summary.header(records)) for row in rows)
    assert rows[0][-1] == "1.00 x"
    summary.write_csv(tmp_path / "runs.csv", records.runs)
    with (tmp_path / "runs.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == METHODS


def test_a_method_that_fails_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    # DGC brings its own momentum and Adam has one, too: refused on every rank.
    wanted = Comparison(
        ["dense", "dgc(ratio=0.1)"], workers=2, link="none", steps=2, optimizer="adam", hidden=(64,)
    )
    records = run(wanted, tmp_path)
    assert records.runs[0].failed is None
    assert "momentum" in (records.runs[1].failed or "")
    assert "failed" in summary.rows(records)[1][0]


def test_a_target_ends_the_run(tmp_path: Path) -> None:
    wanted = Comparison(["dense"], workers=2, link="none", steps=200, target=0.3, evaluate_every=5)
    (one,) = run(wanted, tmp_path).runs
    assert one.target_step is not None
    assert one.steps == one.target_step < 200
    assert one.accuracy >= 0.3
    assert one.target_seconds == pytest.approx(one.seconds)


def test_the_command_writes_everything(tmp_path: Path) -> None:
    options = ["--workers", "2", "--link", "none", "--steps", "3", "--hidden", "32", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["compare", "-m", "fp16", *options, "--json"])
    assert result.exit_code == 0, result.output
    assert [row["method"] for row in json.loads(result.stdout)] == ["dense", "fp16"]
    for name in ("records.jsonl", "runs.csv", "report.html"):
        assert (tmp_path / name).stat().st_size > 0


def test_a_mistake_is_one_line() -> None:
    result = CliRunner().invoke(app, ["compare", "--data", "nothing"])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
