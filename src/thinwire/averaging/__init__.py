"""Periodic averaging: the schedules. A new one is a file here and a line in `methods/registry.py`."""

from thinwire.averaging.analysis import Condition, Conditions, conditions
from thinwire.averaging.base import Outer, PeriodOptions, Schedule
from thinwire.averaging.diloco import DiLoCo
from thinwire.averaging.localsgd import LocalSGD
from thinwire.averaging.periodic import Periodic
from thinwire.averaging.postlocal import PostLocal
from thinwire.averaging.pqasgd import PQASGD
from thinwire.averaging.sparseloco import SparseLoCo
from thinwire.averaging.spasgd import SPASGD

__all__ = [
    "PQASGD",
    "SPASGD",
    "Condition",
    "Conditions",
    "DiLoCo",
    "LocalSGD",
    "Outer",
    "PeriodOptions",
    "Periodic",
    "PostLocal",
    "Schedule",
    "SparseLoCo",
    "conditions",
]
