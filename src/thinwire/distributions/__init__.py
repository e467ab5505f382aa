"""Learning discrete distributions with few bits, from samples that are spread over many servers.

    from thinwire.distributions import learn

    answer = learn(shards, domain=4096, bits=4)
    answer.p, answer.error, answer.bits, answer.reason

Every protocol is a class with `encode(samples, rng) -> messages`, `estimate(messages) -> p`,
`bits_per_message` and `expected_l2(p, n)`. Importing this package imports Numba; `import thinwire` does not.
"""

from thinwire.distributions.cells import CellCounts, QuantileCells
from thinwire.distributions.counts import ExactCounts, crossover
from thinwire.distributions.finish import Estimate
from thinwire.distributions.grouping import Grouping
from thinwire.distributions.haar import HaarSketch
from thinwire.distributions.hadamard_response import HadamardResponse, OneBitHadamard
from thinwire.distributions.hashing import PublicHash
from thinwire.distributions.learn import learn, learning
from thinwire.distributions.monotone import Monotone
from thinwire.distributions.protocol import Messages, Protocol, Sums
from thinwire.distributions.raw import Raw
from thinwire.distributions.recursive_hadamard import RecursiveHadamard
from thinwire.distributions.simplex import onto_simplex
from thinwire.distributions.simulate import SimulateAndInfer
from thinwire.distributions.spec import LearningSpec
from thinwire.distributions.tables import BlackboardCounts, Board, OneWayCounts, QuantisedCounts

__all__ = [
    "BlackboardCounts",
    "Board",
    "CellCounts",
    "Estimate",
    "ExactCounts",
    "Grouping",
    "HaarSketch",
    "HadamardResponse",
    "LearningSpec",
    "Messages",
    "Monotone",
    "OneBitHadamard",
    "OneWayCounts",
    "Protocol",
    "PublicHash",
    "QuantileCells",
    "QuantisedCounts",
    "Raw",
    "RecursiveHadamard",
    "SimulateAndInfer",
    "Sums",
    "crossover",
    "learn",
    "learning",
    "onto_simplex",
]
