"""The methods, one file each. A new one is a file here and a line below."""

from thinwire.exchange import Exchange
from thinwire.methods.dense import BF16, FP16, Dense
from thinwire.methods.powersgd import PowerSGD
from thinwire.methods.qsgd import QSGD
from thinwire.methods.randomblock import RandomBlock
from thinwire.methods.topk import TopK

BUILT_IN: tuple[type[Exchange], ...] = (Dense, FP16, BF16, TopK, RandomBlock, QSGD, PowerSGD)

__all__ = ["BF16", "BUILT_IN", "FP16", "QSGD", "Dense", "PowerSGD", "RandomBlock", "TopK"]
