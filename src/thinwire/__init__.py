"""thinwire trains PyTorch models over thin wires: the same accuracy for a small part of the bytes.

model = DistributedDataParallel(model)
session = thinwire.attach(model, "topk(ratio=0.01)")
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from thinwire.averaging import PQASGD, SPASGD, DiLoCo, LocalSGD, Periodic, Schedule
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, State, Traits, replicated, residual
from thinwire.core.layout import Layout, Slot
from thinwire.drivers import Lockstep, Simulated
from thinwire.errors import ConfigError, DisagreementError, PayloadError, PeerError, StateError, ThinwireError
from thinwire.hosts import Attached, attach
from thinwire.methods import (
    A2SGD,
    BF16,
    DGC,
    FP16,
    LAG,
    LAQ,
    LASG,
    QSGD,
    SLAQ,
    Dense,
    EFSign,
    GaussianK,
    GSpar,
    HeavyBall,
    Natural,
    OneBit,
    PowerSGD,
    RandomBlock,
    RandomK,
    Route,
    ScaleCom,
    SignSGD,
    Sketched,
    TernGrad,
    Threshold,
    TopK,
    Warmup,
    same_batch,
)
from thinwire.methods.registry import methods, parse, parse_method, schedules, to_json
from thinwire.net.costs import Link
from thinwire.net.meter import Meter
from thinwire.net.rank_info import RankInfo
from thinwire.predict.probe import probe
from thinwire.sessions.gradient import Session
from thinwire.sessions.periodic import PeriodicSession
from thinwire.version import __version__

if _TYPE_CHECKING:
    from thinwire.server import AsyLPG, LinearProblem, ModuleProblem, asylpg, serve, work

__all__ = [
    "A2SGD",
    "BF16",
    "DGC",
    "FP16",
    "LAG",
    "LAQ",
    "LASG",
    "PQASGD",
    "QSGD",
    "SLAQ",
    "SPASGD",
    "AsyLPG",
    "Attached",
    "Channel",
    "ConfigError",
    "Dense",
    "DiLoCo",
    "DisagreementError",
    "EFSign",
    "Exchange",
    "GSpar",
    "GaussianK",
    "HeavyBall",
    "Layout",
    "LinearProblem",
    "Link",
    "LocalSGD",
    "Lockstep",
    "Meter",
    "ModuleProblem",
    "Natural",
    "OneBit",
    "PayloadError",
    "PeerError",
    "Periodic",
    "PeriodicSession",
    "PowerSGD",
    "RandomBlock",
    "RandomK",
    "RankInfo",
    "Route",
    "ScaleCom",
    "Schedule",
    "Session",
    "SignSGD",
    "Simulated",
    "Sketched",
    "Slot",
    "State",
    "StateError",
    "TernGrad",
    "ThinwireError",
    "Threshold",
    "TopK",
    "Traits",
    "Warmup",
    "__version__",
    "asylpg",
    "attach",
    "methods",
    "parse",
    "parse_method",
    "probe",
    "replicated",
    "residual",
    "same_batch",
    "schedules",
    "serve",
    "to_json",
    "work",
]

# The parameter server needs Numba from the start: it is imported when it is asked for.
_SERVER = ("AsyLPG", "LinearProblem", "ModuleProblem", "asylpg", "serve", "work")


def __getattr__(name: str) -> object:
    if name in _SERVER:
        from thinwire import server as parameter_server

        return getattr(parameter_server, name)
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
