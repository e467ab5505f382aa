"""Method strings, JSON and repr; unknown names; third parties' methods."""

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

import thinwire
import thinwire.methods
from thinwire import ConfigError, list_methods, parse
from thinwire.core import Exchange, Traits


def test_every_method_has_a_default_configuration_and_a_docstring() -> None:
    for name, cls in list_methods().items():
        assert cls.name == name
        assert cls().name == name
        assert cls.__doc__
        assert getattr(thinwire.methods, cls.__name__) is cls, f"{cls.__name__} is not exported"


def test_no_method_class_is_forgotten_in_the_registry() -> None:
    def leaves(cls: type) -> set[type]:
        # Tests and reproductions may have variants that are nobody's method.
        children = [each for each in cls.__subclasses__() if each.__module__.startswith("thinwire.")]
        return set().union(*map(leaves, children)) if children else {cls}

    assert leaves(Exchange) == set(list_methods().values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "topkk(ratio=0.1)",
            r"unknown method 'topkk' \(did you mean 'topk'\?\); valid methods: a2sgd, adam, bf16",
        ),
        ("topk(ration=0.1)", r"topk has no option 'ration' \(did you mean 'ratio'\?\); valid options: ratio"),
        ("topk(ratio=2)", "topk: ratio must be a number above 0 and up to 1, not 2"),
        ("topk(ratio='a')", "not 'a'"),
        ("topk(0.1)", "options are given by name"),
        ("topk(ratio=", "is not a method: write it like topk"),
        ("topk(ratio=__import__('os'))", "unknown method '__import__'"),
        ("topk(ratio=1 + 1)", "the value of ratio is not a number, string"),
        ("qsgd(bits=3)", "qsgd: bits must be one of 1, 2, 4, 8, not 3"),
        ("qsgd(bucket=0)", "bucket must be a whole number from 1 up"),
        ("qsgd(norm='l1')", "norm must be one of 'max', 'l2'"),
        ("powersgd(rank=0)", "rank must be a whole number from 1 up"),
        ("topk(feedback=1)", "feedback must be True or False"),
        ("dense(x=1)", "dense has no option 'x'; valid options: none"),
        ('{"name": "topk", "extra": 1}', "a method in JSON is"),
        ('{"name": ', "not valid JSON"),
        ("", "is not a method"),
        ("a.b(c=1)", "is not a method"),
    ],
)
def test_bad_methods_get_helpful_errors(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


@dataclass(frozen=True)
class Foreign(Exchange):
    """A third party's method."""

    name: ClassVar[str] = "foreign"

    @property
    def traits(self) -> Traits:
        return Traits()

    async def run(self, x, out, state, ch) -> None:
        await ch.mean(x, out)

    def payload_bytes(self, layout, size, link) -> int:
        return layout.dense_bytes


def offered(entry: importlib.metadata.EntryPoint):
    return lambda group: [entry] if entry.group == group else []


def test_third_parties_register_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("foreign", f"{__name__}:Foreign", "thinwire.methods")
    monkeypatch.setattr("thinwire.methods.registry.entry_points", offered(entry))
    assert parse("foreign") == Foreign()
    assert "foreign" in list_methods()
    bad = importlib.metadata.EntryPoint("topk", f"{__name__}:Foreign", "thinwire.methods")
    monkeypatch.setattr("thinwire.methods.registry.entry_points", offered(bad))
    with pytest.raises(ConfigError, match="registers the method 'topk', which exists already"):
        list_methods()


def test_import_is_light() -> None:
    """Importing thinwire loads neither numba nor plotly, starts no thread and touches no random state."""
    code = (
        "import sys, threading, torch; before = torch.get_rng_state(); import thinwire;"
        " thinwire.list_methods();"
        "heavy = {'numba', 'plotly', 'sklearn', 'typer'} & set(sys.modules); assert not heavy, heavy;"
        "assert threading.active_count() == 1; assert torch.equal(before, torch.get_rng_state())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONWARNINGS": "error"})


def test_a_pair_that_has_not_proven_itself_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert parse("topk(values=qsgd(bits=4))").warning is None
    assert parse("topk(values=terngrad, reduce='gather')").warning is None
    text = parse("topk(values=terngrad, reduce='split')").warning
    assert text is not None
    assert "terngrad have not passed the convergence law with topk" in text
    assert parse("randomk(shared=False, values=natural)").warning is not None
