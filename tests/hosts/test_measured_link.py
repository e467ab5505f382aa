"""Sessions that measure their link, in real processes: the same decisions and results on all ranks."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch

import thinwire
from tests.hosts.common import buckets_of, flat, mlp, train, wrap
from thinwire.core import measured_link
from thinwire.errors import ConfigError, DisagreementError
from thinwire.net.costs import Link
from thinwire.net.launch import Worker, run_local
from thinwire.sessions.base import BaseSession

METHOD = "topk(ratio=0.2)"
EARLY = {"FIRST": 3, "TRIAL": 3, "EVERY": 5}


def measuring(**options: Any) -> tuple[torch.nn.Module, BaseSession]:
    os.environ.pop(measured_link.VARIABLE, None)
    model = wrap(mlp())
    return model, thinwire.attach(model, METHOD, **options)


def decisions(worker: Worker) -> dict[str, Any]:
    with patch.multiple(measured_link, **EARLY):
        model, session = measuring()
        attached = session.engine.link
        session.throttle("5mbit,latency=4ms")
        throttled, before = session.engine.link, session.meter.rounds
        train(model, worker.rank, range(6))
        metrics, link = session.metrics(), session.engine.link
        session.throttle("none")
        found = {"attached": attached, "throttled": throttled, "link": link, "metrics": metrics}
        session.detach()
    dense = thinwire.attach(wrap(mlp()), "dense")
    found |= {"dense": dense.engine.measured, "before": before, "model": flat(model)}
    dense.detach()
    return found


def test_a_group_measures_its_link_and_all_ranks_know_the_same() -> None:
    rows = run_local(decisions, 3, timeout=400)
    for row in rows:
        assert torch.equal(row["model"], rows[0]["model"])
        assert [row[key] for key in ("attached", "throttled", "link")] == [
            rows[0][key] for key in ("attached", "throttled", "link")
        ]
        assert row["dense"] is None, "nothing of dense depends on the link"
        assert row["before"] == 0, "a probe is not the training's traffic"
        assert row["throttled"].latency > 3e-3
        assert row["throttled"].bandwidth < 1.5 * 5e6 / 8
        assert row["metrics"]["link_latency"] == row["link"].latency
        assert row["metrics"]["link_bandwidth"] == row["link"].bandwidth


def merging(worker: Worker) -> dict[str, Any]:
    """With a delay per message, four buckets are exchanged together; the results stay as they are."""
    steps, found = range(14), dict[str, Any]()
    with patch.multiple(measured_link, **EARLY):
        model, session = measuring()
        session.throttle("1gbit,latency=25ms")
        trained = train(model, worker.rank, steps)
        found |= {"measured": trained, "buckets": buckets_of(model), "metrics": session.metrics()}
        state = session.state_dict()
        session.detach()
        again, other = measuring()
        again.load_state_dict(model.state_dict())
        other.load_state_dict(state)
        found["resumed"] = train(again, worker.rank, range(14, 20))
        other.detach()
    model = wrap(mlp())
    session = thinwire.attach(model, METHOD, link="1gbit")
    found["given"] = train(model, worker.rank, steps)
    assert session.engine.measured is None
    found["resumed given"] = train(model, worker.rank, range(14, 20))
    found["operations"] = session.metrics()["rounds"] / 20
    session.detach()
    return found


def test_buckets_are_exchanged_together_where_messages_cost_most() -> None:
    for row in run_local(merging, 2, timeout=400):
        assert row["buckets"] == 4
        assert row["metrics"]["merged_buckets"] == 1.0
        assert row["metrics"]["rounds"] < 14 * row["operations"]
        assert torch.equal(row["measured"], row["given"])
        assert torch.equal(row["resumed"], row["resumed given"])


def mixed(worker: Worker) -> str:
    os.environ.pop(measured_link.VARIABLE, None)
    with pytest.raises(DisagreementError) as raised:
        thinwire.attach(wrap(mlp()), METHOD, link="10mbit" if worker.rank else None)
    return str(raised.value)


def test_a_link_is_given_on_all_ranks_or_on_none() -> None:
    for text in run_local(mixed, 2, timeout=400):
        assert "link: rank 0: measured; rank 1: Link(" in text


@pytest.mark.parametrize("delay", [0, 1, "auto"])
def test_delays_and_votes(delay: int | str) -> None:
    rows = run_local(delayed, 3, delay, timeout=400)
    for row in rows:
        assert torch.equal(row[0], rows[0][0])
        assert row[1] == rows[0][1]


def delayed(worker: Worker, delay: Any) -> tuple[torch.Tensor, Link]:
    with patch.multiple(measured_link, **EARLY):
        model, session = measuring(delay=delay)
        trained = train(model, worker.rank, range(14))
        session.wait()
        link = session.engine.link
        session.detach()
    return trained, link


def test_a_link_that_cannot_be_read_is_refused() -> None:
    model = mlp()
    with pytest.raises(ConfigError, match="'quick'"):
        thinwire.attach(model, "localsgd", optimizer=torch.optim.SGD(model.parameters()), link="quick")


def _in_pieces(worker: Worker) -> dict[str, tuple[list[float], int]]:
    """Means with a fixed seed, and the operations that they took, by the link that a session decides by."""
    generator = torch.Generator().manual_seed(worker.rank)
    tensor = torch.randn(100_001, generator=generator)
    found: dict[str, tuple[list[float], int]] = {}
    for link in (Link(), Link(latency=1e-4, bandwidth=1.25e6)):
        for method in (
            "qsgd(bits=8, reduce='gather')",
            "qsgd(bits=8, reduce='twoshot')",
            "threshold(value=0.5)",
        ):
            session = thinwire.Session([("x", tensor)], method, link=link)
            mean = session.average({"x": tensor})["x"]
            key = f"{method} at {link.bandwidth:g}"
            found[key] = mean[::1000].tolist(), session.meter.total.operations
            session.detach()
    return found


def test_on_a_slow_link_pieces_give_the_same_means() -> None:
    first, *others = run_local(_in_pieces, 3, timeout=400)
    for other in others:
        assert other == first
    slow = {name: told for name, told in first.items() if name.endswith("1.25e+06")}
    assert len(slow) == 3
    for name, (mean, operations) in slow.items():
        whole, once = first[name.replace("1.25e+06", "1.25e+08")]
        assert mean == whole
        assert operations > once
