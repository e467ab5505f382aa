import math

import pytest
import torch

from tests.laws.cohort import Cohort, same_bits, same_state
from thinwire import ConfigError
from thinwire.methods import EFSign
from thinwire.methods.families.feedback import DenseMemory


def decoded(u: torch.Tensor) -> torch.Tensor:
    return EFSign().decode([EFSign().encode(u, 0)], u.numel())


@pytest.mark.parametrize("power", [1, 3, 5])
def test_the_contraction_is_delta(power: int) -> None:
    u = torch.randn(5000, generator=torch.Generator().manual_seed(power)) ** power
    delta = float(u.double().abs().sum() ** 2 / (u.numel() * u.double().square().sum()))
    left = float((u - decoded(u)).double().square().sum() / u.double().square().sum())
    assert left == pytest.approx(1 - delta, rel=1e-5)


def test_delta_of_a_normal_distribution_is_two_over_pi() -> None:
    u = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    left = float((u - decoded(u)).square().sum() / u.square().sum())
    assert left == pytest.approx(1 - 2 / math.pi, rel=0.01)


def test_it_is_the_nearest_multiple_of_the_signs() -> None:
    u = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    best = (u - decoded(u)).norm()
    assert best <= min((u - scale * u.sign()).norm() for scale in torch.linspace(0.1, 2, 100)) + 1e-5


def test_the_error_is_what_was_not_sent() -> None:
    cohort = Cohort("efsign", 1, {"wide": (20, 30)})
    owed = torch.zeros(20, 30)
    for step in range(3):
        inputs = cohort.inputs(step)
        out = cohort.average(inputs)[0]["wide"]
        owed = owed + inputs[0]["wide"] - out
        assert torch.allclose(cohort.sessions[0].residuals()["wide"].view(20, 30), owed, atol=1e-5)


def test_two_shots_keep_the_errors_bounded() -> None:
    """Ranks that disagree, for a hundred steps: what is owed does not grow."""
    cohort = Cohort("efsign(reduce='twoshot')", 8, {"wide": (20, 30)})
    inputs = cohort.inputs(0)
    norms = []
    for _ in range(100):
        cohort.average(inputs)
        norms.append(float(cohort.residuals()["wide"].norm()))
    assert max(norms[50:]) < 2 * max(norms[:50])


@pytest.mark.parametrize("reduce", ["gather", "twoshot"])
def test_every_bucket_has_a_magnitude_of_its_own(reduce: str) -> None:
    """Entries of very different sizes: with buckets far less is lost, and nothing for ever.

    With two shots every rank owns two whole rows.
    """
    shapes = {"wide": (6, 4096)}
    parted = Cohort(EFSign(bucket=4096, reduce=reduce), 3, shapes)
    whole = Cohort(EFSign(reduce="gather"), 3, shapes)
    sizes = 10.0 ** torch.arange(6.0)[:, None]
    inputs = [
        {"wide": torch.randn(6, 4096, generator=torch.Generator().manual_seed(r)) * sizes} for r in range(3)
    ]
    mean = sum(one["wide"] for one in inputs) / 3
    (out, *others) = (one["wide"] for one in parted.average(inputs))
    assert all(torch.equal(out, other) for other in others)
    coarse = whole.average(inputs)[0]["wide"]
    assert ((out - mean).norm(dim=1) < 1.5 * mean.norm(dim=1)).all()
    assert (coarse - mean)[0].norm() > 100 * mean[0].norm()
    assert torch.allclose(3 * out + parted.residuals()["wide"], 3 * mean.double(), rtol=1e-4, atol=1e-2)


def test_stretches_are_even_whatever_the_bucket() -> None:
    """Nine buckets for four ranks: nobody sends three times a third while another sends nothing."""
    n, method = 9 * 4096, EFSign(bucket=4096, reduce="twoshot")
    cohort = Cohort(method, 4, {"wide": (9, 4096)})
    cohort.average(cohort.inputs(0))
    sent = [meter.sent_bytes for meter in cohort.driver.meters]
    assert len(set(sent)) == 1
    assert sent[0] < 1.02 * 2 * 3 / 4 * n / 8 + 6 * 32  # and a header in front of every message


