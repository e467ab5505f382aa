"""CPU kernels compiled by Numba, one module per family, with the signatures of the reference.

Importing a family imports Numba; nothing is compiled before the first call, or before `warm`.
"""

from importlib import import_module

FAMILIES = (
    "finite",
    "selection",
    "feedback",
    "chunks",
    "gaussian",
    "scatter",
    "quantisation",
    "laq",
    "sign",
    "sign_feedback",
    "ternary",
    "natural",
    "gspar",
    "a2sgd",
    "adam",
    "scalecom",
    "sketch",
    "indices",
    "rotation",
    "dct",
    "grid",
    "linear",
    "hogwild",
)


def warm(family: str) -> None:
    """Compile one family (or load it from the cache) by running it on small inputs."""
    import_module(f"thinwire.kernels.cpu.{family}").warm()
