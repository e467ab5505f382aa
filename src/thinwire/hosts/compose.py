"""Which options of `attach` a kind of method uses on a kind of model. All others are refused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from thinwire.averaging.analysis import is_analysed
from thinwire.averaging.base import Schedule
from thinwire.core.exchange import Exchange
from thinwire.core.optimizers import Given
from thinwire.errors import ConfigError

Kind = Literal["auto", "gradients", "schedule"]
"""Automatic, a method that averages gradients in every step, or one that averages parameters."""
Host = Literal[
    "a bare model", "a DDP model", "replicas of FSDP2", "one replica of FSDP2", "replica groups of torchft"
]

_EVERYWHERE = frozenset({"seed", "dense_below", "optimizer"})
_SCHEDULE = _EVERYWHERE | {"scaler", "process_group", "steps", "link"}
USES: dict[tuple[Kind, Host], frozenset[str]] = {
    ("auto", "a DDP model"): _EVERYWHERE | {"overlap", "scaler", "replicas"},
    ("gradients", "a DDP model"): _EVERYWHERE | {"overlap", "delay", "scaler", "inner_group", "link"},
    ("gradients", "replicas of FSDP2"): _EVERYWHERE | {"overlap", "scaler", "process_group", "link"},
    ("gradients", "one replica of FSDP2"): _EVERYWHERE | {"link"},
    ("gradients", "replica groups of torchft"): _EVERYWHERE | {"manager"},
    ("schedule", "a bare model"): _SCHEDULE | {"inner_group"},
    ("schedule", "a DDP model"): _SCHEDULE | {"inner_group"},
    ("schedule", "replicas of FSDP2"): _SCHEDULE,
    ("schedule", "replica groups of torchft"): _EVERYWHERE | {"manager"},
}
"""The other pairs do not exist; `INSTEAD` says what to take."""

_AUTO_NEEDS_DDP = "it measures DDP models: choose a method, such as qsgd(bits=4)"
INSTEAD: dict[tuple[Kind, Host], str] = {
    ("auto", "a bare model"): (
        "it begins with the gradients of a DistributedDataParallel model: wrap the model first"
    ),
    ("auto", "replicas of FSDP2"): _AUTO_NEEDS_DDP,
    ("auto", "one replica of FSDP2"): _AUTO_NEEDS_DDP,
    ("auto", "replica groups of torchft"): "it measures once, and they come and go: choose a method yourself",
    ("gradients", "a bare model"): (
        "it averages gradients, those of a DistributedDataParallel model: wrap the model first, or use "
        "thinwire.Session(model.named_parameters(), method) and session.average() in your own loop. A bare "
        "model takes a schedule, such as 'pqasgd(every=8)'"
    ),
    ("schedule", "one replica of FSDP2"): (
        "a schedule averages replicas, so it needs at least two of this model: fully_shard(model, "
        'mesh=mesh["shard"]) and attach(..., process_group=mesh["replicate"].get_group()). The nearest '
        "method that works on one replica is 'qsgd(bits=4)'"
    ),
}

_ADVICE: dict[str, str] = {
    "overlap": "only DDP models and replicas of FSDP2 exchange gradients beside the backward pass",
    "overlap schedule": "a schedule has an option of that name, such as localsgd(every=8, overlap=2)",
    "delay": "only DDP models apply the mean of the step before",
    "delay auto": "auto does not choose a method with a delay; choose one yourself",
    "delay schedule": "a schedule has an option overlap, such as localsgd(every=8, overlap=2)",
    "replicas": "it is for the method auto",
    "scaler": "methods that reduce and scatter keep nothing that would follow the scale of the loss",
    "scaler replica groups of torchft": (
        "a GradScaler skips steps on single groups, which then miss the vote: use torch.autocast with "
        "bfloat16, which needs none"
    ),
    "process_group": "a DDP model has a group of its own, given to its wrapper",
    "process_group replica groups of torchft": "the manager has process groups of its own",
    "inner_group": "only hierarchical has hosts, on DDP and bare models",
    "steps": "it is for the analysis of localsgd, spasgd and pqasgd, which does not cover this method",
    "link": "replica groups come and go, and their links with them",
    "link auto": "auto measures the link; choose a method to give one",
}


def check_host(kind: Kind, host: Host, method: object, model: object) -> None:
    """Refuse a kind of model that the method does not train."""
    if (kind, host) not in USES:
        raise ConfigError(f"{method} does not train {host} ({type(model).__name__}): {INSTEAD[kind, host]}")


def check_options(kind: Kind, host: Host, method: object, given: Collection[str]) -> None:
    """Refuse what this kind of method would not use on this kind of model."""
    for option in sorted(given):
        if option not in USES[kind, host]:
            keys = (f"{option} {host}", f"{option} {kind}", option)
            advice = next(_ADVICE[key] for key in keys if key in _ADVICE)
            raise ConfigError(f"{option} is not for {method} on {host}: {advice}. Leave it out")


def check_auto(optimizer: Given) -> None:
    """Refuse to choose without the optimizer: what is safe with SGD may be worse than nothing with AdamW."""
    if not optimizer:
        raise ConfigError(
            'auto chooses by the optimizer, and none is given: write attach(model, "auto", '
            "optimizer=optimizer), with a list of them if several train the model. If it has none, name a "
            "method yourself, such as qsgd(bits=4)"
        )


def check_method(method: Exchange | Schedule, host: Host, given: Collection[str]) -> None:
    """Refuse options that this very method does not use, and methods that the model cannot take."""
    exchange = method.inner if isinstance(method, Schedule) else method
    traits = exchange.traits
    on_ddp = host in ("a bare model", "a DDP model")
    if traits.two_levels and not on_ddp:
        raise ConfigError(
            f"{exchange.name} does not train {host}: their groups are not those of hosts and leaders. Give "
            f"the outer method of {exchange.name} alone"
        )
    if traits.delayed and not on_ddp:
        raise ConfigError(f"{exchange.name} does not train {host}: {_ADVICE['delay']}. Give its method alone")
    if "inner_group" in given and not traits.two_levels:
        raise ConfigError(f"inner_group is for hierarchical, not for {method} on {host}: leave it out")
    if "steps" in given and not is_analysed(method):
        raise ConfigError(f"steps is not for {method} on {host}: {_ADVICE['steps']}. Leave it out")
    if isinstance(method, Exchange) and "link" in given and traits.single_mean:
        raise ConfigError(
            f"link is not for {method} on {host}: it is one mean, the same on every link. Leave it out"
        )
    if isinstance(method, Exchange) and traits.optimizer == "Adam" and "optimizer" not in given:
        raise ConfigError(
            f"{method.name} averages Adam's momentum, and its steps are taken inside optimizer.step(): give "
            "torch.optim.AdamW as optimizer=..."
        )
