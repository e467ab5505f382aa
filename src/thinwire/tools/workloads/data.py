"""Datasets: digits that come with this package, made-up texts, and files of others that a user has.

    load("digits")       load("mnist:DIR")    load("cifar10:DIR")
    load("synthetic")    load("text:FILE")    characters
    load("words")        load("words:FILE")   words

Nothing in a file is believed before it is checked: a file that does not fit is a ConfigError.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch

from thinwire.errors import ConfigError

CONTEXT = 64
"""Characters of text that a model sees at once."""
WORDS = 35
"""Words that a model sees at once, as in most work on the Penn Treebank."""
VOCABULARY = 10_000
"""The most frequent words of a text are symbols of their own, all others share the last one."""


@dataclass(frozen=True)
class Dataset:
    """Inputs and targets for training and for the test.

    For images: float inputs of one shape (channels, height, width), integer labels. For text: rows of
    `CONTEXT` characters or `WORDS` words, and the same rows one symbol later.
    """

    name: str
    kind: Literal["images", "text"]
    inputs: torch.Tensor
    targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.inputs.shape[1:])

    def to(self, device: torch.device) -> Dataset:
        """The same data on this device."""
        tensors = {
            name: cast(torch.Tensor, getattr(self, name)).to(device)
            for name in ("inputs", "targets", "test_inputs", "test_targets")
        }
        return replace(self, **tensors)

    def batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[rows], self.targets[rows]


def load(spec: str) -> Dataset:
    """The dataset of a specification like `digits` or `mnist:DIR`."""
    name, colon, place = spec.partition(":")
    embedded: dict[str, Callable[[], Dataset]] = {
        "digits": digits,
        "synthetic": synthetic,
        "words": synthetic_words,
    }
    if name in embedded and not colon:
        return embedded[name]()
    readers: dict[str, Callable[[Path], Dataset]] = {
        "mnist": mnist,
        "cifar10": cifar10,
        "text": text,
        "words": words,
    }
    if name not in readers or not place:
        known = "digits, synthetic, words, mnist:DIR, cifar10:DIR, text:FILE or words:FILE"
        raise ConfigError(f"data is {known}, not {spec!r}")
    return readers[name](Path(place))


def digits() -> Dataset:
    """1,797 images of 8 x 8 pixels (see `digits.txt`); every fifth is for the test."""
    with as_file(files("thinwire.tools.workloads").joinpath("digits.npz")) as path:
        arrays = _npz(path, ("images", "labels"))
    images = torch.from_numpy(arrays["images"]).to(torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(arrays["labels"]).to(torch.int64)
    test = torch.arange(len(images)) % 5 == 0
    return Dataset("digits", "images", images[~test], labels[~test], images[test], labels[test], 10)


def mnist(folder: Path) -> Dataset:
    """The four official files, gzipped or not; 60,000 + 10,000 images of 28 x 28."""
    parts: list[torch.Tensor] = []
    for part in ("train", "t10k"):
        images = _idx(folder, f"{part}-images-idx3-ubyte", 3)
        labels = _idx(folder, f"{part}-labels-idx1-ubyte", 1)
        if len(images) != len(labels):
            raise ConfigError(f"{folder}: {len(images)} {part} images have {len(labels)} labels")
        scaled = (images[:, None].astype(np.float32) / 255 - 0.1307) / 0.3081
        parts += [torch.from_numpy(scaled), torch.from_numpy(labels.astype(np.int64))]
    return Dataset("mnist", "images", *parts, classes=10)


def _idx(folder: Path, name: str, dimensions: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    raw = _read(folder, name)
    begin = 4 + 4 * dimensions
    if len(raw) < begin or raw[:4] != bytes((0, 0, 8, dimensions)):
        raise ConfigError(f"{folder / name}: not an IDX file of {dimensions} dimensions of bytes")
    shape = struct.unpack(f">{dimensions}I", raw[4:begin])
    found = np.frombuffer(raw, np.uint8, offset=begin)
    if found.size != int(np.prod(shape, dtype=np.int64)):
        raise ConfigError(f"{folder / name}: {found.size} bytes for a shape of {shape}")
    return found.reshape(shape)


def cifar10(folder: Path) -> Dataset:
    """`data_batch_*.npz` and `test_batch.npz` with `images` (uint8, NHWC) and `labels`."""
    batches = sorted(folder.glob("data_batch_*.npz"))
    if not batches:
        raise ConfigError(f"{folder}: there is no data_batch_1.npz")
    train = [_images(path) for path in batches]
    test_images, test_labels = _images(folder / "test_batch.npz")
    return Dataset(
        "cifar10",
        "images",
        torch.cat([images for images, _ in train]),
        torch.cat([labels for _, labels in train]),
        test_images,
        test_labels,
        classes=10,
    )


def _images(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = _npz(path, ("images", "labels"))
    images, labels = arrays["images"], arrays["labels"]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (32, 32, 3):
        raise ConfigError(
            f"{path}: images must be uint8 of n x 32 x 32 x 3, not {images.dtype} {images.shape}"
        )
    if labels.shape != (len(images),) or labels.min(initial=0) < 0 or labels.max(initial=0) > 9:
        raise ConfigError(f"{path}: labels must be one number from 0 to 9 for each image")
    mean = np.array((0.4914, 0.4822, 0.4465), np.float32)
    deviation = np.array((0.2470, 0.2435, 0.2616), np.float32)
    scaled = (images.astype(np.float32) / 255 - mean) / deviation
    return torch.from_numpy(scaled).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(
        labels.astype(np.int64)
    )


def text(path: Path) -> Dataset:
    """A text, plain or compressed (.xz, .gz, .bz2), character by character; the last tenth is the test."""
    content = _decoded(path)
    if len(content) < 20 * CONTEXT:
        raise ConfigError(f"{path}: a text of {20 * CONTEXT} characters or more is needed")
    return _characters("text", content)


def words(path: Path) -> Dataset:
    """The same, word by word: what white space separates, and the ends of lines."""
    content = _decoded(path).replace("\n", " <eos> ").split()
    if len(content) < 20 * WORDS:
        raise ConfigError(f"{path}: a text of {20 * WORDS} words or more is needed")
    frequent = [word for word, _ in Counter(content).most_common(VOCABULARY - 1)]
    code = {word: number for number, word in enumerate(frequent)}
    symbols = torch.tensor([code.get(word, len(frequent)) for word in content])
    return _text("words", symbols, WORDS, len(frequent) + 1)


def _decoded(path: Path) -> str:
    try:
        return _read(path.parent, path.name).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text in UTF-8") from None


def synthetic() -> Dataset:
    """A text of made-up words, character by character."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfw"))
    lexicon = ["".join(rng.choice(letters, length)) for length in rng.integers(2, 8, 500)]
    return _characters("synthetic", " ".join(lexicon[word] for word in _chain(rng, len(lexicon))))


