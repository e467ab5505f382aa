"""`session.metrics()`: says what happened, for every kind of session, and a resumed run goes on."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch

import thinwire
from tests.hosts.common import mlp, train, wrap
from thinwire.hosts import auto
from thinwire.net import costs
from thinwire.net.launch import Worker, run_local
from thinwire.sessions.base import BaseSession

TOTALS = ("steps", "bytes_sent", "bytes_received", "rounds", "waiting_seconds", "compression_seconds")
NAMES = {*TOTALS, "skipped_steps", "ratio_to_dense", "residual_norm"}


def start(method: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, BaseSession]:
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, thinwire.attach(model, method, optimizer=optimizer)


def numbers(worker: Worker) -> dict[str, list[dict[str, float]]]:
    """Per method: after 6 steps, after loading them into another session, and after 6 more."""
    found = {}
    for method in ("dense", "topk(ratio=0.1)", "qsgd(bits=8)", "pqasgd(every=3, bits=8)", "auto"):
        with patch.object(auto, "STEPS", 4), patch.object(auto, "CANDIDATES", ("dense",)):
            model, optimizer, session = start(method)
            train(model, worker.rank, range(6), optimizer=optimizer)
            rows = [session.metrics()]
            state = session.state_dict()
            session.detach()
            model, optimizer, session = start(method)
            session.load_state_dict(state)
            rows.append(session.metrics())
            train(model, worker.rank, range(6, 12), optimizer=optimizer)
            rows.append(session.metrics())
            session.detach()
            found[method] = rows
    model, optimizer, session = start("topk(ratio=0.1)")
    train(model, worker.rank, range(3), optimizer=optimizer)
    norm = math.sqrt(sum(float(each.square().sum()) for each in session.residuals().values()))
    assert session.metrics()["residual_norm"] == pytest.approx(norm)
    assert norm > 0
    train(model, worker.rank, [0], optimizer=optimizer, loss=lambda m, r, s: m(torch.ones(1, 40)).sum() / 0.0)
    found["not finite"] = [session.metrics()]
    session.detach()
    return found


def test_metrics_of_every_kind_of_session() -> None:
    for found in run_local(numbers, 2, timeout=400):
        assert [row["skipped_steps"] for row in found.pop("not finite")] == [1]
        for method, (before, loaded, after) in found.items():
            assert before.keys() == NAMES | ({"sync_rounds"} if "every" in method else set()), method
            assert all(type(value) in (int, float) for value in after.values()), method
            assert loaded == before, method
            for name in TOTALS:
                if name != "compression_seconds" or method not in ("dense", "auto"):  # which picks dense
                    assert 0 < before[name] < after[name], f"{method}: {name}"
            assert (before["steps"], after["steps"], after["skipped_steps"]) == (6, 12, 0), method
        dense, topk = found["dense"][2], found["topk(ratio=0.1)"][2]
        assert 1 <= dense["ratio_to_dense"] < 1.2  # buckets of some KB: gloo's messages count
        assert dense["bytes_sent"] == pytest.approx(
            12 * dense["ratio_to_dense"] * costs.all_reduce(2, 4 * 4 * 41 * 40).sent
        )
        assert dense["residual_norm"] == 0 < topk["residual_norm"]
        assert found["qsgd(bits=8)"][2]["ratio_to_dense"] < 0.6
        assert found["pqasgd(every=3, bits=8)"][2]["ratio_to_dense"] < 0.3
        assert found["pqasgd(every=3, bits=8)"][2]["sync_rounds"] == 4
