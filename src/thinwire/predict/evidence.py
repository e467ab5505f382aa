"""What our tables say about a method, and why it is not recommended if it is not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

from thinwire import predict
from thinwire.averaging.base import Schedule
from thinwire.core.config import Configured
from thinwire.methods.hierarchical import Hierarchical
from thinwire.methods.registry import parse, parse_exchange
from thinwire.predict import families, language
from thinwire.sessions.optimizer_checks import OptimizerKind, has_residual

# A method is recommended if it came this close to dense in our own table, in points of accuracy.
CLOSE_ENOUGH = 0.01

Replicas = Literal["any", "equal"]
"""Whether replicas may differ between sync rounds."""


@lru_cache(maxsize=1)
def proven() -> dict[str, float]:
    """Accuracy minus that of dense, by method: our table (`python -m benchmarks digits --steps 500`)."""
    record = json.loads(files("thinwire.predict").joinpath("digits.json").read_text())
    results: Sequence[Mapping[str, Any]] = record["results"]
    return {str(row["method"]): float(row["accuracy"] - results[0]["accuracy"]) for row in results}


@lru_cache(maxsize=1)
def recovered_on_digits() -> dict[str, float]:
    """The part of the gap between a worker alone and dense in that table; empty without a worker alone."""
    record = json.loads(files("thinwire.predict").joinpath("digits.json").read_text())
    results: Sequence[Mapping[str, Any]] = record["results"]
    found = {str(row["method"]): float(row["accuracy"]) for row in results}
    gap = found["dense"] - found.get("alone", found["dense"])
    return {} if gap <= 0 else {method: 1 - (found["dense"] - each) / gap for method, each in found.items()}


def kept_back(
    method: str,
    own: predict.Profile | predict.PeriodicProfile | None = None,
    *,
    optimizer: OptimizerKind = "plain SGD",
    replicas: Replicas = "any",
) -> str | None:
    """Why a method is not recommended, however fast it is."""
    parsed = parse(method)
    if isinstance(parsed, Schedule):
        return _schedule_kept_back(parsed, optimizer, replicas)
    exchange = parse_exchange(parsed)
    if isinstance(exchange, Hierarchical):  # the mean of a group, to half precision or exactly, then `outer`
        return kept_back(str(exchange.outer), own, optimizer=optimizer, replicas=replicas)
    traits = exchange.traits
    if traits.delayed:
        return _late_kept_back(exchange, optimizer)
    behind = proven().get(str(exchange))
    # A measurement with AdamW says more than a rule, and than digits with SGD.
    nats = language.behind().get(str(exchange)) if optimizer == "adaptive" else None
    reasons = {
        "replicas drift": not traits.consensus or exchange.reconcile_every is not None,
        "keeps the momentum itself": traits.optimizer == "no momentum",
        "needs AdamW": traits.optimizer == "Adam" and optimizer != "adaptive",
        "its rule is for plain SGD": traits.optimizer == "plain SGD" and optimizer != "plain SGD",
        "behind dense with AdamW in our table": nats is not None and nats > language.CLOSE_ENOUGH,
        "what it sends late disturbs an adaptive optimizer": optimizer == "adaptive"
        and nats is None
        and traits.optimizer != "Adam"
        and has_residual(exchange),
        "unproven in this form": exchange.warning is not None,
        "bytes vary with the gradients": own is not None and own.data_dependent,
        "not in our table": behind is None and nats is None,
        "behind dense in our table": nats is None and behind is not None and behind < -CLOSE_ENOUGH,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _schedule_kept_back(schedule: Schedule, optimizer: OptimizerKind, replicas: Replicas) -> str | None:
    if replicas == "equal":
        return "replicas differ between sync rounds"
    return _late_kept_back(schedule, optimizer)


def _late_kept_back(method: Configured, optimizer: OptimizerKind) -> str | None:
    """A method that averages parameters, or later, must have been measured with this optimizer.

    Its period or delay decides how it trains: a row must be its own, or stand for it (`families`). It must
    also recover a good part of what the other workers bring: a worker that trains alone is late, too.
    """
    text, adaptive = str(method), optimizer == "adaptive"
    nats, behind = loss_behind(text), proven().get(text)
    known = nats if adaptive else behind
    part = _recovered(method) if adaptive else recovered_on_digits().get(text)
    reasons = {
        "not in our table": known is None,
        "behind dense with AdamW in our table": adaptive
        and nats is not None
        and nats > language.CLOSE_ENOUGH,
        "behind dense in our table": not adaptive and behind is not None and behind < -CLOSE_ENOUGH,
        "not compared with a worker alone in our table": part is None,
        "recovers less than half of the gap between a worker alone and dense": part is not None
        and part < language.LEAST_RECOVERED,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def loss_behind(method: str) -> float | None:
    """Nats behind dense with AdamW, as measured, or those of the row that stands for it; None if unknown."""
    own = language.behind().get(method)
    stands = families.standing(parse(method)) if own is None else None
    return own if stands is None else stands.behind


def _recovered(method: Configured) -> float | None:
    stands = None if str(method) in language.behind() else families.standing(method)
    return language.recovered().get(str(method)) if stands is None else stands.recovered


def in_words(method: str, optimizer: OptimizerKind) -> str:
    """How far from dense it was in our table."""
    nats = loss_behind(method) if optimizer == "adaptive" else None
    if nats is None:
        return (
            f"in our table its accuracy differs from dense's by {100 * proven()[between(method)]:+.1f} points"
        )
    stands = None if method in language.behind() else families.standing(parse(method))
    if stands is None:
        return f"in our table of a transformer with AdamW its loss differs from dense's by {nats:+.3f}"
    return (
        f"in our table of a transformer with AdamW {stands.row}, which stands for it, "
        f"has a loss that differs from dense's by {nats:+.3f}"
    )


def between(method: str) -> str:
    """The method between groups, of one with two levels; otherwise itself."""
    parsed = parse(method)
    return str(parsed.outer) if isinstance(parsed, Hierarchical) else method
