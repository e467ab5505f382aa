"""Asynchronous training through a parameter server, quantised both ways (AsyLPG and its variants).

`server.py` and `worker.py` are the two sides. They talk in messages (`messages.py`) over the connections of
`thinwire.net.transport`, in processes (`connections.py`) or within one (`tests/server/simulation.py`).
"""

from thinwire.server.api import asylpg, serve, work
from thinwire.server.options import AsyLPG
from thinwire.server.problems import LinearProblem, ModuleProblem, Problem
from thinwire.server.record import EpochRecord, RunResult

__all__ = [
    "AsyLPG",
    "EpochRecord",
    "LinearProblem",
    "ModuleProblem",
    "Problem",
    "RunResult",
    "asylpg",
    "serve",
    "work",
]
