"""The methods, one file each. A new one is a file here and a line below."""

from thinwire.exchange import Exchange
from thinwire.methods.dense import BF16, FP16, Dense
from thinwire.methods.gaussiank import GaussianK
from thinwire.methods.powersgd import PowerSGD
from thinwire.methods.qsgd import QSGD
from thinwire.methods.randomblock import RandomBlock
from thinwire.methods.randomk import RandomK
from thinwire.methods.threshold import Threshold
from thinwire.methods.topk import TopK

BUILT_IN: tuple[type[Exchange], ...] = (
    Dense,
    FP16,
    BF16,
    TopK,
    GaussianK,
    RandomK,
    Threshold,
    RandomBlock,
    QSGD,
    PowerSGD,
)

__all__ = [
    "BF16",
    "BUILT_IN",
    "FP16",
    "QSGD",
    "Dense",
    "GaussianK",
    "PowerSGD",
    "RandomBlock",
    "RandomK",
    "Threshold",
    "TopK",
]
