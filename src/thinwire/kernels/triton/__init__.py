"""Kernels for GPUs, one module per family, with the signatures of the reference: written in Triton, or the
reference's steps compiled by `torch.compile` where every entry stands for itself.

Random numbers, codes and selections are the same bits as on the CPU; sums in double precision may differ in
their last bits. Importing a family imports Triton, which is the extra `thinwire[gpu]`; without it, every
device but the CPU takes the reference. These kernels have been interpreted and compiled, not yet run on a
device. They assume little-endian words and tensors of less than 2^31 entries.
"""

from importlib.util import find_spec

_ALL = (
    "selection",
    "feedback",
    "chunks",
    "gaussian",
    "scatter",
    "gspar",
    "sketch",
    "indices",
    "quantisation",
    "ternary",
    "sign",
    "natural",
    "laq",
    "a2sgd",
    "finite",
    "scalecom",
)

FAMILIES: tuple[str, ...] = _ALL if find_spec("triton") else ()
"""The families that there are kernels for; the dispatcher takes the reference for others."""
