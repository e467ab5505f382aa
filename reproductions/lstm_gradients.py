"""The gradients of many workers that share an LSTM, in one pass through time.

`torch.func.vmap` has no rule for `nn.LSTM` and goes through it worker by worker; here the passes are written
out.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from thinwire.tools.workloads.models import LstmLanguageModel

Tensor = torch.Tensor


class _Layer:
    """One layer over a sequence of shape (time, rows, features); remembers what its gradients need."""

    def __init__(self, model: LstmLanguageModel, number: int) -> None:
        self.names = [f"{kind}_l{number}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        self.into, self.back, *biases = (getattr(model.lstm, name).detach() for name in self.names)
        self.bias = biases[0] + biases[1]

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        self.gates = functional.linear(x, self.into, self.bias)
        length, rows, width = *x.shape[:2], self.back.shape[1]
        self.hidden = x.new_zeros(length + 1, rows, width)
        self.cells = x.new_zeros(length + 1, rows, width)
        for t in range(length):
            gates = self.gates[t].addmm_(self.hidden[t], self.back.T)
            gates[:, : 2 * width].sigmoid_()
            gates[:, 2 * width : 3 * width].tanh_()
            gates[:, 3 * width :].sigmoid_()
            i, f, g, o = gates.chunk(4, 1)
            torch.mul(f, self.cells[t], out=self.cells[t + 1]).addcmul_(i, g)
            torch.tanh(self.cells[t + 1], out=self.hidden[t + 1]).mul_(o)
        return self.hidden[1:]

    def backward(self, slope: Tensor) -> Tensor:
        """From the slope of its output to that of its input; leaves that of the gates in `self.slopes`."""
        self.slopes = torch.empty_like(self.gates)
        of_hidden = torch.zeros_like(slope[0])
        of_cell = torch.zeros_like(slope[0])
        for t in reversed(range(len(slope))):
            i, f, g, o = self.gates[t].chunk(4, 1)
            di, df, dg, do = self.slopes[t].chunk(4, 1)
            of_hidden += slope[t]
            squashed = self.cells[t + 1].tanh()
            torch.mul(of_hidden, squashed, out=do).mul_(o).mul_(1 - o)
            of_cell += of_hidden.mul_(o).mul_(1 - squashed.square_())
            torch.mul(of_cell, g, out=di).mul_(i).mul_(1 - i)
            torch.mul(of_cell, self.cells[t], out=df).mul_(f).mul_(1 - f)
            torch.mul(of_cell, i, out=dg).mul_(1 - g.square())
            of_cell *= f
            torch.mm(self.slopes[t], self.back, out=of_hidden)
        return self.slopes @ self.into

    def gradients(self, workers: int) -> dict[str, Tensor]:
        slopes = _by_worker(self.slopes, workers).transpose(1, 2)
        bias = slopes.sum(2)
        found = (
            slopes @ _by_worker(self.x, workers),
            slopes @ _by_worker(self.hidden[:-1], workers),
            bias,
            bias.clone(),
        )
        return {f"lstm.{name}": own for name, own in zip(self.names, found, strict=True)}


def _by_worker(sequence: Tensor, workers: int) -> Tensor:
    """From (time, rows, features) to (workers, all of a worker's, features)."""
    length, rows, features = sequence.shape
    split = sequence.reshape(length, workers, rows // workers, features)
    return split.transpose(0, 1).reshape(workers, -1, features)


@torch.no_grad()
def lstm_gradients(
    model: LstmLanguageModel, inputs: Tensor, targets: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients and losses of all workers, each the mean over its own rows; shapes (workers, rows, time)."""
    workers = len(inputs)
    symbols = inputs.flatten(0, 1).T
    layers = [_Layer(model, number) for number in range(model.lstm.num_layers)]
    hidden = functional.embedding(symbols, model.embedding.weight)
    for layer in layers:
        hidden = layer.forward(hidden)
    logarithms = functional.log_softmax(model.head(hidden), 2)
    wanted = targets.flatten(0, 1).T.unsqueeze(2)
    losses = -_by_worker(logarithms.gather(2, wanted), workers).mean((1, 2))
    slope = logarithms.exp_()
    slope.scatter_add_(2, wanted, slope.new_full(wanted.shape, -1.0)).div_(targets[0].numel())
    of_head = _by_worker(slope, workers).transpose(1, 2)
    found = {"head.weight": of_head @ _by_worker(hidden, workers), "head.bias": of_head.sum(2)}
    slope = slope @ model.head.weight
    for layer in reversed(layers):
        slope = layer.backward(slope)
        found |= layer.gradients(workers)
    of_symbols = _by_worker(slope, workers)
    known, width = model.embedding.weight.shape
    where = _by_worker(symbols.unsqueeze(2), workers).expand(-1, -1, width)
    found["embedding.weight"] = of_symbols.new_zeros(workers, known, width).scatter_add_(1, where, of_symbols)
    return {name: found[name] for name, _ in model.named_parameters()}, losses
