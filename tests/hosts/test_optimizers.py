"""Methods that keep the momentum themselves refuse an optimizer that has one."""

import logging

import pytest
import torch

from thinwire import ConfigError, Session
from thinwire.net.rank_info import RankInfo

PARAMETERS = [("weight", torch.zeros(40, 50)), ("bias", torch.zeros(50))]
OWNERS = ("dgc", "sketched", "heavyball")


def session(method: str, optimizer: torch.optim.Optimizer | None) -> Session:
    return Session(PARAMETERS, method, rank_info=RankInfo(0, 1), optimizer=optimizer)


def tensors() -> list[torch.Tensor]:
    return [tensor for _, tensor in PARAMETERS]


@pytest.mark.parametrize("method", OWNERS)
def test_an_optimizer_with_momentum_is_refused(method: str) -> None:
    for optimizer in (
        torch.optim.SGD(tensors(), momentum=0.9),
        torch.optim.RMSprop(tensors(), momentum=0.5),
        torch.optim.Adam(tensors()),
        torch.optim.AdamW(tensors()),
        torch.optim.SGD([{"params": [PARAMETERS[0][1]]}, {"params": [PARAMETERS[1][1]], "momentum": 0.1}]),
    ):
        with pytest.raises(ConfigError, match=r"keeps the momentum itself.*(momentum=0\.|betas=)"):
            session(method, optimizer)


@pytest.mark.parametrize("method", OWNERS)
def test_one_without_is_accepted_in_silence(method: str, caplog: pytest.LogCaptureFixture) -> None:
    for optimizer in (
        torch.optim.SGD(tensors()),
        torch.optim.Adam(tensors(), betas=(0.0, 0.999)),
        torch.optim.AdamW(tensors(), betas=(0.0, 0.999), weight_decay=0.1),
        torch.optim.Adagrad(tensors()),
    ):
        session(method, optimizer)
    assert not caplog.records


def test_without_momentum_of_its_own_a_method_accepts_any(caplog: pytest.LogCaptureFixture) -> None:
    for method in ("topk", "dgc(momentum=0.0)", "sketched(momentum=0.0)", "powersgd"):
        session(method, torch.optim.SGD(tensors(), momentum=0.9))
        session(method, None)
    assert not caplog.records


def test_an_optimizer_that_is_not_known_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        session("dgc", None)
        Session(PARAMETERS, "dgc", rank_info=RankInfo(1, 2))
    assert len(caplog.records) == 1
    assert "optimizer must have none" in caplog.text


def test_weight_decay_without_momentum_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        session("dgc(momentum=0.9)", torch.optim.SGD(tensors(), weight_decay=1e-4))
    assert "divide weight_decay by 0.1" in caplog.text


def test_tensors_left_without_momentum_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        session("route(default=dgc, rules=(('bias', dense),))", torch.optim.SGD(tensors()))
    assert "served by dense have no momentum" in caplog.text


def test_a_warm_up_of_dense_steps_would_have_no_momentum() -> None:
    with pytest.raises(ConfigError, match="momentum"):
        session("warmup(steps=5, method=dgc)", None)