def synthetic_words() -> Dataset:
    """A text of made-up words, word by word, with the vocabulary of the Penn Treebank."""
    return _text("words", torch.tensor(_chain(np.random.default_rng(0), VOCABULARY)), WORDS, VOCABULARY)


def _chain(rng: np.random.Generator, lexicon: int, words: int = 20_000) -> list[int]:
    """Words whose frequencies follow Zipf's law; each has a few likely successors."""
    zipf = 1 / np.arange(1, lexicon + 1)
    successors = rng.choice(lexicon, (lexicon, 4), p=zipf / zipf.sum())
    drawn = rng.choice(lexicon, words, p=zipf / zipf.sum())
    follows, which = rng.random(words) < 0.7, rng.integers(0, 4, words)
    chain = [int(drawn[0])]
    for number in range(1, words):
        likely = successors[chain[-1], which[number]]
        chain.append(int(likely if follows[number] else drawn[number]))
    return chain


def _characters(name: str, content: str) -> Dataset:
    alphabet = sorted(set(content))
    code = {symbol: number for number, symbol in enumerate(alphabet)}
    return _text(name, torch.tensor([code[symbol] for symbol in content]), CONTEXT, len(alphabet))


def _text(name: str, symbols: torch.Tensor, length: int, classes: int) -> Dataset:
    """The last tenth is the test."""
    cut = len(symbols) * 9 // 10
    train, test = _rows(symbols[:cut], length), _rows(symbols[cut:], length)
    return Dataset(name, "text", *train, *test, classes=classes)


def _rows(symbols: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = (len(symbols) - 1) // length
    inputs = symbols[: count * length].view(count, length)
    return inputs, symbols[1 : count * length + 1].view(count, length)


def lag(data: Path, name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """One of the six sets of the LAG paper: features and labels, as its authors scaled them."""
    arrays = _npz(data / "lag" / f"{name}.npz", ("X", "y"))
    return arrays["X"].astype(np.float64), arrays["y"].astype(np.float64)


_OPENERS: dict[str, Callable[[Path], Any]] = {
    "": lambda path: path.open("rb"),
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}


def find(folder: Path, name: str) -> Path:
    """The file of this name, plain or compressed."""
    for suffix in _OPENERS:
        path = folder / f"{name}{suffix}"
        if path.is_file():
            return path
    raise ConfigError(f"there is no file {folder / name} (nor one with .gz, .bz2 or .xz)")


def _read(folder: Path, name: str) -> bytes:
    path = find(folder, name)
    opener = _OPENERS.get(path.suffix, _OPENERS[""])
    try:
        with opener(path) as file:
            return file.read()
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _npz(path: Path, keys: tuple[str, ...]) -> dict[str, np.ndarray[Any, Any]]:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        with np.load(path, allow_pickle=False) as found:
            return {key: found[key] for key in keys}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: not an npz file with {' and '.join(keys)}: {error}") from None
