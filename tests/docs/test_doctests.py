"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.architecture.imports import modules

WITH_EXAMPLES = [name for name, path in modules().items() if ">>> " in path.read_text()]


def test_there_are_examples() -> None:
    assert len(WITH_EXAMPLES) > 10


@pytest.mark.quick
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert not result.failed
