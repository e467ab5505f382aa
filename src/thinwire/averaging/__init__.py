"""Schedules: methods that talk about parameters from time to time. A new one is a file and a line below."""

from thinwire.averaging.base import Outer, PeriodOptions, Schedule
from thinwire.averaging.diloco import DiLoCo
from thinwire.averaging.localsgd import LocalSGD
from thinwire.averaging.periodic import Periodic
from thinwire.averaging.pqasgd import PQASGD
from thinwire.averaging.spasgd import SPASGD

BUILT_IN: tuple[type[Schedule], ...] = (LocalSGD, SPASGD, PQASGD, DiLoCo, Periodic)

__all__ = [
    "BUILT_IN",
    "PQASGD",
    "SPASGD",
    "DiLoCo",
    "LocalSGD",
    "Outer",
    "PeriodOptions",
    "Periodic",
    "Schedule",
]
