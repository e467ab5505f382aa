"""Options of `attach`, for every kind of method on every kind of model: each has an effect or is refused."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.failures.test_checkpointer import logged
from thinwire import ConfigError
from thinwire.hosts import auto
from thinwire.hosts.compose import INSTEAD, USES, Host, Kind
from thinwire.net.launch import Worker, run_local

KINDS: tuple[Kind, ...] = ("auto", "gradients", "schedule")
HOSTS: tuple[Host, ...] = (
    "a bare model",
    "a DDP model",
    "one replica of FSDP2",
    "replicas of FSDP2",
    "replica groups of torchft",
)
OPTIONS = set(inspect.signature(thinwire.attach).parameters) - {"model", "method"}
# What makes the model one of that kind.
MAKES: dict[Host, set[str]] = {
    "replicas of FSDP2": {"process_group"},
    "replica groups of torchft": {"manager"},
}
WIDTH = 400


def other_hosts(host: Host) -> set[str]:
    """Options that would make it another host, so that they cannot be refused here."""
    elsewhere = {"manager"} if host in ("a bare model", "a DDP model") else {"manager", "process_group"}
    return elsewhere - MAKES.get(host, set()) if host != "replica groups of torchft" else set()


def test_the_tables_have_every_kind_host_and_option() -> None:
    pairs = {(kind, host) for kind in KINDS for host in HOSTS}
    assert USES.keys() | INSTEAD.keys() == pairs
    assert not USES.keys() & INSTEAD.keys()
    used = set().union(*USES.values())
    assert used == OPTIONS, "an option that no method uses"


# -- models ------------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    """A tensor of 640 KB, so that a slow link takes it in pieces."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


class Place:
    """A host on this rank: models, and what has to be given with them."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.given: dict[str, Any] = {}
        if host == "replicas of FSDP2":
            replicas = min(2, dist.get_world_size())
            shape = (replicas, dist.get_world_size() // replicas)
            self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("out", "in"))
            self.given["process_group"] = self.mesh["out"].get_group()
        elif host == "one replica of FSDP2":
            self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("in",))
        elif host == "replica groups of torchft":
            self.given["manager"] = object()

    def model(self) -> nn.Module:
        if self.host == "a DDP model":
            return DistributedDataParallel(network())
        return fully_shard(network(), mesh=self.mesh["in"]) if "FSDP2" in self.host else network()


# -- what is refused ---------------------------------------------------------------------------------------

METHODS: dict[Kind, str] = {
    "auto": "auto",
    "gradients": "qsgd(bits=4)",
    "schedule": "pqasgd(every=2, bits=4)",
}


def value_of(option: str, model: nn.Module) -> list[object]:
    values: dict[str, list[object]] = {
        "overlap": [True, False],
        "delay": [1, "auto"],
        "replicas": ["any", "equal"],
        "scaler": [torch.amp.GradScaler("cpu")],
        "process_group": [dist.group.WORLD],
        "inner_group": [dist.group.WORLD],
        "steps": [100],
        "manager": [object()],
        "link": ["100mbit"],
    }
    return values[option]


def refusals(worker: Worker) -> dict[tuple[Kind, Host, str], str]:
    """What `attach` says to each option that is not used; afterwards the model can be attached."""
    found: dict[tuple[Kind, Host, str], str] = {}
    for host in HOSTS:
        place = Place(host)
        for kind in KINDS:
            if (kind, host) in INSTEAD:
                with pytest.raises(ConfigError) as raised:
                    thinwire.attach(place.model(), METHODS[kind], **place.given)
                found[kind, host, ""] = str(raised.value)
                continue
            for option in OPTIONS - USES[kind, host] - other_hosts(host):
                model = place.model()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for value in value_of(option, model):
                    given = place.given | {option: value, "optimizer": optimizer}
                    with pytest.raises(ConfigError) as raised:
                        thinwire.attach(model, METHODS[kind], **given)
                    found[kind, host, option] = str(raised.value)
        for method, option, value in (
            ("dense", "link", "100mbit"),
            ("fp16", "link", "100mbit"),
            ("topk", "inner_group", dist.group.WORLD),
            ("localsgd", "inner_group", dist.group.WORLD),
            ("diloco", "steps", 100),
            ("localsgd(overlap=2)", "steps", 100),
        ):
            if host == "a DDP model":
                model = place.model()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                with pytest.raises(ConfigError) as raised:
                    thinwire.attach(model, method, optimizer=optimizer, **{option: value})
                found["gradients", host, f"{option} {method}"] = str(raised.value)
    model = Place("a DDP model").model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="replicas must be one of 'any', 'equal'"):
        thinwire.attach(model, "auto", optimizer=optimizer, replicas="some")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")]
    return found


@pytest.fixture(scope="module")
def refused() -> dict[tuple[Kind, Host, str], str]:
    (found,) = run_local(refusals, 1, timeout=400)
    return found


def test_an_option_without_effect_is_refused_with_a_sentence_that_names_it(refused: dict) -> None:
    assert {option for _, _, option in refused} >= OPTIONS - {"seed", "dense_below", "optimizer", "manager"}
    for (kind, host, option), said in refused.items():
        if not option or " " in option:
            continue
        method = "auto" if kind == "auto" else str(thinwire.parse(METHODS[kind]))
        begin = f"{option} is not for {method} on {host}: "
        assert said.startswith(begin), said
        assert said.endswith(". Leave it out")
        advice = said.removeprefix(begin).removesuffix(". Leave it out")
        assert len(advice.split()) > 4, "it says why"
        assert advice[0].islower()
        assert not advice.endswith(".")


def test_a_kind_of_model_that_a_method_does_not_train_is_refused(refused: dict) -> None:
    for kind, host in INSTEAD:
        said = refused[kind, host, ""]
        method = "auto" if kind == "auto" else str(thinwire.parse(METHODS[kind]))
        assert said.startswith(f"{method} does not train {host} ("), said
        assert said.endswith(INSTEAD[kind, host])


def test_options_that_one_method_of_a_kind_does_not_use(refused: dict) -> None:
    particular = {option: said for (_, _, option), said in refused.items() if " " in option}
    assert len(particular) == 6
    for option, said in particular.items():
        name, method = option.split(" ", 1)
        assert f"{name} is " in said
        assert f"not for {thinwire.parse(method)} on a DDP model: " in said
        assert said.lower().endswith("leave it out")


def explicit_defaults(worker: Worker) -> None:
    """None stands for an option that is not given, and so does a delay of 0."""
    absent = dict.fromkeys(OPTIONS - {"seed", "dense_below", "delay", "optimizer"})
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    thinwire.attach(model, "localsgd", optimizer=optimizer, delay=0, **absent).detach()
    thinwire.attach(DistributedDataParallel(model), "dense", optimizer=[], delay=0, **absent).detach()


def test_nothing_is_given_with_none() -> None:
    run_local(explicit_defaults, 1, timeout=400)


# -- what has an effect ------------------------------------------------------------------------------------


class Scale:
    """The part of a GradScaler that gradients need."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


