"""ScaleCom's rates by layer: those with little arithmetic per gradient entry are compressed most."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from thinwire.core import Exchange, checks
from thinwire.errors import ConfigError
from thinwire.methods.dense import Dense
from thinwire.methods.route import Route
from thinwire.methods.scalecom import ScaleCom

RATES = ((196, 25), (128, 50), (0, 400))
"""From this many multiply-adds per sample and gradient entry on, the rate, as in the paper."""
LEAST_BETA = 0.1


def multiply_adds_per_entry(model: torch.nn.Module, *inputs: Any) -> dict[str, float]:
    """For each weight of two or more dimensions: its layer's multiply-adds per sample over its entries.

    Args:
        model: the model, not wrapped in DistributedDataParallel.
        inputs: one batch; its first tensor has a row per sample.
    """
    samples = next((len(each) for each in inputs if isinstance(each, torch.Tensor)), 1)
    counter = FlopCounterMode(display=False)
    training = model.training
    model.eval()  # batch-norm statistics must not change
    with torch.no_grad(), counter:
        model(*inputs)
    model.train(training)
    counts = {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    root = type(model).__name__
    found: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            layer = name.rpartition(".")[0]
            flops = counts.get(f"{root}.{layer}" if layer else root, 0)
            found[name] = flops / 2 / samples / parameter.numel()
    return found


def scalecom_by_layer(
    model: torch.nn.Module,
    *inputs: Any,
    beta: float = 1.0,
    ends: Literal["dense", "compressed"] = "dense",
) -> Route:
    """ScaleCom with the paper's rate for each layer, as a `route`.

        method = scalecom_by_layer(model, images)
        session = thinwire.attach(DistributedDataParallel(model), method)

    A layer with at least 196 multiply-adds per sample and gradient entry is compressed 25 times, with at
    least 128 it is 50 times, with fewer 400 times. A convolution has one for each position of its output.

    Args:
        model: the model, not wrapped in DistributedDataParallel.
        inputs: one batch, to count the arithmetic of every layer; a forward pass in evaluation mode.
        beta: of `scalecom`; `beta_for` chooses it by the batch.
        ends: "dense" leaves the first and the last layer uncompressed.
    """
    checks.one_of("scalecom_by_layer", "ends", ends, ("dense", "compressed"))
    arithmetic = multiply_adds_per_entry(model, *inputs)
    if not arithmetic:
        raise ConfigError("scalecom_by_layer: the model has no weight of two or more dimensions")
    rules: list[tuple[str, Exchange]] = []
    names = list(arithmetic)
    for name in names:
        if ends == "dense" and name in (names[0], names[-1]):
            rules.append((name, Dense()))
            continue
        rate = next(rate for least, rate in RATES if arithmetic[name] >= least)
        rules.append((name, ScaleCom(ratio=1 / rate, beta=beta)))
    return Route(Dense(), tuple(rules))


def beta_for(batch: int, usual: int) -> float:
    """The low-pass filter of ScaleCom for a global batch, where `usual` is a common batch for the task.

    1 up to the usual batch, then in inverse proportion to it, and at least 0.1, the paper's value for large
    batches.
    """
    checks.whole("beta_for", "batch", batch, 1)
    checks.whole("beta_for", "usual", usual, 1)
    return max(LEAST_BETA, min(1.0, round(usual / batch, 2)))
