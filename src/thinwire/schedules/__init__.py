"""Schedules: methods that talk about parameters from time to time. A new one is a file and a line below."""

from thinwire.schedules.base import Outer, PeriodOptions, Schedule
from thinwire.schedules.diloco import DiLoCo
from thinwire.schedules.localsgd import LocalSGD
from thinwire.schedules.periodic import Periodic
from thinwire.schedules.pqasgd import PQASGD
from thinwire.schedules.spasgd import SPASGD

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
