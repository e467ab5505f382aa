import torch

from tests.laws.cohort import Cohort
from thinwire.methods import OneBit


def skewed() -> torch.Tensor:
    return torch.randn(3001, generator=torch.Generator().manual_seed(0)) ** 3 + 0.3


def decoded(u: torch.Tensor) -> torch.Tensor:
    return OneBit().decode([OneBit().encode(u, 0)], u.numel())


def test_two_means() -> None:
    u = skewed()
    q = decoded(u)
    assert torch.allclose(q[u >= 0], u[u >= 0].mean())
    assert torch.allclose(q[u < 0], u[u < 0].mean())


def test_the_residual_sums_to_zero_on_either_side() -> None:
    """The residual identity: means leave nothing over, in sum."""
    u = skewed()
    lost = (u - decoded(u)).double()
    assert abs(float(lost[u >= 0].sum())) < 1e-3
    assert abs(float(lost[u < 0].sum())) < 1e-3


def test_the_residual_is_what_was_not_sent() -> None:
    cohort = Cohort("onebit", 1, {"wide": (20, 30)})
    owed = torch.zeros(20, 30)
    for step in range(3):
        inputs = cohort.inputs(step)
        out = cohort.average(inputs)[0]["wide"]
        owed = owed + inputs[0]["wide"] - out
        assert torch.allclose(cohort.sessions[0].residuals()["wide"].view(20, 30), owed, atol=1e-5)


def test_never_worse_than_one_magnitude() -> None:
    u = skewed()
    assert (u - decoded(u)).norm() <= (u - u.abs().mean() * u.sign()).norm()


def test_one_sign_only() -> None:
    for u in (torch.rand(100) + 1, -torch.rand(100) - 1):
        assert torch.allclose(decoded(u), u.mean())


def test_one_bit_an_entry() -> None:
    cohort = Cohort("onebit", 4, {"wide": (64, 64)})
    cohort.average(cohort.inputs(0))
    assert cohort.driver.meters[0].payload_bytes == 64 * 64 // 8 + 8
