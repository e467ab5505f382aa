"""A study of gradients while they train: how they are distributed, and what top-k loses of them.

It asks the questions behind Gaussian-k: which distribution fits the gradients, does it know the threshold of
top-k, and how tight are the bounds on what top-k loses?
"""

from thinwire.tools.gradients.bound import Loss, lost_by_topk
from thinwire.tools.gradients.figures import figures, overview
from thinwire.tools.gradients.fits import Fit, fit_all
from thinwire.tools.gradients.study import Findings, Study, data_of, run
from thinwire.tools.gradients.tables import Table, fits_table, loss_table, thresholds_table, tightness

__all__ = [
    "Findings",
    "Fit",
    "Loss",
    "Study",
    "Table",
    "data_of",
    "figures",
    "fit_all",
    "fits_table",
    "loss_table",
    "lost_by_topk",
    "overview",
    "run",
    "thresholds_table",
    "tightness",
]
