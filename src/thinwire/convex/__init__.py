"""Lazy gradient descent for one's own losses: GD, QGD, LAG and LAQ with M workers."""

from thinwire.convex.descent import lazy_gd, lazy_gd_on_this_rank, lazy_gd_steps
from thinwire.convex.options import Descent, Known, Objective
from thinwire.convex.trace import Iteration, Trace

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
