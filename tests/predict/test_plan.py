"""`thinwire plan`: its figures, its recommendation, and what it says to a wrong question."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.laws.cohort import LINKS
from thinwire import ConfigError, PayloadError, parse, predict
from thinwire.core.optimizers import Optimizers
from thinwire.hosts.auto import CANDIDATES, candidates_for
from thinwire.net.costs import Link
from thinwire.net.link import slowest_link
from thinwire.predict import evidence, language
from thinwire.predict import recommend as planning
from thinwire.tools.cli import app

pytestmark = pytest.mark.usefixtures("counted_time")
SHAPES = {"hidden": (400, 300), "bias": (400,), "head": (10, 400)}
FEW = ("fp16", "topk(ratio=0.01)", "powersgd(rank=4)", "a2sgd(average_every=32)", "dgc(ratio=0.01)")
SLOW, FAST = Link(1e-4, 1.25e6), Link(1e-6, 1e12)


def call(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_a_slow_link_gets_a_method_and_a_fast_one_gets_dense() -> None:
    slow = planning.make_plan(SHAPES, 4, SLOW, 0.001, FEW)
    assert slow.row(slow.recommended).kept_back is None
    assert slow.row(slow.recommended).speed_up > 2
    assert any("times faster" in reason for reason in slow.reasons)
    fast = planning.make_plan(SHAPES, 4, FAST, 0.05, FEW)
    assert fast.recommended == "dense"
    assert "on this link dense is best" in fast.reasons


def test_a_row_has_the_operations_of_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sessions of this environment are given."""
    monkeypatch.setenv("THINWIRE_LINK", LINKS[0])
    shapes, methods = {"large": (250, 400)}, ("qsgd(bits=4)", "pqasgd(every=2)")
    near, far = (
        planning.make_plan(shapes, 5, slowest_link(text), 0.1, methods) for text in (LINKS[0], LINKS[-1])
    )
    assert [[made.row(method).rounds for method in methods] for made in (near, far)] == [[2, 1.5], [1, 1]]
    for method in methods:
        assert near.row(method).sent_bytes < 0.5 * far.row(method).sent_bytes


def test_rows_are_sorted_and_compared_with_dense() -> None:
    made = planning.make_plan(SHAPES, 4, SLOW, 0.001, FEW)
    times = [row.step_seconds for row in made.rows]
    assert times == sorted(times)
    assert {row.method for row in made.rows} == {"dense", *FEW}
    dense = made.row("dense")
    for row in made.rows:
        assert row.speed_up == pytest.approx(dense.step_seconds / row.step_seconds)
    assert made.row("topk(ratio=0.01)").sent_bytes < 0.1 * dense.sent_bytes


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("a2sgd(average_every=32)", "replicas drift"),
        ("dgc(ratio=0.01)", "keeps the momentum itself"),
        ("topk(ratio=0.0001)", "not in our table"),
        ("topk(ratio=0.01)", None),
        ("dense", None),
    ],
)
def test_only_what_is_proven_is_recommended(method: str, reason: str | None) -> None:
    assert planning.kept_back(method) == reason


def test_late_entries_are_not_recommended_under_adam() -> None:
    for method in ("topk(ratio=0.02)", "powersgd(rank=3)", "efsign"):
        assert planning.kept_back(method, optimizer="adaptive") == (
            "what it sends late disturbs an adaptive optimizer"
        )
    for method in ("topk(ratio=0.01)", "powersgd(rank=4)", "scalecom(ratio=0.01)"):
        assert planning.kept_back(method, optimizer="adaptive") == "behind dense with AdamW in our table"
    assert planning.kept_back("qsgd(bits=4)", optimizer="adaptive") is None
    assert planning.kept_back("adam", optimizer="plain SGD") == "needs AdamW"


