"""A method is read in one sitting."""

from pathlib import Path

import pytest

import thinwire.methods

FILES = [
    path
    for path in sorted(Path(thinwire.methods.__file__).parent.glob("*.py"))
    if path.stem not in ("__init__", "registry")
]


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_method_has_at_most_a_hundred_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 100


def test_there_are_files() -> None:
    assert len(FILES) > 20
