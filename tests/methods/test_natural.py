import torch

from tests.laws.cohort import Cohort
from thinwire.methods import Natural


def decoded(g: torch.Tensor, seed: int) -> torch.Tensor:
    return Natural().decode([Natural().encode(g, seed)], g.numel())


def heavy(n: int = 2000) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0)) ** 3


def test_values_are_the_powers_of_two_around() -> None:
    g = heavy()
    q = decoded(g, 3)
    mantissa, exponent = torch.frexp(q.abs())
    assert (mantissa == 0.5).all()
    below = torch.frexp(g.abs()).exponent
    assert ((exponent == below) | (exponent == below + 1)).all()
    assert torch.equal(q.sign(), g.sign())


def test_powers_of_two_come_out_unchanged() -> None:
    g = torch.tensor([1.0, -2.0, 0.0, 2.0**-20, -(2.0**10)])
    assert all(torch.equal(decoded(g, seed), g) for seed in range(20))


def test_the_variance_is_at_most_an_eighth() -> None:
    g = heavy()
    runs = torch.stack([decoded(g, seed) for seed in range(300)]).double()
    ratio = (runs - g).square().mean(0) / g.double().square()
    assert float(ratio.mean()) < 1 / 8
    assert float(ratio.max()) < 1 / 8 * 1.5  # 300 trials


def test_a_byte_an_entry() -> None:
    cohort = Cohort("natural", 4, {"wide": (64, 64)})
    cohort.average(cohort.inputs(0))
    assert cohort.driver.meters[0].payload_bytes == 64 * 64 + 1
