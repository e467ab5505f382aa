"""Asynchronous training through a parameter server, quantised both ways (AsyLPG and its variants).

`serve` and `work` drive two coroutines (`server.py`, `worker.py`) over mail (`mail.py`): in processes over
`torch.distributed` (`gloo.py`), or all in one process on a virtual clock (`scheduler.py`).
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
