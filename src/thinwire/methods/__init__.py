"""The methods, one file each. A new one is a file here and a line in `registry.py`."""

from thinwire.methods.a2sgd import A2SGD
from thinwire.methods.adam import Adam
from thinwire.methods.delayed import Delayed
from thinwire.methods.demo import DeMo
from thinwire.methods.dense import Dense
from thinwire.methods.dgc import DGC
from thinwire.methods.ef21 import EF21
from thinwire.methods.efsign import EFSign
from thinwire.methods.gaussiank import GaussianK
from thinwire.methods.gspar import GSpar
from thinwire.methods.half import BF16, FP16
from thinwire.methods.heavyball import HeavyBall
from thinwire.methods.hierarchical import Hierarchical
from thinwire.methods.lag import LAG
from thinwire.methods.laq import LAQ
from thinwire.methods.lasg import LASG
from thinwire.methods.natural import Natural
from thinwire.methods.onebit import OneBit
from thinwire.methods.powersgd import PowerSGD
from thinwire.methods.qsgd import QSGD
from thinwire.methods.randomblock import RandomBlock
from thinwire.methods.randomk import RandomK
from thinwire.methods.route import Route
from thinwire.methods.scalecom import ScaleCom
from thinwire.methods.signsgd import SignSGD
from thinwire.methods.sketched import Sketched
from thinwire.methods.slaq import SLAQ
from thinwire.methods.terngrad import TernGrad
from thinwire.methods.threshold import Threshold
from thinwire.methods.topk import TopK
from thinwire.methods.warmup import Warmup

__all__ = [
    "A2SGD",
    "BF16",
    "DGC",
    "EF21",
    "FP16",
    "LAG",
    "LAQ",
    "LASG",
    "QSGD",
    "SLAQ",
    "Adam",
    "DeMo",
    "Delayed",
    "Dense",
    "EFSign",
    "GSpar",
    "GaussianK",
    "HeavyBall",
    "Hierarchical",
    "Natural",
    "OneBit",
    "PowerSGD",
    "RandomBlock",
    "RandomK",
    "Route",
    "ScaleCom",
    "SignSGD",
    "Sketched",
    "TernGrad",
    "Threshold",
    "TopK",
    "Warmup",
]
