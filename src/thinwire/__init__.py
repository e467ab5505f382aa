"""thinwire trains PyTorch models over thin wires: the same accuracy for a small part of the bytes.

    model = DistributedDataParallel(model)
    session = thinwire.attach(model, "qsgd(bits=4)", optimizer=optimizer)

Method classes come from `thinwire.methods` and `thinwire.averaging`, what a method's author needs from
`thinwire.core`, drivers from `thinwire.drivers`, the parameter server from `thinwire.server`.
"""

import importlib
from typing import TYPE_CHECKING

from thinwire.version import __version__

if TYPE_CHECKING:
    from thinwire.errors import (
        ConfigError,
        DisagreementError,
        PayloadError,
        PeerError,
        StateError,
        ThinwireError,
    )
    from thinwire.hosts.attach import attach
    from thinwire.log import record
    from thinwire.methods.registry import list_methods, list_schedules, parse
    from thinwire.net.meter import Meter
    from thinwire.predict.probe import probe
    from thinwire.sessions.checkpointer import Checkpointer
    from thinwire.sessions.gradient import Session

__all__ = [
    "Checkpointer",
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
    "record",
]

# Loaded when they are asked for: the command line answers `--help` without importing torch.
_HOMES = {
    "Checkpointer": "thinwire.sessions.checkpointer",
    "attach": "thinwire.hosts.attach",
    "list_methods": "thinwire.methods.registry",
    "list_schedules": "thinwire.methods.registry",
    "parse": "thinwire.methods.registry",
    "Meter": "thinwire.net.meter",
    "probe": "thinwire.predict.probe",
    "record": "thinwire.log",
    "Session": "thinwire.sessions.gradient",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name, "thinwire.errors")
    if name not in __all__:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
