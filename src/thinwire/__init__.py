"""thinwire trains PyTorch models over thin wires: the same accuracy for a small part of the bytes.

model = DistributedDataParallel(model)
session = thinwire.attach(model, "topk(ratio=0.01)")
"""

__version__ = "0.1.0"

from thinwire.channel import Channel, Place
from thinwire.costs import Link
from thinwire.drivers import Lockstep, Simulated
from thinwire.errors import ConfigError, DisagreementError, PayloadError, PeerError, StateError, ThinwireError
from thinwire.exchange import Exchange, State, Traits, replicated, residual
from thinwire.hosts import attach
from thinwire.layout import Layout, Slot
from thinwire.meter import Meter
from thinwire.methods import (
    BF16,
    FP16,
    QSGD,
    Dense,
    GaussianK,
    PowerSGD,
    RandomBlock,
    RandomK,
    Threshold,
    TopK,
)
from thinwire.registry import methods, parse, to_json
from thinwire.session import Session

__all__ = [
    "BF16",
    "FP16",
    "QSGD",
    "Channel",
    "ConfigError",
    "Dense",
    "DisagreementError",
    "Exchange",
    "GaussianK",
    "Layout",
    "Link",
    "Lockstep",
    "Meter",
    "PayloadError",
    "PeerError",
    "Place",
    "PowerSGD",
    "RandomBlock",
    "RandomK",
    "Session",
    "Simulated",
    "Slot",
    "State",
    "StateError",
    "ThinwireError",
    "Threshold",
    "TopK",
    "Traits",
    "attach",
    "methods",
    "parse",
    "replicated",
    "residual",
    "to_json",
]
