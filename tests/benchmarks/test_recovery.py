"""`python -m benchmarks recovery`: what is measured, and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import recovery
from benchmarks.cli import bench
from benchmarks.recovery import Case, Row, by_columns, choice, measure, sketched_vector
from thinwire import ConfigError, Session
from thinwire.drivers import Lockstep
from thinwire.methods import Sketched
from thinwire.methods.families.sketch import COLS_PER_ENTRY
from thinwire.net.rank_info import RankInfo

DIGITS = Case("mlp", "digits", 0.05, chooses=True)


def test_shares_of_a_vector_that_is_known() -> None:
    wanted = torch.tensor([3.0, -4.0, 0.0, 1.0, 2.0, 0.5])
    sent = torch.tensor([0.0, -4.0, 0.0, 0.0, 2.0, 0.0])
    found, kept, all_ = recovery.recovery(sent, wanted, 2)
    assert found == 0.5
    assert kept == pytest.approx(20 / 25)
    assert all_ == pytest.approx(20 / 30.25)
    noisy = torch.tensor([0.0, 4.0, 0.0, 0.0, 0.0, 0.0])  # a wrong sign makes it worse
    assert recovery.recovery(noisy, wanted, 2)[2] < 0


def test_what_is_measured_is_what_the_session_sketches() -> None:
    method = Sketched(k=20, cols=100)
    rng = torch.Generator().manual_seed(0)
    session = Session([("w", torch.zeros(40, 50))], method, rank_info=RankInfo(0, 1), dense_below=0)
    for _ in range(3):
        gradients = {"w": torch.randn(40, 50, generator=rng)}
        wanted = sketched_vector(session, gradients, method.momentum)
        session.engine.begin_step()
        means, views = session.engine.views(gradients, in_place=False)
        session.engine.end_step(Lockstep(1).run([session.engine.program(views)]))
        out = means["w"].flatten()
        assert int((out != 0).sum()) == 20
        assert torch.allclose(out[out != 0], wanted[out != 0], atol=1e-5)


def test_the_default_is_the_most_columns_that_send_nearly_the_most() -> None:
    def row(columns: float, sent: float, budget: float) -> Row:
        return Row("mlp", "digits", True, budget, columns, 1, 1, 0.0, 0.0, sent, 0.0)

    sent = {0.25: (0.1, 0.5), 0.5: (0.1, 0.45), 1.0: (0.05, 0.25)}
    scores = by_columns([row(c, s, b) for c, pair in sent.items() for b, s in enumerate(pair)])
    assert scores == pytest.approx({0.25: 1.0, 0.5: 0.95, 1.0: 0.5})
    assert choice({0.25: 1.0, 0.5: 0.96, 1.0: 0.5}) == 0.5


def test_the_default_is_among_the_measured_splits() -> None:
    assert COLS_PER_ENTRY in recovery.COLUMNS
    sizes = Sketched(k=1000).sizes(100_000)
    assert sizes == (1000, 1000 * COLS_PER_ENTRY, 4000)
    assert Sketched(k=1000, candidates=0).sizes(100_000) == (1000, 1000, 0)


def test_a_budget_is_kept_and_columns_find_more() -> None:
    few, many = (measure(DIGITS, None, 6, 0.1, columns, 5, 4, 0) for columns in (0.25, 2.0))
    for row in (few, many):
        assert 5 * row.cols + 4 * row.k == pytest.approx(0.1 * 85_002, rel=0.01)
        assert 0 < row.found < row.kept < 1
        assert 0 < row.sent < 1
    assert many.kept > few.kept
    with pytest.raises(ConfigError, match="not smaller"):
        measure(DIGITS, None, 6, 1.5, 1.0, 5, 4, 0)


def test_the_command_names_what_it_chose_on_and_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "CASES", (DIGITS,))
    file = tmp_path / "recovery.json"
    result = CliRunner().invoke(bench, ["recovery", "--steps", "4", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "chosen on mlp (digits)" in result.output
    assert "the default is 0.25 k" in result.output
    assert len(json.loads(file.read_text())) == len(recovery.BUDGETS) * len(recovery.COLUMNS)
    assert CliRunner().invoke(bench, ["recovery", "--rows", "2"]).exit_code == 2
    result = CliRunner().invoke(bench, ["recovery", "--only", "lstm"])
    assert result.exit_code == 2
    assert "no case of mlp digits" in result.output
