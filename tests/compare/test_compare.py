"""A comparison from end to end: real worker processes, a throttled link, records, table and report."""

import csv
import json
from pathlib import Path

import pytest
from markupsafe import escape
from msgspec.structs import replace
from typer.testing import CliRunner

from tests.report.made import Entrant, made
from thinwire.errors import ConfigError
from thinwire.hosts.auto import CANDIDATES
from thinwire.tools.cli import app
from thinwire.tools.cli.show import table
from thinwire.tools.compare import runner
from thinwire.tools.compare.records import Evaluation, Records, Step, read, to_lines, write_csv
from thinwire.tools.compare.runner import Observer, run
from thinwire.tools.compare.settings import Comparison, prepare
from thinwire.tools.report import terminal
from thinwire.tools.report.comparison import build

# The third diverges at once: what is learned from it must not cost the others their runs.
METHODS = ["dense", "topk(ratio=0.05)", "localsgd(every=4)"]


class Seen(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, method: str, seed: int) -> None:
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
    asked = Comparison(METHODS, workers=2, link="20mbit", steps=12, evaluate_every=6, hidden=(64, 64))
    return run(asked, out, seen), out, seen


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


def test_where_replicas_differ_the_last_common_model_is_evaluated(tmp_path: Path) -> None:
    methods = ["dense", "localsgd(every=6)"]
    asked = Comparison(methods, workers=2, link="none", steps=8, evaluate_every=2, hidden=(16,))
    records = run(asked, tmp_path)
    losses = {
        method: {test.step: test.loss for test in records.evaluations if test.method == method}
        for method in records.methods
    }
    local = losses["localsgd(every=6)"]
    assert local[2] == local[4] != local[6], "the start, until the first sync round"
    assert local[6] != local[8], "all replicas are averaged at the end"
    assert len(set(losses["dense"].values())) == 4


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
    setting = to_lines(Records(records.setting))
    for line, said in (
        (b'{"kind": "run", "metod": 1}', "metod"),
        (b'{"kind": "step", "method": "dense", "seed": 0, "step": "one"}', "step"),
        (b'{"kind": "step", "method": "dense", "seed": -1}', "seed"),
        (b'{"kind": "walk"}', "walk"),
        (b'["setting"]', "object"),
        (b"{", "truncated"),
        (b'{"kind": "run", "method": "\xff"}', "utf-8"),
    ):
        path.write_bytes(setting + line + b"\n")
        with pytest.raises(ConfigError, match=f"line 2: .*{said}") as raised:
            read(path)
        assert "\n" not in str(raised.value)
    path.write_bytes(setting.replace(b'"version":1', b'"version":2'))
    with pytest.raises(ConfigError, match=r"line 1: .*version"):
        read(path)
    path.write_bytes(setting * 2)
    with pytest.raises(ConfigError, match="one comparison"):
        read(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="one comparison"):
        read(path)


def test_the_table_has_a_row_for_each(finished: tuple[Records, Path, Seen], tmp_path: Path) -> None:
    records, _, _ = finished
    rows = terminal.rows(records)
    assert [row[0] for row in rows] == METHODS
    assert all(len(row) == len(terminal.header(records)) for row in rows)
    assert rows[0][-1] == "1.00 x"
    write_csv(tmp_path / "runs.csv", records)
    with (tmp_path / "runs.csv").open() as file:
        read_back = list(csv.DictReader(file))
    assert [row["method"] for row in read_back] == METHODS
    assert {row["baseline"] for row in read_back} == {METHODS[0]}
    base = records.runs[0].seconds
    gains = [base / one.seconds for one in records.runs]
    assert [float(row["speed_up"]) for row in read_back] == pytest.approx(gains)


def test_without_a_baseline_there_are_no_speed_ups(
    finished: tuple[Records, Path, Seen], tmp_path: Path
) -> None:
    records = replace(finished[0], setting=replace(finished[0].setting, baseline=False))
    assert "speed-up" not in terminal.header(records)
    assert all(len(row) == len(terminal.header(records)) for row in terminal.rows(records))
    write_csv(tmp_path / "runs.csv", records)
    with (tmp_path / "runs.csv").open() as file:
        assert {(row["baseline"], row["speed_up"]) for row in csv.DictReader(file)} == {("", "")}
    assert "speed-up over" not in build(records, predict=False)


def test_compute_is_measured_in_the_steps_of_the_run(finished: tuple[Records, Path, Seen]) -> None:
    for one in finished[0].runs:
        assert 0 < one.compute_seconds < one.seconds / one.steps