ADAM = "adam(exchange=efsign(bucket=4096))"
MADE = {"dense": 0.0, str(parse(ADAM)): -0.01, "topk(ratio=0.01)": 0.2, "qsgd(bits=4)": 0.03, "fp16": 0.06}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of a transformer that is made up."""
    monkeypatch.setattr(language, "behind", lambda: MADE)


@pytest.mark.usefixtures("measured")
def test_with_adamw_our_own_measurement_decides() -> None:
    reasons = {method: planning.kept_back(method, optimizer="adaptive") for method in MADE}
    assert reasons == {
        **dict.fromkeys(MADE, "behind dense with AdamW in our table"),
        **dict.fromkeys(("dense", str(parse(ADAM)), "qsgd(bits=4)")),
    }
    assert planning.kept_back("fp16") is None, "SGD is judged by digits"
    assert planning.kept_back("bf16", optimizer="adaptive") is None, "not measured: by the rule"
    assert planning.kept_back("efsign", optimizer="adaptive") is not None, "not measured: by the rule"
    assert str(parse(ADAM)) in planning.candidates("adaptive")
    assert str(parse(ADAM)) not in planning.candidates()


@pytest.mark.usefixtures("measured")
def test_with_adamw_what_was_measured_comes_first() -> None:
    chosen = ("bf16", "qsgd(bits=8)", "qsgd(bits=4)", "topk(ratio=0.01)")
    made = planning.make_plan(SHAPES, 4, SLOW, 0.001, chosen, optimizer="adaptive")
    assert made.recommended == "qsgd(bits=4)"
    assert any("a transformer with AdamW its loss differs from dense's by +0.030" in r for r in made.reasons)
    made = planning.make_plan(SHAPES, 4, SLOW, 0.001, (*chosen, ADAM), optimizer="adaptive")
    assert made.recommended == str(parse(ADAM))
    assert any(reason.startswith("its first 100 steps are like dense's and take ") for reason in made.reasons)
    only = planning.make_plan(SHAPES, 4, SLOW, 0.001, ("bf16",), optimizer="adaptive")
    assert only.recommended == "bf16", "nothing else is faster than dense"


@pytest.mark.usefixtures("measured")
def test_auto_takes_adam_only_for_adamw() -> None:
    parameters = [torch.zeros(3)]
    assert str(parse(ADAM)) in candidates_for(Optimizers(torch.optim.AdamW(parameters)))
    both = [torch.optim.AdamW(parameters), torch.optim.AdamW([torch.zeros(2)])]
    assert str(parse(ADAM)) in candidates_for(Optimizers(both))
    muon = torch.optim.Muon([torch.zeros(3, 3)])
    assert str(parse(ADAM)) not in candidates_for(Optimizers([muon, torch.optim.AdamW(parameters)]))
    for other in (
        torch.optim.AdamW(parameters, betas=(0.8, 0.99)),
        torch.optim.RMSprop(parameters),
        torch.optim.SGD(parameters, lr=0.1),
        None,
    ):
        assert candidates_for(Optimizers(other)) == list(CANDIDATES)


@pytest.mark.usefixtures("measured")
def test_the_command_knows_the_optimizer() -> None:
    size = ("--shapes", "400x300,400", "--link", "10mbit", "--step-time", "1ms")
    result = call(*size, "--optimizer", "adamw", "-m", f"topk,{ADAM}")
    assert result.exit_code == 0, result.output
    assert f"Recommended: {parse(ADAM)}" in result.output
    assert "behind dense with AdamW in our table: topk(ratio=0.01)" in result.output


def test_the_table_of_a_transformer_can_be_read() -> None:
    table = language.behind()
    assert all(str(parse(method)) == method for method in table)
    assert table.get("dense", 0.0) == 0.0
    assert set(planning.measured_exchanges()) <= set(language.close()) <= set(table)


def test_the_table_that_proves_is_one_of_known_methods() -> None:
    table = planning.proven()
    assert table["dense"] == 0.0
    assert all(str(parse(method)) == method for method in table)


def test_what_is_faster_but_kept_back_is_named() -> None:
    rows = planning.make_plan(SHAPES, 4, Link(1e-5, 1e5), 0.0, ("fp16", "a2sgd(average_every=1000)")).rows
    recommended, reasons = planning.recommend(rows)
    assert recommended == "fp16"
    assert any("a2sgd" in reason and "replicas drift" in reason for reason in reasons)


def test_methods_that_average_parameters_are_predicted_and_may_be_excluded() -> None:
    everything, equal = (planning.candidates(replicas=which) for which in ("any", "equal"))
    schedules = {text for text in everything if not planning.is_exchange(text)}
    assert "localsgd(every=8)" in schedules
    assert set(equal) == set(everything) - schedules
    made = planning.make_plan(SHAPES, 4, SLOW, 0.01, ("fp16", "localsgd(every=8)"))
    row = made.row("localsgd(every=8)")
    assert row.sent_bytes == pytest.approx(made.row("dense").sent_bytes / 8, rel=0.05)
    assert row.kept_back == "not in our table", "its period decides how it trains"
    assert planning.kept_back("localsgd(every=8)", replicas="equal") == "replicas differ between sync rounds"


def test_a_measured_schedule_is_recommended_unless_replicas_must_be_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = str(parse("pqasgd(every=16, bits=4)"))
    monkeypatch.setattr(language, "behind", lambda: {"dense": 0.0, "fp16": 0.0, schedule: 0.02})
    monkeypatch.setattr(language, "recovered", lambda: {schedule: 0.9})
    chosen = ("fp16", schedule)
    made = planning.make_plan(SHAPES, 4, SLOW, 0.01, chosen, optimizer="adaptive")
    assert made.recommended == schedule
    assert any("replicas differ between sync rounds" in reason for reason in made.reasons)
    made = planning.make_plan(SHAPES, 4, SLOW, 0.01, chosen, optimizer="adaptive", replicas="equal")
    assert made.recommended == "fp16"
    monkeypatch.setattr(language, "behind", lambda: {"dense": 0.0, "fp16": 0.0, schedule: 0.2})
    made = planning.make_plan(SHAPES, 4, SLOW, 0.01, chosen, optimizer="adaptive")
    assert made.recommended == "fp16"


def test_a_row_has_a_range_around_its_step() -> None:
    made = planning.make_plan(SHAPES, 4, Link(1e-3, 1.25e6, jitter=5e-4), 0.01, FEW, cores=1)
    assert all(0 < row.low <= row.step_seconds <= row.high for row in made.rows)
    assert any(row.low < row.high for row in made.rows)


def test_cores_and_stragglers_make_steps_longer() -> None:
    chosen = ("topk(ratio=0.01)", "localsgd(every=50)")

    buckets = {"first": (600, 600), "second": (600, 600)}

    def steps(**options: Any) -> dict[str, float]:
        made = planning.make_plan(buckets, 4, FAST, 0.05, chosen, **options)
        return {row.method: row.step_seconds for row in made.rows}

    free, shared, late = steps(), steps(cores=1), steps(deviation=0.3)
    assert shared["topk(ratio=0.01)"] > free["topk(ratio=0.01)"]
    # Four workers wait in every step for the slowest of them, or once in fifty steps.
    assert late["dense"] > 0.05 * 1.2
    assert 0.05 < late["localsgd(every=50)"] < 0.05 * 1.1


def test_thousands_of_workers_on_the_internet() -> None:
    link = "up=20mbit,down=100mbit,latency=60ms,jitter=20ms"
    chosen = "fp16,hierarchical(outer=fp16, inner=fp16, local=256)"
    options = ("--workers", "65536", "--link", link, "--step-time", "1s", "--deviation", "0.2")
    result = call("--shapes", "40x30,40", *options, "-m", chosen, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    rows = {row["method"]: row for row in record["rows"]}
    layered = next(row for method, row in rows.items() if method.startswith("hierarchical"))
    # 2 x 65,535 messages one after the other, or 2 x 255 and 8 inside a group and 2 x 255 between the groups.
    assert rows["dense"]["step_seconds"] > 2 * 65_535 * 0.06
    assert layered["step_seconds"] == pytest.approx((2 * 255 + 8 + 2 * 255) * 0.06, rel=0.3)
    assert record["recommended"] == layered["method"]
    assert record["link"]["jitter"] == 0.02


def test_the_layouts_of_very_many_workers_are_candidates() -> None:
    assert not any("hierarchical" in text for text in planning.candidates(workers=64))
    found = planning.candidates(workers=65_536)
    assert str(parse("hierarchical(outer=dense, inner=fp16, local=256)")) in found
    assert all(planning.is_exchange(t) for t in planning.candidates(workers=65_536, replicas="equal"))


def test_the_shapes_that_are_assumed_are_said() -> None:
    result = call("--parameters", "100k", "-m", "fp16")
    assert result.exit_code == 0, result.output
    assert "Assumed layers: 1 of 256 x 256, 1 of 186 x 185, 1 of 54. --shapes says yours." in result.output
    assert "Assumed" not in call("--shapes", "40x30", "-m", "fp16").output


def test_a_size_becomes_layers_with_exactly_so_many_entries() -> None:
    for size in (1, 7, 1000, 1024**2, 3_000_017):
        shapes = planning.layers_of(size)
        assert sum(_product(shape) for shape in shapes.values()) == size


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def test_times_and_shapes_in_words() -> None:
    assert planning.seconds_of("50ms") == pytest.approx(0.05)
    assert list(planning.shapes_of("4x3, 4").values()) == [(4, 3), (4,)]
    with pytest.raises(ConfigError, match="such as 50ms"):
        planning.seconds_of("50")


def test_the_command_prints_a_table_and_a_reason() -> None:
    result = call("--shapes", "400x300,400", "--link", "10mbit", "--step-time", "1ms", "-m", "topk")
    assert result.exit_code == 0, result.output
    assert "Recommended: topk(ratio=0.01)" in result.output
    assert "pays below" in result.output


def test_the_command_prints_json() -> None:
    result = call("--parameters", "100k", "--workers", "16", "-m", "fp16", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    assert (record["parameters"], record["workers"], record["recommended"]) == (100_000, 16, "fp16")
    assert record["link"]["up"] == 12.5e6
    assert {row["method"] for row in record["rows"]} == {"dense", "fp16"}


def test_a_model_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_model.py").write_text(
        "import torch\nsize = 3\n"
        "def build():\n    return torch.nn.Linear(30, 20)\n"
        "def number():\n    return 7\n"
    )
    monkeypatch.chdir(tmp_path)
    result = call("--model", "planned_model:build", "-m", "fp16", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["parameters"] == 620
    for wrong, said in (
        ("planned_model:size", "no function 'size'"),
        ("planned_model:number", "not a torch.nn"),
    ):
        result = call("--model", wrong)
        assert result.exit_code == 2
        assert said in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "which model?"),
        (("--parameters", "many"), "not a number such as"),
        (("--parameters", "100", "--shapes", "3x3"), "--shapes has 9 parameters"),
        (("--model", "x:y", "--parameters", "3"), "not both"),
        (("--model", "nowhere"), "module:function"),
        (("--model", "no_such_module:f"), "cannot be imported"),
        (("--shapes", "3x"), "is not a shape"),
        (("--parameters", "100", "--link", "fast"), "100mbit"),
        (("--parameters", "100", "--link", "lab:100mbit"), "write 100mbit instead of lab:100mbit"),
        (("--parameters", "100", "-m", "auto"), "auto chooses by a plan itself"),
        (("--parameters", "1000B"), "too large to predict"),
        (("--parameters", "100", "--workers", "1"), "two workers or more"),
        (("--parameters", "100", "-m", "tpok"), "did you mean 'topk'"),
        (("--parameters", "100", "--step-time", "5"), "such as 50ms"),
        (("--parameters", "100", "--probe"), "torchrun"),
    ],
)
def test_a_wrong_question_is_answered_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def failing(monkeypatch: pytest.MonkeyPatch, *methods: str) -> None:
    really = predict.profile_of

    def profile_of(method: str, *arguments: Any, **options: Any) -> predict.Profile:
        if method in methods:
            raise PayloadError("payload from rank 1 has 0 bytes")
        return really(method, *arguments, **options)

    monkeypatch.setattr(predict, "profile_of", profile_of)


def test_a_method_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "fp16")
    result = call("--parameters", "100k", "-m", "fp16,topk")
    assert result.exit_code == 0, result.output
    assert "No prediction for fp16: PayloadError: payload from rank 1 has 0 bytes" in result.output
    assert "Recommended: topk(ratio=0.01)" in result.output
    record = json.loads(call("--parameters", "100k", "-m", "fp16,topk", "--json").output)
    assert record["failed"] == {"fp16": "PayloadError: payload from rank 1 has 0 bytes"}
    assert {row["method"] for row in record["rows"]} == {"dense", "topk(ratio=0.01)"}


def test_without_dense_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "dense", "fp16")
    result = call("--parameters", "100k", "-m", "fp16")
    assert result.exit_code == 1
    assert result.output.startswith("thinwire: no prediction for dense")
    assert len(result.output.strip().splitlines()) == 1


def test_the_table_fits_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    chosen = "a2sgd,heavyball,gaussiank,randomblock(ratio=0.1),signsgd"
    result = call("--parameters", "3M", "--link", "1gbit", "--step-time", "200ms", "-m", chosen)
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    lines = [line.rstrip() for line in result.output.splitlines()]
    (header,) = [line for line in lines if "pays below" in line]
    assert header.endswith("compress")
    assert "a2sgd(average_every=32)" in result.output
    assert "  - keeps the momentum itself: heavyball(momentum=0.9)" in lines


@pytest.mark.slow
def test_probe_under_torchrun() -> None:
    """Rank 0 alone answers, for as many workers as there are, on the link it measured."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "thinwire", "plan", "--probe", "--parameters", "5000", "-m", "fp16", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(done.stdout)
    assert record["workers"] == 2
    assert record["link"]["up"] > 1e6
    assert 0 < record["link"]["latency"] < 0.1


