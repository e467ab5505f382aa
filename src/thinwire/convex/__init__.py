"""Lazy gradient descent for your own losses: GD, QGD, LAG and LAQ with M workers."""

from thinwire.convex.descent import lazy_gd, lazy_gd_on_this_rank, lazy_gd_steps
from thinwire.convex.options import Descent, Iteration, Known, Objective, Trace

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
