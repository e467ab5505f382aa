"""Lazy gradient descent for your own losses (GD, QGD, LAG, LAQ, IAG), and SGD in shared memory."""

from thinwire.convex.descent import lazy_gd, lazy_gd_on_this_rank, lazy_gd_steps
from thinwire.convex.heterogeneity import Heterogeneity, heterogeneity
from thinwire.convex.hogwild import HogwildEpoch, HogwildRun, hogwild
from thinwire.convex.options import Descent, Iteration, Known, Objective, Trace
from thinwire.convex.problems import increasing_smoothness, softmax_regression, squares

__all__ = [
    "Descent",
    "Heterogeneity",
    "HogwildEpoch",
    "HogwildRun",
    "Iteration",
    "Known",
    "Objective",
    "Trace",
    "heterogeneity",
    "hogwild",
    "increasing_smoothness",
    "lazy_gd",
    "lazy_gd_on_this_rank",
    "lazy_gd_steps",
    "softmax_regression",
    "squares",
]
