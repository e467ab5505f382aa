"""thinwire trains PyTorch models over thin wires: the same accuracy for a small part of the bytes.

    model = DistributedDataParallel(model)
    session = thinwire.attach(model, "topk(ratio=0.01)")

Method classes come from `thinwire.methods` and `thinwire.averaging`, what a method's author needs from
`thinwire.core`, drivers from `thinwire.drivers`, the parameter server from `thinwire.server`.
"""

from thinwire.errors import ConfigError, DisagreementError, PayloadError, PeerError, StateError, ThinwireError
from thinwire.hosts.attach import attach
from thinwire.methods.registry import list_methods, list_schedules, parse
from thinwire.net.meter import Meter
from thinwire.predict.probe import probe
from thinwire.sessions.gradient import Session
from thinwire.version import __version__

__all__ = [
    "ConfigError",
    "DisagreementError",
    "Meter",
    "PayloadError",
    "PeerError",
    "Session",
    "StateError",
    "ThinwireError",
    "__version__",
    "attach",
    "list_methods",
    "list_schedules",
    "parse",
    "probe",
]
