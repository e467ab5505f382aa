"""The law of another number of ranks: equal replicas stay equal, and the training goes on."""

import torch

from tests.laws.cohort import SHAPES, Cohort, every, named, same_bits
from thinwire import parse
from thinwire.sessions import checkpoint

RESIZES = ((2, 3), (4, 2), (2, 4), (3, 2))
BEFORE, AFTER = 9, 20


def direction() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(77)
    return {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}


def gradients(cohort: Cohort, step: int) -> list[dict[str, torch.Tensor]]:
    """Always in one direction, with noise of every rank."""
    common = direction()
    return [{name: common[name] + own[name] for name in SHAPES} for own in cohort.inputs(step, scale=0.3)]


def resized(before: Cohort, after: Cohort, how: str) -> None:
    states = [session.sealed() for session in before.sessions]
    for session in after.sessions:
        olds = checkpoint.dealt(session.engine, len(states))
        given = [states[old] for old in olds or [0]]
        session.load_state_dict(given, on_resize=how if olds else "drop")


def moved(cohort: Cohort, steps: range) -> torch.Tensor:
    """The sum of what the optimizer gets; every step is checked."""
    total = torch.zeros(sum(torch.zeros(shape).numel() for shape in SHAPES.values()))
    for step in steps:
        outputs = cohort.average(gradients(cohort, step))
        for name in SHAPES:
            assert outputs[0][name].isfinite().all(), (name, step)
            assert all(same_bits(outputs[0][name], other[name]) for other in outputs), (name, step)
        total += torch.cat([tensor.flatten() for tensor in outputs[0].values()])
    check_equal_states(cohort)
    return total


def check_equal_states(cohort: Cohort) -> None:
    """What is declared as equal on all ranks is equal on all that keep it."""
    kept = [session for session in cohort.sessions if session.engine.keeps_states]
    layouts = list(kept[0].engine.checkpoint_layouts().values())
    for first, *others in zip(*(session.engine.replicated(layouts) for session in kept), strict=True):
        assert all(same_bits(first, other) for other in others)


EQUAL = named(lambda traits: traits.consensus)


@every(EQUAL, sizes=RESIZES, how=["sum", "drop"])
def test_another_number_of_ranks(method: str, sizes: tuple[int, int], how: str) -> None:
    """For 20 steps all ranks get the same, and it points where it does without the resize."""
    old, new = sizes
    before, after, control = Cohort(method, old), Cohort(method, new), Cohort(method, new)
    moved(before, range(BEFORE))
    resized(before, after, how)
    moved(control, range(BEFORE))
    steps = range(BEFORE, BEFORE + AFTER)
    found, expected = moved(after, steps), moved(control, steps)
    ahead = torch.cat([tensor.flatten() for tensor in direction().values()])
    cosine = torch.nn.functional.cosine_similarity
    if cosine(expected, ahead, dim=0) < 0:
        assert parse(method).warning, f"{method} does not train, and says so to nobody"
        return
    assert cosine(found, ahead, dim=0) > 0.5 * cosine(expected, ahead, dim=0) > 0
    lengths = found.norm() / expected.norm()
    assert 0.5 < lengths < 2, f"steps are {lengths:.2f} times as long as without the resize"
