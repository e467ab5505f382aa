"""Lazy gradient descent for one's own losses: GD, QGD, LAG and LAQ with M workers."""

from thinwire.optimize.descent import lazy_gd, lazy_gd_on_this_rank, lazy_gd_steps
from thinwire.optimize.options import Descent, Known, Objective
from thinwire.optimize.trace import Iteration, Trace

__all__ = [
    "Descent",
    "Iteration",
    "Known",
    "Objective",
    "Trace",
    "lazy_gd",
    "lazy_gd_on_this_rank",
    "lazy_gd_steps",
]
