"""Reproductions name methods that exist, and every method's page links to its own."""

from pathlib import Path

import pytest

from reproductions import NAMES, find
from reproductions.method_pages import write_pages
from thinwire.tools.catalogue.descriptions import all_methods


@pytest.mark.parametrize("name", NAMES)
def test_methods_exist(name: str) -> None:
    assert set(find(name).methods) <= {one.name for one in all_methods()}


def test_pages_link_to_reproductions(tmp_path: Path) -> None:
    write_pages(tmp_path, None)
    assert (
        "(../reproductions.md#gaussiank), [sparse](../reproductions.md#sparse)"
        in (tmp_path / "topk.md").read_text()
    )
    assert "Reproduced" not in (tmp_path / "fp16.md").read_text()
