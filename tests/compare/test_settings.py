"""What is asked for is checked before a process starts."""

import pytest

from thinwire.errors import ConfigError
from thinwire.tools.compare.settings import RECIPES, Comparison, prepare, resolve_methods, split
from thinwire.tools.workloads import MODELS


def test_split_leaves_commas_inside_parentheses_and_quotes() -> None:
    text = "topk(ratio=0.01, scope='model'), qsgd(bits=4),"
    text += "periodic(every=8, exchange=topk(ratio=0.1, warmup=3))"
    assert split(text) == [
        "topk(ratio=0.01, scope='model')",
        "qsgd(bits=4)",
        "periodic(every=8, exchange=topk(ratio=0.1, warmup=3))",
    ]


@pytest.mark.parametrize("text", ["topk(ratio=0.1", "topk(ratio=0.1))", "route(default='topk)"])
def test_what_is_not_closed_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        resolve_methods([text])


def test_the_baseline_comes_first_and_nothing_twice() -> None:
    assert resolve_methods(["fp16,dense", "fp16"]) == ["dense", "fp16"]
    assert resolve_methods(["fp16", "pytorch"]) == ["pytorch", "fp16"]


def test_the_user_chooses_the_baseline() -> None:
    assert resolve_methods(["fp16"], "pytorch") == ["pytorch", "fp16"]
    assert resolve_methods(["fp16", "pytorch"], "dense") == ["dense", "fp16", "pytorch"]
    assert resolve_methods(["fp16", "pytorch"], "none") == ["fp16", "pytorch"]
    assert prepare(Comparison(["fp16"], baseline=False)).baseline is False


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ConfigError, match="toppk"):
        resolve_methods(["toppk(ratio=0.1)"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": "imagenet"}, "digits, synthetic, words, mnist:DIR"),
        ({"model": "lstm"}, "learns text"),
        ({"model": "lstm", "data": "words", "hidden": (8, 9)}, "equally wide"),
        ({"model": "vgg"}, "models are"),
        ({"link": "fast"}, "fast"),
        ({"target_accuracy": 97.0}, "between 0 and 1"),
        ({"target_perplexity": 5.0}, "images have a target accuracy"),
        ({"model": "lstm", "data": "words", "target_accuracy": 0.5}, "text has a target perplexity"),
        ({"model": "lstm", "data": "words", "target_perplexity": 0.5}, "above 1, not 0.5"),
        ({"steps": 5, "epochs": 1.0}, "not both"),
        ({"learning_rate": 0.0}, "learning rate must be above 0"),
        ({"epochs": 0.0}, "epochs must be above 0"),
        ({"methods": ["dense", "auto"], "steps": 5}, "auto measures 5 steps"),
        (
            {"methods": ["dgc(ratio=0.01)"], "optimizer": "adamw"},
            "keeps the momentum itself: give --optimizer",
        ),
        ({"methods": ["lag(rule='wk')"], "optimizer": "adam"}, "a rule for SGD: give --optimizer sgd"),
    ],
)
def test_usage_errors_are_raised_before_anything_starts(changes: dict[str, object], words: str) -> None:
    asked = Comparison(**{"methods": ["dense"], **changes})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        prepare(asked)


def test_another_optimizer_gets_another_learning_rate() -> None:
    rates = [
        prepare(Comparison(["dense"], optimizer=name)).learning_rate for name in ("sgd", "adam", "adamw")
    ]
    assert rates == [0.1, 0.002, 0.002]
    assert prepare(Comparison(["dense"], optimizer="adamw", learning_rate=0.5)).learning_rate == 0.5


def test_auto_is_a_method_beside_others() -> None:
    assert resolve_methods(["auto,topk"]) == ["dense", "auto", "topk(ratio=0.01)"]


def test_epochs_become_steps() -> None:
    setting = prepare(Comparison(methods=["dense"], epochs=2.0, batch=16, workers=2))
    assert setting.steps == round(2 * 1437 / 32)


def test_every_model_has_a_recipe() -> None:
    assert tuple(RECIPES) == MODELS


def test_adam_is_compared_under_adamw_alone() -> None:
    methods = ["dense", "adam"]
    with pytest.raises(ConfigError, match="averages Adam's momentum: give --optimizer adamw"):
        prepare(Comparison(methods, optimizer="sgd"))
    assert prepare(Comparison(methods, optimizer="adamw"))
