"""Gaussian-k: about k entries, by a threshold from the moments instead of a sort."""

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import gaussian as reference


def gaussiank(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Entries above a two-sided normal threshold for k of them: (indices, values) as in `topk`.

    The threshold is bracketed and bisected geometrically in at most eight counts until it keeps between 2k/3
    and 4k/3 entries. If none does: with too many above, the exact top-k; with fewer but at least one, those;
    with none at all (an all-zero tensor), the exact top-k, so k >= 1 always selects something. Non-finite
    entries stay out of the moments and count as above every threshold. On other devices than a CPU the search
    stays on the device: the host waits once, for the number of selected entries.
    """
    check.flat_float("x", x)
    return dispatch(reference.gaussiank, x, None, check.count(k, x.numel()))
