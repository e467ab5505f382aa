"""The mutants of `make mutants` still fit the source; the mutants themselves take minutes."""

from pathlib import Path

import pytest

import thinwire
from tests.mutants.mutants import MUTANTS, Mutant

SOURCE = Path(thinwire.__file__).parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_of_the_source(mutant: Mutant) -> None:
    assert (SOURCE / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