@pytest.mark.parametrize("n", [0, 1, 4095, 4096, 4097, 20_000])
def test_a_bucket_costs_four_bytes(n: int) -> None:
    method = EFSign(bucket=4096)
    parts = method.encode(torch.randn(n), 0)
    assert sum(part.numel() * part.element_size() for part in parts) == method.code_bytes(n)
    assert method.code_bytes(n) == -(-n // 8) + 4 * -(-n // 4096)


def test_a_bucket_is_made_of_whole_tiles() -> None:
    for bad in (0, 100, 4097, True):
        with pytest.raises(ConfigError, match="bucket"):
            EFSign(bucket=bad)


def test_one_bit_an_entry() -> None:
    cohort = Cohort("efsign", 4, {"wide": (64, 64)})
    cohort.average(cohort.inputs(0))
    assert cohort.driver.meters[0].payload_bytes == 64 * 64 // 8 + 4


@pytest.mark.parametrize("bits", [2, 3])
def test_more_bits_lose_less(bits: int) -> None:
    """Each bit codes what the one before lost, by signs of its own: a contraction by its own delta."""
    u = torch.randn(100_000, generator=torch.Generator().manual_seed(bits))
    method = EFSign(bucket=4096, bits=bits)
    left = u
    for _ in range(bits):
        code = EFSign(bucket=4096)
        left = left - code.decode([code.encode(left, 0)], left.numel())
    assert torch.allclose(u - method.decode([method.encode(u, 0)], u.numel()), left, atol=1e-6)
    assert float(left.square().sum() / u.square().sum()) < (0.15 if bits == 2 else 0.06)
    parts = method.encode(u, 0)
    assert sum(part.numel() * part.element_size() for part in parts) == method.code_bytes(u.numel())


@pytest.mark.parametrize("reduce", ["gather", "twoshot"])
def test_two_bits_keep_the_rest_in_the_residual(reduce: str) -> None:
    shapes = {"wide": (5, 4096)}
    cohort = Cohort(EFSign(bucket=4096, bits=2, reduce=reduce), 3, shapes)
    sent = torch.zeros(5, 4096, dtype=torch.float64)
    total = torch.zeros(5, 4096, dtype=torch.float64)
    for step in range(4):
        inputs = cohort.inputs(step)
        total += sum(one["wide"].double() for one in inputs)
        sent += 3 * cohort.average(inputs)[0]["wide"].double()
    assert torch.allclose(sent + cohort.residuals()["wide"], total, rtol=1e-4, atol=1e-3)


class Plainly(EFSign):
    """The passes of every quantised method with feedback."""

    async def run(self, x, out, state, ch) -> None:
        with DenseMemory(state.error, x, out) as memory:
            mean = await self.average(memory.u, ch)
            if await ch.commit(mean.finite):
                mean.subtract_own(memory.commit(), scratch=out)
        mean.write(out)


@pytest.mark.parametrize("reduce", ["gather", "twoshot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_few_passes_have_the_bits_of_many(reduce: str, dtype: torch.dtype, size: int) -> None:
    shapes = {"wide": (31, 1033), "short": (10,), "one": (1,), "bucket": (4096,), "none": (0, 3)}
    few, many = (
        Cohort(kind(bucket=4096, reduce=reduce), size, shapes, dtype=dtype) for kind in (EFSign, Plainly)
    )
    for step in range(5):
        inputs = few.inputs(step)
        if step == 3:  # an aborted step
            inputs[-1]["wide"][3, 7] = torch.inf
        expected = many.average(inputs)
        found = few.average(inputs, in_place=step % 2 == 0)
        for mine, other in zip(found, expected, strict=True):
            assert all(same_bits(mine[name], other[name]) for name in shapes), step
        kept = [[session.engine.states.entries() for session in each.sessions] for each in (few, many)]
        assert same_state(*kept), step