class Run:
    """Some steps with these options, and what can be seen of them."""

    def __init__(
        self,
        place: Place,
        method: str,
        length: int = 4,
        *,
        scale: Callable[[int], float] = lambda _: 1.0,
        **options: Any,
    ) -> None:
        self.model = place.model()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        given = place.given | {"optimizer": optimizer, "dense_below": 64} | options
        with logged() as self.lines:
            self.session = thinwire.attach(self.model, method, **given)
        scaler = given.get("scaler")
        for step in range(length):
            rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
            optimizer.zero_grad()
            factor = scale(step)
            if isinstance(scaler, Scale):
                scaler.scale = factor
            (factor * self.model(torch.randn(4, WIDTH, generator=rng)).square().mean()).backward()
            for parameter in self.model.parameters():
                parameter.grad.div_(factor)
            optimizer.step()
        self.session.wait()
        self.parameters = torch.cat([_local(p).flatten() for p in self.model.parameters()])
        self.meter, self.rank_info = self.session.meter.total, self.session.rank_info
        self.inside = self.session.meter.inside.sent_bytes
        self.threads = [t.name for t in threading.enumerate() if t.name.startswith("thinwire-lane")]
        self.patched = "step" in vars(scaler) if scaler is not None else False
        self.session.detach()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    from thinwire.core.shards import local

    return local(parameter).detach().clone()


def seed(place: Place, kind: Kind) -> bool:
    runs = [Run(place, COARSE[kind], LONG[kind], seed=given) for given in (1, 1, 2)]
    same, other = (torch.equal(runs[0].parameters, run.parameters) for run in runs[1:])
    return same and not other


def dense_below(place: Place, kind: Kind) -> bool:
    some, none = (Run(place, COARSE[kind], LONG[kind], dense_below=given) for given in (64, 10**6))
    return some.meter.sent_bytes < none.meter.sent_bytes


def optimizer(place: Place, kind: Kind) -> bool:
    model = place.model()
    first, *_ = model.parameters()
    with pytest.raises(ConfigError, match="no optimizer holds"):
        thinwire.attach(model, METHODS[kind], **place.given | {"optimizer": torch.optim.SGD([first], lr=0.1)})
    return True


def overlap(place: Place, kind: Kind) -> bool:
    """With threads that work during the backward pass, or in the hook."""
    runs = [Run(place, COARSE[kind], LONG[kind], overlap=given) for given in (True, False)]
    return [bool(run.threads) for run in runs] == [True, False]


def delay(place: Place, kind: Kind) -> bool:
    """The first step with a delay has no mean yet."""
    before = torch.cat([_local(p).flatten() for p in place.model().parameters()])
    late, now = (Run(place, METHODS[kind], 1, delay=given).parameters for given in (1, 0))
    return torch.equal(before, late) and not torch.equal(before, now)


