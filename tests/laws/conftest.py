"""One pass of the laws for the fast check: every law once over every method at its defaults."""

import pytest
import torch

from thinwire import list_methods

ONE_OF_EACH = {"size": 3, "dtype": torch.float32, "value": float("inf"), "tensor": "wide"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    defaults = {str(cls()) for cls in list_methods().values()}
    for item in items:
        given = getattr(item, "callspec", None)
        if item.path.name != "test_laws.py" or given is None or given.params.get("method") not in defaults:
            continue
        if all(given.params.get(name, value) == value for name, value in ONE_OF_EACH.items()):
            item.add_marker(pytest.mark.quick)
