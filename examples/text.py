"""A small character transformer, trained with compressed gradients; "auto" picks the method.

    torchrun --standalone --nproc-per-node 2 examples/text.py
    torchrun --standalone --nproc-per-node 2 examples/text.py --text FILE --method "adam(warmup=50)"

Without --text it learns sums such as "17+25=42.", which are generated here.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire

WINDOW = 64


def sums(count: int = 20_000) -> str:
    rng = torch.Generator().manual_seed(0)
    pairs = torch.randint(50, (count, 2), generator=rng).tolist()
    return "".join(f"{a}+{b}={a + b}." for a, b in pairs)


class Characters(nn.Module):
    """Predicts each character from those before it."""

    def __init__(self, symbols: int, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.position = nn.Embedding(WINDOW, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, symbols)
        self.register_buffer("future", torch.ones(WINDOW, WINDOW, dtype=torch.bool).triu(1))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.symbol(text) + self.position(torch.arange(text.shape[1]))
        return self.head(self.body(x, mask=self.future))


def perplexity(losses: list[float]) -> float:
    """Of the last 50 batches; each of them is new to the model when its loss is computed."""
    return math.exp(sum(losses[-50:]) / len(losses[-50:]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--text", type=Path, default=None)
    parser.add_argument("--method", default="auto")
    arguments = parser.parse_args()

    text = sums() if arguments.text is None else arguments.text.read_text()
    symbols = sorted(set(text))
    if len(text) <= WINDOW + 1:
        parser.error(f"the text has {len(text)} characters; {WINDOW + 2} or more are needed")
    number = {symbol: index for index, symbol in enumerate(symbols)}
    characters = torch.tensor([number[symbol] for symbol in text])

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Characters(len(symbols)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    session = thinwire.attach(model, arguments.method, optimizer=optimizer)

    rng = torch.Generator().manual_seed(1 + dist.get_rank())
    losses: list[float] = []
    for step in range(arguments.steps):
        begins = torch.randint(len(text) - WINDOW - 1, (arguments.batch, 1), generator=rng)
        window = characters[begins + torch.arange(WINDOW + 1)]
        optimizer.zero_grad()
        guesses = model(window[:, :-1])
        loss = cross_entropy(guesses.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: perplexity {perplexity(losses):.2f}")

    if dist.get_rank() == 0:
        meter = session.meter
        print(f"perplexity {perplexity(losses):.2f} of {len(symbols)} symbols with {session.method}")
        sent = meter.sent_bytes / meter.steps
        print(f"{sent:,.0f} bytes sent per step; the gradient has {session.dense_bytes:,} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
