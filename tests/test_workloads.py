"""Datasets and models: what fits, and files that do not."""

import gzip
import struct
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.tools.workloads import MODELS, build, load
from thinwire.tools.workloads.models import TEXT_MODELS, LstmLanguageModel, evaluate, loss


def _idx(values: np.ndarray) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


@pytest.fixture
def mnist_folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for part, count in (("train", 20), ("t10k", 6)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(_idx(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(_idx(labels))
    return tmp_path


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("all work and no play makes a dull day. " * 60)
    return path


def test_the_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    found = datasets.load_digits()
    images = torch.tensor(found.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(found.target)
    test = torch.arange(len(images)) % 5 == 0
    data = load("digits")
    assert torch.equal(data.inputs, images[~test])
    assert torch.equal(data.targets, labels[~test])
    assert torch.equal(data.test_inputs, images[test])
    assert torch.equal(data.test_targets, labels[test])


def test_the_digits_state_their_origin_and_licence() -> None:
    text = files("thinwire.tools.workloads").joinpath("digits.txt").read_text()
    for words in ("Optical Recognition of Handwritten Digits", "Alpaydin", "Kaynak", "CC BY 4.0"):
        assert words in text


def test_mnist_files_gzipped_or_not(mnist_folder: Path) -> None:
    data = load(f"mnist:{mnist_folder}")
    assert data.inputs.shape == (20, 1, 28, 28)
    assert data.test_targets.shape == (6,)


def test_cut_and_foreign_files_are_named(mnist_folder: Path) -> None:
    path = mnist_folder / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(gzip.compress(gzip.decompress(whole)[:-5]))
    with pytest.raises(ConfigError, match="train-images"):
        load(f"mnist:{mnist_folder}")
    path.write_bytes(whole[:100])
    with pytest.raises(ConfigError, match="cannot be read"):
        load(f"mnist:{mnist_folder}")
    path.write_bytes(gzip.compress(b"something else"))
    with pytest.raises(ConfigError, match="not an IDX file"):
        load(f"mnist:{mnist_folder}")


@pytest.mark.parametrize(
    "spec",
    [
        "mnist:nowhere",
        "cifar10:nowhere",
        "text:nowhere.txt",
        "digits:x",
        "synthetic:x",
        "words:nowhere",
        "mnist",
    ],
)
def test_what_is_not_there_is_said(spec: str) -> None:
    with pytest.raises(ConfigError):
        load(spec)


def test_cifar_labels_out_of_range(tmp_path: Path) -> None:
    images = np.zeros((3, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "data_batch_1.npz", images=images, labels=np.array([0, 1, 10], np.uint8))
    with pytest.raises(ConfigError, match="labels"):
        load(f"cifar10:{tmp_path}")


def test_npz_with_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "data_batch_1.npz", images=np.array([{}], object), labels=np.zeros(1))
    with pytest.raises(ConfigError, match="data_batch_1"):
        load(f"cifar10:{tmp_path}")


def test_text_rows_are_one_symbol_apart(text_file: Path) -> None:
    data = load(f"text:{text_file}")
    assert torch.equal(data.inputs[0, 1:], data.targets[0, :-1])
    assert data.inputs.max() < data.classes


def test_the_synthetic_text_is_the_same_each_time_and_can_be_learned() -> None:
    data, again = load("synthetic"), load("synthetic")
    assert torch.equal(data.inputs, again.inputs)
    symbols = data.inputs.flatten()
    shares = torch.bincount(symbols, minlength=data.classes) / len(symbols)
    entropy = -float((shares * shares.log()).sum())
    pairs = torch.bincount(symbols[:-1] * data.classes + symbols[1:]).double() / (len(symbols) - 1)
    joint = -float((pairs[pairs > 0] * pairs[pairs > 0].log()).sum())
    assert joint - entropy < 0.9 * entropy  # a symbol says something about the next one


def test_a_language_model_of_any_size() -> None:
    model = LstmLanguageModel(50, width=24, layers=3, embedding=12)
    assert model(torch.zeros(2, 7, dtype=torch.int64)).shape == (2, 7, 50)
    gates = 4 * 24
    lstm = gates * (12 + 24 + 2) + 2 * gates * (24 + 24 + 2)
    assert sum(p.numel() for p in model.parameters()) == 50 * 12 + lstm + 24 * 50 + 50


def test_an_lstm_over_words_has_the_66_million_parameters_of_the_papers() -> None:
    data = load("words")
    assert data.inputs.shape[1:] == (35,)
    assert int(data.inputs.max()) < data.classes == 10_000
    with torch.device("meta"):
        model = build("lstm", data, 0, (1500, 1500))
    assert sum(p.numel() for p in model.parameters()) == 66_034_000
    assert build("lstm", data, 0, (12,))(data.inputs[:2]).shape == (2, 35, 10_000)


def test_words_of_a_file_by_frequency(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("to be or\nnot to be\n" * 300)
    data = load(f"words:{path}")
    assert data.classes == 6  # to, be, <eos>, or, not, and all others
    assert torch.equal(data.inputs[0, 1:], data.targets[0, :-1])
    to, be, or_, eos, no = data.inputs[0, :5].tolist()
    assert data.inputs[0, :8].tolist() == [to, be, or_, eos, no, to, be, eos]
    assert max(to, be, eos) < min(or_, no)
    path.write_text("too short")
    with pytest.raises(ConfigError, match="words or more"):
        load(f"words:{path}")


@pytest.mark.parametrize("name", MODELS)
def test_models_learn_their_data(name: str, text_file: Path) -> None:
    data = load(f"text:{text_file}" if name in TEXT_MODELS else "digits")
    before = torch.random.get_rng_state()
    first, second = build(name, data, 3), build(name, data, 3)
    assert torch.equal(before, torch.random.get_rng_state())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    optimizer = torch.optim.Adam(first.parameters(), lr=0.003)
    inputs, targets = data.batch(torch.arange(16))
    begin = float(loss(data, first(inputs), targets).detach())
    for _ in range(8):
        optimizer.zero_grad()
        loss(data, first(inputs), targets).backward()
        optimizer.step()
    assert float(loss(data, first(inputs), targets).detach()) < 0.9 * begin
    test_loss, accuracy = evaluate(first, data, 20)
    assert 0 <= accuracy <= 1
    assert test_loss > 0
    assert first.training


def test_a_model_for_other_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="learns text"):
        build("lstm", load("digits"), 0)


def test_widths_of_image_models() -> None:
    data = load("digits")
    widths = [len(p) for p in build("cnn", data, 0, (4, 8, 6, 16)).parameters() if p.dim() > 1]
    assert widths == [4, 8, 6, 16, data.classes]
    with pytest.raises(ConfigError, match="give 4 widths, not 2"):
        build("cnn", data, 0, (64, 64))
    for name in ("logistic", "resnet20"):
        with pytest.raises(ConfigError, match=f"{name} has no widths to choose: leave out 64, 64"):
            build(name, data, 0, (64, 64))