# -- periodic and delayed methods ----------------------------------------------------------------------

LATE = (str(parse("pqasgd(every=16, bits=4)")), str(parse("delayed(method=qsgd(bits=4))")))


@pytest.mark.parametrize("method", LATE)
def test_a_late_method_must_recover_half_of_what_the_others_bring(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why(nats: float | None, part: float | None) -> str | None:
        monkeypatch.setattr(language, "behind", lambda: {} if nats is None else {method: nats})
        monkeypatch.setattr(language, "recovered", lambda: {} if part is None else {method: part})
        return planning.kept_back(method, optimizer="adaptive")

    assert why(0.01, 0.6) is None
    assert why(0.06, 0.9) == "behind dense with AdamW in our table"
    assert why(0.01, 0.4) == "recovers less than half of the gap between a worker alone and dense"
    assert why(0.01, None) == "not compared with a worker alone in our table"
    assert why(None, None) == "not in our table"
    # Digits with SGD say nothing about an adaptive optimizer, nor the other way round.
    monkeypatch.setattr(evidence, "proven", lambda: {"dense": 0.0, method: 0.0})
    assert why(None, None) == "not in our table"
    assert planning.kept_back(method) == "not compared with a worker alone in our table"
    monkeypatch.setattr(evidence, "recovered_on_digits", lambda: {method: 0.7})
    assert planning.kept_back(method) is None
    monkeypatch.setattr(evidence, "recovered_on_digits", lambda: {method: 0.3})
    assert planning.kept_back(method) is not None


def test_auto_considers_what_the_table_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, delayed = LATE
    monkeypatch.setattr(
        language, "behind", lambda: {"dense": 0.0, schedule: 0.0, delayed: 0.0, "efsign": 0.2}
    )
    monkeypatch.setattr(language, "recovered", lambda: {schedule: 0.9, delayed: 0.9})
    adamw = Optimizers(torch.optim.AdamW([torch.zeros(3)]))
    assert candidates_for(adamw) == [*CANDIDATES, schedule, delayed]
    assert candidates_for(adamw, equal=True) == [*CANDIDATES, delayed]
    assert candidates_for(Optimizers(torch.optim.SGD([torch.zeros(3)], lr=0.1))) == list(CANDIDATES)
    monkeypatch.setattr(language, "recovered", lambda: {schedule: 0.4, delayed: 0.9})
    assert candidates_for(adamw) == [*CANDIDATES, delayed]
