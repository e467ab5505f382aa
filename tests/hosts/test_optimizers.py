"""Methods that keep the momentum themselves refuse an optimizer that has one."""

import logging
from dataclasses import replace

import pytest
import torch

from thinwire import ConfigError, Session, parse
from thinwire.net.rank_info import RankInfo
from thinwire.predict import language
from thinwire.sessions.optimizer_checks import BETTER_WITH_ADAMW

PARAMETERS = [("weight", torch.zeros(40, 50)), ("bias", torch.zeros(50))]
OWNERS = ("dgc", "demo", "sketched", "heavyball")


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
    session(method, torch.optim.SGD(tensors()))
    assert not caplog.records
    for optimizer in (
        torch.optim.Adam(tensors(), betas=(0.0, 0.999)),
        torch.optim.AdamW(tensors(), betas=(0.0, 0.999), weight_decay=0.1),
        torch.optim.Adagrad(tensors()),
    ):
        session(method, optimizer)
    assert all("sends late" in record.message for record in caplog.records)


class MyAdam8bit(torch.optim.Adam):
    """As of another package."""


ADAPTIVE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    MyAdam8bit,
)
LATE = (
    "topk",
    "gaussiank",
    "scalecom",
    "randomk",
    "efsign",
    "onebit",
    "powersgd",
    "topk(decay=0.9)",
    "randomblock",
)


@pytest.mark.parametrize("method", LATE)
def test_error_feedback_under_an_adaptive_optimizer_is_warned_of(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    session(method, torch.optim.SGD(tensors(), momentum=0.9))
    session(method, None)
    Session(PARAMETERS, method, rank_info=RankInfo(1, 2), optimizer=torch.optim.AdamW(tensors()))
    assert not caplog.records
    for count, kind in enumerate(ADAPTIVE, 1):
        session(method, kind(tensors(), lr=0.1))
        assert len(caplog.records) == count, "one line"
        message = caplog.records[-1].message
        assert f"{kind.__name__} takes that" in message
        assert "\n" not in message
        better = message.split("worse than dense; ")[1].removesuffix(" with AdamW does better")
        named = [parse(text) for text in better.split(" or ")]
        assert named == list(BETTER_WITH_ADAMW), "what it names can be used as it stands"


def test_what_the_warning_names_is_close_to_dense_in_our_table() -> None:
    close = [
        replace(method, warmup=1) for name in language.close() if hasattr(method := parse(name), "warmup")
    ]
    for better in BETTER_WITH_ADAMW:
        assert replace(better, warmup=1) in close, "apart from the warm-up, which depends on the run"


def test_methods_that_send_nothing_late_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for method in ("dense", "bf16", "qsgd(bits=4)", "natural", "topk(feedback=False)", "adam", "terngrad"):
        session(method, torch.optim.AdamW(tensors()))
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