def test_pytorchs_own_methods_on_a_throttled_link(tmp_path: Path) -> None:
    asked = Comparison(
        ["pytorch", "dense", "pytorch-fp16", "pytorch-powersgd"],
        workers=2,
        link="4mbit",
        steps=6,
        hidden=(256,),
    )
    records = run(asked, tmp_path)
    assert [one.failed for one in records.runs] == [None] * 4
    pytorch, dense, half, low_rank = records.runs
    # Two ranks send each gradient once, and the same bytes through the hook as through a session.
    bytes_of_gradients = 4 * records.setting.parameters * pytorch.steps
    assert pytorch.sent == pytest.approx(bytes_of_gradients, rel=0.02)
    assert pytorch.sent == pytest.approx(dense.sent, rel=0.01)
    assert half.sent == pytest.approx(pytorch.sent / 2, rel=0.02)
    assert low_rank.sent < pytorch.sent / 2  # two of its six steps are not compressed
    for one in (pytorch, half):
        assert one.step_seconds >= one.sent / one.steps / 5e5
        assert one.wait_seconds >= one.sent / one.steps / 5e5
        assert one.compute_seconds < one.step_seconds / 2
    # The same training as the session's.
    assert pytorch.loss == pytest.approx(dense.loss, rel=1e-4)


def test_a_method_that_fails_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    # DGC brings its own momentum and Adam has one, too: refused on every rank, if nobody has checked before.
    asked = Comparison(["dense", "dgc(ratio=0.1)"], workers=2, link="none", steps=2, hidden=(64,))
    records = run(asked, tmp_path, setting=replace(prepare(asked), optimizer="adam"))
    assert records.runs[0].failed is None
    assert "momentum" in (records.runs[1].failed or "")
    assert "failed" in terminal.rows(records)[1][0]


def test_bytes_inside_a_host_have_a_column_of_their_own(tmp_path: Path) -> None:
    method = "hierarchical(outer=topk(ratio=0.05), local=2)"
    asked = Comparison(["dense", method], workers=4, steps=4, evaluate_every=4, hidden=(32,))
    records = run(asked, tmp_path)
    dense, two_levels = records.runs
    assert dense.sent_inside == 0
    # A leader and one more rank: the mean and the result are sent once each inside the host.
    assert two_levels.sent_inside > 4 * 4 * records.setting.parameters
    assert two_levels.sent < 0.3 * dense.sent
    place = terminal.header(records).index("inside")
    assert terminal.header(records)[place - 1] == "sent"
    assert terminal.rows(records)[0][place].startswith("0")
    assert read(tmp_path / runner.FILE) == records
    assert "sent inside the host" in build(records)
    write_csv(tmp_path / "runs.csv", records)
    assert "sent_inside" in (tmp_path / "runs.csv").read_text()


def test_auto_is_a_row_that_names_its_choice(tmp_path: Path) -> None:
    asked = Comparison(["dense", "auto"], workers=2, link="5mbit", steps=8, hidden=(64, 64))
    records = run(asked, tmp_path)
    dense, auto = records.runs
    assert (dense.failed, auto.failed) == (None, None)
    assert dense.chosen is None
    assert auto.chosen in CANDIDATES
    assert auto.chosen != "dense"
    assert terminal.rows(records)[1][0] == f"auto: {auto.chosen}"
    assert read(tmp_path / "records.jsonl") == records
    report = build(records)
    assert f"chose {escape(auto.chosen)}." in report
    assert "These methods cannot be predicted" not in report


@pytest.mark.parametrize(
    "method", ["fp16", "qsgd(bits=4)", "topk(ratio=0.05)", "powersgd", "diloco(every=4)"]
)
def test_adamw_goes_with_every_kind_of_method(method: str, tmp_path: Path) -> None:
    asked = Comparison([method], workers=2, link="none", steps=4, optimizer="adamw", hidden=(64,))
    (one,) = run(asked, tmp_path).runs
    assert one.failed is None
    assert one.steps == 4


@pytest.mark.parametrize("target", [None, 0.9])
def test_the_table_fits_100_columns(
    target: float | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    names = ("dense", "powersgd(rank=2)", "auto: scalecom(ratio=0.01)", "pqasgd(every=8, bits=4)")
    records = made(tuple(Entrant(name, 1 / 3, 0.123) for name in names), target=target, measure="perplexity")
    table("title", terminal.header(records), terminal.rows(records))
    output = capsys.readouterr().out
    lines = [line.rstrip() for line in output.splitlines()]
    assert max(map(len, lines)) <= 100
    assert "…" not in output
    (header,) = [line for line in lines if "speed-up" in line]
    assert header.endswith("speed-up")


def test_a_target_perplexity_ends_the_run(tmp_path: Path) -> None:
    text = {"model": "transformer", "data": "synthetic", "hidden": (32,), "batch": 4}
    asked = Comparison(
        ["dense"], workers=2, link="none", steps=200, target_perplexity=10, evaluate_every=5, **text
    )
    (one,) = run(asked, tmp_path).runs
    assert one.steps == one.target_step < 200
    assert 1 < one.perplexity <= 10


def test_a_target_ends_the_run(tmp_path: Path) -> None:
    asked = Comparison(["dense"], workers=2, link="none", steps=200, target_accuracy=0.3, evaluate_every=5)
    (one,) = run(asked, tmp_path).runs
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


def test_nothing_but_failures_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = made((Entrant("dense", 1.0, 0.0, fails_at=3),))
    monkeypatch.setattr(runner, "run", lambda *_, **__: failed)
    result = CliRunner().invoke(app, ["compare", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "dense (failed)" in result.stdout


def test_a_usage_error_is_one_line() -> None:
    result = CliRunner().invoke(app, ["compare", "--data", "nothing"])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
