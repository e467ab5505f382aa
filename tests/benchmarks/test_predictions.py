"""The benchmark of predictions: which steps it times, and what it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import predictions
from benchmarks.predictions import Book, Row, turn_of, verdict
from thinwire.drivers.lockstep import Lockstep
from thinwire.errors import ConfigError
from thinwire.methods.registry import parse
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo
from thinwire.predict import Overheads
from thinwire.predict.probe import Calibration
from thinwire.sessions.periodic import PeriodicSession


def row(method: str, predicted: float, measured: float = 1.0) -> Row:
    found = Calibration(Link(1e-4, 1e6), Overheads(1e-3, 2e-3, 3e-3, 1e-9))
    return Row("lab:10mbit", 2, method, 0.5, predicted, 2.0, measured, 0.1, 0.2, 0.3, found)


@pytest.mark.parametrize("overlap", [0, 3, 7])
def test_no_sync_round_is_under_way_between_two_turns(overlap: int) -> None:
    """It would run beside steps that are not timed, and none would be left for those that are."""
    method = f"pqasgd(every=8, bits=4, overlap={overlap})"
    model = nn.Linear(50, 40)
    schedule = parse(method)
    session = PeriodicSession(
        model, schedule, torch.optim.SGD(model.parameters(), lr=0.1), rank_info=RankInfo(0, 1)
    )
    turn = turn_of(method)
    assert turn.steps == 8

    def steps(count: int) -> int:
        begun = 0
        for _ in range(count):
            program = session.advance()
            if program is not None:
                begun += 1
                Lockstep(1).run([program])
        return begun

    assert steps(turn.first) == 0
    for _ in range(3):
        assert not session.under_way
        assert steps(turn.steps) == 1


def test_a_delayed_step_waits_for_one_that_is_not_timed() -> None:
    assert turn_of("delayed(method=topk)").before == 1
    assert turn_of("delayed(method=topk)").steps > 1
    assert turn_of("topk") == (1, 0, 0)


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows"
    done = row("dense", 1.1)
    Book(file).add(done)
    assert Book(file).find(*done.cell) == done

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(predictions, "hosts_for", never)
    assert predictions.run(["lab:10mbit"], ["dense"], 2, book=Book(file)) == [done]
    with pytest.raises(AssertionError, match="measured again"):
        predictions.run(["lab:10mbit"], ["dense", "fp16"], 2, book=Book(file))
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"line 1 of .* is not a result of this benchmark"):
        Book(file)


def test_the_share_of_close_predictions_is_said() -> None:
    rows = [row("dense", 1.19), row("fp16", 0.81), row("topk", 1.21), row("qsgd", 1.0)]
    assert verdict(rows) == "3 of 4 predictions within 20 % (75 %); target: 4"