def scaler(place: Place, kind: Kind) -> bool:
    """Residuals follow the scale, so that training is the same with another one; a schedule counts steps."""
    if kind == "schedule":
        scaler = torch.amp.GradScaler("cpu")
        return Run(place, METHODS[kind], scaler=scaler).patched and "step" not in vars(scaler)
    steps = LONG[kind]
    usual = Run(place, SPARSE[kind], steps).parameters
    growing = {"scale": lambda step: 2.0**step}
    followed = Run(place, SPARSE[kind], steps, scaler=Scale(), **growing).parameters
    ignored = Run(place, SPARSE[kind], steps, **growing).parameters
    return bool(torch.allclose(usual, followed, atol=1e-6)) and not torch.allclose(usual, ignored, atol=1e-4)


def process_group(place: Place, kind: Kind) -> bool:
    """Only these ranks synchronise."""
    if place.host == "replicas of FSDP2":
        return Run(place, METHODS[kind]).rank_info.size == 2 < dist.get_world_size()
    alone, _ = dist.new_subgroups(1)
    return [Run(place, METHODS[kind], process_group=given).rank_info.size for given in (alone, None)] == [
        1,
        2,
    ]


def inner_group(place: Place, kind: Kind) -> bool:
    """Ranks of one host exchange inside of it."""
    alone, _ = dist.new_subgroups(1)
    together = dist.new_group(range(dist.get_world_size()))
    inside = [Run(place, TWO_LEVELS[kind], inner_group=given).inside for given in (alone, together)]
    return inside[0] == 0 < inside[1]


def steps(place: Place, kind: Kind) -> bool:
    """The conditions of the analysis are said with a number of steps, on rank 0."""
    few, unknown = (Run(place, METHODS[kind], steps=given) for given in (2, None))
    return dist.get_rank() > 0 or (few.lines != unknown.lines and any("K" in line for line in few.lines))


def link(place: Place, kind: Kind) -> bool:
    """A gather on a slow link is sent in pieces."""
    method = PIECES[kind]
    slow, fast = (
        Run(place, method, link=given).meter.operations for given in ("1mbit,latency=1ms", "100gbit")
    )
    return slow > fast


def replicas(place: Place, kind: Kind) -> bool:
    """A schedule, which only "any" may choose, refuses an optimizer that steps out of turn."""
    refused: list[bool] = []
    for given in ("any", "equal"):
        model = place.model()
        parameters = list(model.parameters())
        first, second = (torch.optim.SGD(half, lr=0.1) for half in (parameters[::2], parameters[1::2]))
        session = thinwire.attach(model, "auto", optimizer=[first, second], replicas=given)
        first.step()
        try:
            first.step()
            refused.append(False)
        except ConfigError:
            refused.append(True)
        session.detach()
    return refused == [True, False]


COARSE: dict[Kind, str] = {"auto": "auto", "gradients": "qsgd(bits=2)", "schedule": "pqasgd(every=2, bits=2)"}
SPARSE: dict[Kind, str] = {"auto": "auto", "gradients": "topk(ratio=0.05)"}
TWO_LEVELS: dict[Kind, str] = {
    "gradients": "hierarchical(outer=qsgd(bits=4))",
    "schedule": "periodic(every=2, exchange=hierarchical(outer=qsgd(bits=4)))",
}
PIECES: dict[Kind, str] = {"gradients": "qsgd(bits=8)", "schedule": "pqasgd(every=2, bits=8)"}
LONG: dict[Kind, int] = {"auto": auto.STEPS + 3, "gradients": 4, "schedule": 4}
EFFECTS: dict[str, Callable[[Place, Kind], bool]] = {
    each.__name__: each
    for each in (
        *(seed, dense_below, optimizer, overlap, delay, scaler, process_group, inner_group, steps, link),
        replicas,
    )
}


def effects(worker: Worker, hosts: tuple[Host, ...]) -> dict[tuple[Kind, Host, str], bool]:
    found: dict[tuple[Kind, Host, str], bool] = {}
    logging.getLogger("thinwire").setLevel(logging.INFO)
    plan = auto.AutoSession._plan
    for host in hosts:
        place = Place(host)
        for kind in KINDS:
            for option in sorted(USES.get((kind, host), ())):
                # Auto switches to a method that the option is for.
                taken = SPARSE["gradients"] if option == "scaler" else COARSE["gradients"]
                said = {"method": taken, "reasons": [], "seconds": 1.0}
                auto.AutoSession._plan = plan if option == "replicas" else lambda *_, said=said: said
                found[kind, host, option] = EFFECTS[option](place, kind)
    return found


@pytest.mark.parametrize(
    ("size", "hosts"),
    [(2, ("a bare model", "a DDP model", "one replica of FSDP2")), (4, ("replicas of FSDP2",))],
)
def test_an_option_that_is_accepted_has_an_effect(size: int, hosts: tuple[Host, ...]) -> None:
    """Those for torchft: tests/hosts/test_torchft_groups.py."""
    for found in run_local(effects, size, hosts, timeout=400):
        assert {(kind, host) for kind, host, _ in found} == {pair for pair in USES if pair[1] in hosts}
        assert [key for key, seen in found.items() if not seen] == []
