"""ScaleCom's rates by layer: those with little arithmetic per gradient entry are compressed most."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from thinwire.core import Exchange, checks
from thinwire.errors import ConfigError
from thinwire.methods.dense import Dense
from thinwire.methods.route import Route
from thinwire.methods.scalecom import ScaleCom

RATES = ((196, 25), (128, 50), (0, 400))
"""From this many multiply-adds per sample and gradient entry on, the rate, as in the paper."""
LEAST_BETA = 0.1


class _Arithmetic(TorchDispatchMode):
    """Counts the multiply-adds of every operation for the parameter that it reads, in the order of use."""

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        # Views of a parameter, such as its transpose, have its storage.
        self._names = {p.untyped_storage().data_ptr(): name for name, p in parameters}
        self.found: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        flops = 0 if formula is None else formula(*args, **(kwargs or {}), out_val=out)
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                name = self._names.get(tensor.untyped_storage().data_ptr())
                if name is not None:
                    self.found[name] = self.found.get(name, 0) + flops // 2
        return out


@contextmanager
def _unfused() -> Generator[None]:
    """Fused layers of transformers and LSTMs would hide their arithmetic."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's flags warn of a precision that is not touched
            with torch.backends.mkldnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def multiply_adds_per_entry(model: torch.nn.Module, *inputs: Any) -> dict[str, float]:
    """For each weight of two or more dimensions: the multiply-adds per sample over its entries.

    Weights are in the order in which the model uses them. Those that it does not use are left out.

    Args:
        model: the model, not wrapped in DistributedDataParallel.
        inputs: one batch; its first tensor has a row per sample.
    """
    samples = next((len(each) for each in inputs if isinstance(each, torch.Tensor)), 1)
    weights = {name: p for name, p in model.named_parameters() if p.dim() >= 2}
    counter = _Arithmetic(weights.items())
    training = model.training
    model.eval()  # batch-norm statistics must not change
    try:
        with torch.no_grad(), _unfused(), counter:
            model(*inputs)
    finally:
        model.train(training)
    return {name: count / samples / weights[name].numel() for name, count in counter.found.items()}


def scalecom_by_layer(
    model: torch.nn.Module,
    *inputs: Any,
    beta: float = 1.0,
    dense_first: bool = True,
    dense_last: bool = True,
) -> Route:
    """ScaleCom with the paper's rate for each layer, as a `route`.

        method = scalecom_by_layer(model, images)
        session = thinwire.attach(DistributedDataParallel(model), method, optimizer=optimizer)

    A layer with at least 196 multiply-adds per sample and gradient entry is compressed 25 times, with at
    least 128 it is 50 times, with fewer 400 times. A convolution has one for each position of its output, a
    linear or recurrent layer one for each position of a sequence. Biases and other vectors are dense. The
    text of the result, `str(method)`, is a method string for the command line.

    Args:
        model: the model, not wrapped in DistributedDataParallel.
        inputs: one batch, to count the arithmetic of every layer; a forward pass in evaluation mode.
        beta: of `scalecom`; `beta_for` chooses it by the batch.
        dense_first: leave the layer that the model uses first uncompressed.
        dense_last: and the last one.
    """
    checks.flag("scalecom_by_layer", "dense_first", dense_first)
    checks.flag("scalecom_by_layer", "dense_last", dense_last)
    arithmetic = multiply_adds_per_entry(model, *inputs)
    if not arithmetic:
        raise ConfigError("scalecom_by_layer: the model has no weight of two or more dimensions")
    names = list(arithmetic)
    dense = {names[0]} if dense_first else set[str]()
    dense |= {names[-1]} if dense_last else set()
    rules: list[tuple[str, Exchange]] = []
    for name in names:
        rate = next(rate for least, rate in RATES if arithmetic[name] >= least)
        rules.append((name, Dense() if name in dense else ScaleCom(ratio=1 / rate, beta=beta)))
    return Route(Dense(), tuple(rules))


def beta_for(batch: int, usual: int) -> float:
    """The low-pass filter of ScaleCom for a global batch, where `usual` is a common batch for the task.

    1 up to the usual batch, then in inverse proportion to it, and at least 0.1, the paper's value for large
    batches.
    """
    checks.whole("beta_for", "batch", batch, 1)
    checks.whole("beta_for", "usual", usual, 1)
    return max(LEAST_BETA, min(1.0, round(usual / batch, 2)))
