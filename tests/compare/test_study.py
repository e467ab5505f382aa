"""The grid of the study of sparse communication, its command, and what it needs of a comparison."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.report.made import Entrant, made
from thinwire import parse
from thinwire.errors import ConfigError
from thinwire.tools import report
from thinwire.tools.cli import app
from thinwire.tools.compare import runner, study
from thinwire.tools.compare.records import Records
from thinwire.tools.compare.settings import Comparison, prepare, resolve_methods
from thinwire.tools.compare.training import add_momentum_before


def test_cells_are_all_combinations_once() -> None:
    found = study.cells(momenta=(False, True))
    assert len(set(found)) == len(found) == 3 * 2**4
    scaled = study.cells(scaled=True)
    assert len(set(scaled)) == len(scaled) == 3 * 2**3 + 2 * 2**2
    assert not [cell for cell in scaled if cell.rule == "top-k" and cell.feedback == "scaled"]


def test_a_cell_is_the_method_that_it_says() -> None:
    for cell in study.cells(scaled=True):
        text = cell.method(0.05)
        if text is None:
            assert (cell.rule, cell.shared) in (("top-k", True), ("random block", False))
            continue
        method = parse(text)
        assert method.ratio == 0.05
        assert method.traits.scope == ("model" if cell.whole else "tensor")
        assert method.traits.conserves == (cell.feedback == "on")
        name = {"top-k": "scalecom" if cell.shared else "topk", "random-k": "randomk"}
        assert method.name == name.get(cell.rule, "randomblock")
        if cell.rule != "top-k" and cell.feedback != "on":
            assert method.scale == (None if cell.feedback == "off" else "unbiased")
        if cell.rule == "random-k":
            assert method.shared == cell.shared


def test_effects_are_differences_of_pairs() -> None:
    worth = {"on": 0.1, "off": 0.0, "scaled": -0.3}
    found = {
        cell: 0.5 + worth[cell.feedback] - 0.02 * cell.whole
        for cell in study.cells(scaled=True, momenta=(False, True))
    }
    effects = study.effects(found)
    for rule in study.RULES:
        pairs = 8 if rule == "top-k" else 12
        assert effects["error feedback on"][rule] == pytest.approx([10.0] * 8)
        assert effects["layer by layer"][rule] == pytest.approx([2.0] * pairs)
        assert effects["indices shared"][rule] == pytest.approx([0.0] * pairs)
        assert effects["momentum after"][rule] == pytest.approx([0.0] * pairs)
        scaled = [] if rule == "top-k" else [-30.0] * 8
        assert effects["scaled by n/k, no feedback"][rule] == pytest.approx(scaled)
    assert study.summary([1.0, -3.0, 2.0]) == "+1.0, 2 of 3"
    assert study.summary([]) == "-"


def test_the_command_studies_a_rule_beside_its_controls(tmp_path: Path) -> None:
    options = ["--rule", "random block", "--workers", "2", "--steps", "3", "--hidden", "16", "--ratio", "0.1"]
    result = CliRunner().invoke(app, ["study", *options, "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    methods = [row["method"] for row in found["methods"]]
    assert methods[:2] == ["dense", "alone"]
    assert (
        methods[2:]
        == resolve_methods(
            [
                f"randomblock(ratio=0.1, scope={scope!r}{off})"
                for scope in ("model", "tensor")
                for off in ("", ", feedback=False, scale=None")
            ]
        )[1:]
    )
    assert not any(row["failures"] for row in found["methods"])
    assert len(found["effects"]["error feedback on"]["random block"]) == 2
    assert found["effects"]["error feedback on"]["top-k"] == []
    for name in ("records.jsonl", "runs.csv", "report.html"):
        assert (tmp_path / name).stat().st_size > 0
    page = (tmp_path / "report.html").read_text()
    assert "and momentum 0.9" in page
    assert "Not predicted: alone (a worker without the others sends nothing)" in page


def test_the_table_tells_what_each_parameter_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(asked: Comparison, *_: object, **__: object) -> Records:
        return made(tuple(Entrant(method, 1.0, 100.0) for method in asked.methods))

    monkeypatch.setattr(runner, "run", ran)
    monkeypatch.setattr(report, "write", lambda *_: None)
    result = CliRunner().invoke(app, ["study", "--out", str(tmp_path), "--steps", "4"])
    assert result.exit_code == 0, result.output
    assert "error feedback on" in result.stdout
    assert "momentum after" not in result.stdout, "one command has the momentum in one place"


def test_momentum_before_the_exact_mean_is_momentum_after_it(tmp_path: Path) -> None:
    """The mean of the workers' momenta is the momentum of the mean: the same losses, but for rounding."""
    losses = []
    for where in ({"momentum": 0.9}, {"momentum_before": 0.9}, {}):
        asked = Comparison(
            ["dense"], workers=2, link="none", steps=8, hidden=(16,), learning_rate=0.05, **where
        )
        records = runner.run(asked, tmp_path)
        assert records.runs[0].failed is None
        losses.append([step.loss for step in records.steps])
    after, before, without = losses
    assert before == pytest.approx(after, rel=1e-4)
    assert without != pytest.approx(after, rel=1e-2)


def test_gradients_become_velocities() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    add_momentum_before(model, 0.5)
    expected = torch.zeros(1, 3)
    for step in range(3):
        x = torch.full((1, 3), float(step + 1))
        model.zero_grad()
        model(x).sum().backward()
        expected = 0.5 * expected + x
        assert torch.equal(model.weight.grad, expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"momentum": 1.0}, "momentum is a number from 0 up and below 1, not 1"),
        ({"momentum_before": -0.1}, "momentum is a number from 0 up and below 1"),
        ({"momentum": 0.9, "momentum_before": 0.9}, "not both"),
        ({"momentum": 0.9, "optimizer": "adamw"}, "adamw has its own: give --optimizer sgd"),
        ({"momentum": 0.9, "methods": ["dgc"]}, "keeps the momentum itself"),
        ({"momentum_before": 0.9, "methods": ["lag(rule='wk')"]}, "a rule for SGD"),
    ],
)
def test_momenta_that_do_not_go_together_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(Comparison(**{"methods": ["dense"], **changes}))


def test_the_usual_rate_allows_for_momentum() -> None:
    assert prepare(Comparison(["dense"], momentum=0.9)).learning_rate == pytest.approx(0.01)
    assert prepare(Comparison(["dense"], momentum=0.9, learning_rate=0.3)).learning_rate == 0.3
    assert resolve_methods(["alone,topk"]) == ["dense", "alone", "topk(ratio=0.01)"]
