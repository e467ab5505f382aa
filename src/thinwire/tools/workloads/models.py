"""Models of the usual kinds, small enough for a laptop; weights depend on the seed alone."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import nn
from torch.nn import functional

from thinwire.errors import ConfigError
from thinwire.tools.workloads.data import CONTEXT, Dataset

MODELS = ("logistic", "mlp", "cnn", "resnet20", "lstm", "transformer")
TEXT_MODELS = ("lstm", "transformer")
FIXED_MODELS = ("logistic", "resnet20")
HEAD = 32
"""The width of a head of `transformer`."""


def build(name: str, data: Dataset, seed: int, hidden: tuple[int, ...] = ()) -> nn.Module:
    """A model for this data; the global generator is left as it was.

    Args:
        name: one of `MODELS`.
        data: what it is to learn.
        seed: of the weights.
        hidden: widths of the hidden layers of `mlp`; 1024, 1024 by default (256, 256 for digits). Or of the
            layers of `lstm`, all equal, and of its embedding; 256, 256 and 64 by default. Or of the layers
            of `transformer`, all equal; 128, 128 by default. Or the channels of the three convolutions of
            `cnn`, and the width of its hidden layer; 32, 64, 64, 128 by default.
    """
    makers: dict[str, tuple[str, Callable[[], nn.Module]]] = {
        "logistic": ("images", lambda: logistic(data)),
        "mlp": ("images", lambda: mlp(data, hidden)),
        "cnn": ("images", lambda: cnn(data, hidden)),
        "resnet20": ("images", lambda: ResNet20(data.shape[0], data.classes)),
        "lstm": ("text", lambda: lstm(data, hidden)),
        "transformer": ("text", lambda: transformer(data, hidden)),
    }
    if name not in makers:
        raise ConfigError(f"models are {', '.join(MODELS)}, not {name!r}")
    kind, make = makers[name]
    if kind != data.kind:
        other = "synthetic, words or text:FILE" if kind == "text" else "digits, mnist:DIR or cifar10:DIR"
        raise ConfigError(f"{name} learns {kind}, but {data.name} is {data.kind}: give --data {other}")
    if hidden and name in FIXED_MODELS:
        raise ConfigError(f"{name} has no widths to choose: leave out {', '.join(map(str, hidden))}")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return make()


def loss(data: Dataset, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, over symbols or images."""
    return functional.cross_entropy(outputs.reshape(-1, data.classes), targets.reshape(-1))


@torch.no_grad()
def evaluate(model: nn.Module, data: Dataset, rows: int = 0, batch: int = 512) -> tuple[float, float]:
    """Loss and accuracy on the test data (its first `rows`, if given)."""
    was_training = model.training
    model.eval()
    rows = min(rows or len(data.test_inputs), len(data.test_inputs))
    total = right = 0.0
    for begin in range(0, rows, batch):
        targets = data.test_targets[begin : min(begin + batch, rows)]
        outputs = model(data.test_inputs[begin : begin + len(targets)])
        total += float(loss(data, outputs, targets)) * len(targets)
        right += float((outputs.argmax(-1) == targets).float().mean()) * len(targets)
    model.train(was_training)
    return total / rows, right / rows


def logistic(data: Dataset) -> nn.Module:
    """Multinomial logistic regression: one linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(data.shape), data.classes))


def mlp(data: Dataset, hidden: tuple[int, ...] = ()) -> nn.Module:
    widths = hidden or ((256, 256) if data.name == "digits" else (1024, 1024))
    layers: list[nn.Module] = [nn.Flatten()]
    before = prod(data.shape)
    for width in widths:
        layers += [nn.Linear(before, width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, data.classes))


def cnn(data: Dataset, hidden: tuple[int, ...] = ()) -> nn.Module:
    """Three convolutions, two of them followed by pooling, and a hidden layer."""
    channels, height, width = data.shape
    widths = hidden or (32, 64, 64, 128)
    if len(widths) != 4:
        raise ConfigError(f"cnn has three convolutions and a hidden layer: give 4 widths, not {len(widths)}")
    first, second, third, last = widths
    return nn.Sequential(
        nn.Conv2d(channels, first, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(second, third, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(third * (height // 4) * (width // 4), last),
        nn.ReLU(),
        nn.Linear(last, data.classes),
    )


class _Block(nn.Module):
    """Two convolutions around which the input is led; with fewer columns and more channels, by padding."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self.stride = 1 if before == channels else 2
        self.first = nn.Conv2d(before, channels, 3, self.stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.more = channels - before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        around = x[:, :, :: self.stride, :: self.stride]
        return functional.relu(y + functional.pad(around, (0, 0, 0, 0, 0, self.more)))


class ResNet20(nn.Module):
    """The residual network of 20 layers for small images (He et al., 2016): 0.27 M parameters."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        blocks = [_Block(16, 16) for _ in range(3)]
        blocks += [_Block(16, 32), _Block(32, 32), _Block(32, 32)]
        blocks += [_Block(32, 64), _Block(64, 64), _Block(64, 64)]
        self.stem = nn.Sequential(nn.Conv2d(channels, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def lstm(data: Dataset, hidden: tuple[int, ...] = ()) -> nn.Module:
    """With 1500, 1500 and the vocabulary of the Penn Treebank it has 66 M parameters."""
    _check_equal("lstm", hidden)
    if not hidden:
        return LstmLanguageModel(data.classes)
    return LstmLanguageModel(data.classes, hidden[0], len(hidden), embedding=hidden[0])


def transformer(data: Dataset, hidden: tuple[int, ...] = ()) -> nn.Module:
    """With 192, 192, 192, 192 it has 1.8 M parameters, with six times 384 it has 10.7 M."""
    _check_equal("transformer", hidden)
    widths = hidden or (128, 128)
    if widths[0] % HEAD:
        raise ConfigError(f"the heads of transformer are {HEAD} wide: {widths[0]} is not a multiple")
    return CharTransformer(data.classes, widths[0], len(widths), widths[0] // HEAD)


def _check_equal(name: str, hidden: tuple[int, ...]) -> None:
    if len(set(hidden)) > 1:
        raise ConfigError(f"the layers of {name} are equally wide, not {', '.join(map(str, hidden))}")


class LstmLanguageModel(nn.Module):
    """Layers of LSTM that predict the next symbol.

    Args:
        symbols: how many there are, such as characters or words.
        width: of each layer.
        layers: of LSTM.
        embedding: the width of a symbol's vector.
    """

    def __init__(self, symbols: int, width: int = 256, layers: int = 2, embedding: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, embedding)
        self.lstm = nn.LSTM(embedding, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


class CharTransformer(nn.Module):
    """A small causal transformer over characters."""

    def __init__(self, symbols: int, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        hidden = self.embedding(x) + self.position[:length]
        return self.head(self.norm(self.encoder(hidden, mask=later, is_causal=True)))
