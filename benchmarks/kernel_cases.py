"""What is timed of every kernel, and how many copies of the tensor it may cost at most."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common import Action
from thinwire import kernels

WORKERS = 8
BUCKET = 512

Make = Callable[[int], tuple[Action, Action]]


@dataclass(frozen=True, slots=True)
class Case:
    """`make(size)` gives the action to time and what to do before it, untimed."""

    name: str
    target: float | None
    make: Make


def nothing() -> None:
    pass


def _reading(call: Callable[[Tensor], object], draw: Callable[[int], Tensor] = torch.randn) -> Make:
    def make(size: int) -> tuple[Action, Action]:
        x = draw(size)
        return lambda: call(x), nothing

    return make


def _laplace(size: int) -> Tensor:
    """Heavier tails than normal: Gaussian-k's first guess is off."""
    return torch.randn(size) * torch.empty(size).exponential_().sqrt_()


def _feedback(call: Callable[[Tensor, Tensor], object]) -> Make:
    def make(size: int) -> tuple[Action, Action]:
        residual, grad, saved = torch.zeros(size), torch.empty(size), torch.randn(size)

        def reset() -> None:
            residual.zero_()
            grad.copy_(saved)

        return lambda: call(residual, grad), reset

    return make


def _dequantise(bits: int, workers: int) -> Make:
    def make(size: int) -> tuple[Action, Action]:
        x, out = torch.randn(size), torch.zeros(size)
        sent = [kernels.quantise(x, bits, BUCKET, "max", seed) for seed in range(workers)]
        packed, scales = [p for p, _ in sent], [s for _, s in sent]
        return lambda: kernels.dequantise_mean(packed, scales, bits, BUCKET, size, out), nothing

    return make


def _laq(at_once: bool) -> Make:
    def make(size: int) -> tuple[Action, Action]:
        grad, last, saved = torch.randn(size), torch.zeros(size), 0.1 * torch.randn(size)

        def action() -> None:
            packed, radius = kernels.laq_quantise(grad, last, 4, update=at_once)
            if not at_once:
                kernels.laq_apply(last, packed, radius, 4)

        return action, lambda: last.copy_(saved)

    return make


def _sign_mean(size: int) -> tuple[Action, Action]:
    packed = [kernels.sign_pack(torch.randn(size)) for _ in range(WORKERS)]
    out = torch.zeros(size)
    scales = [torch.ones(1)] * WORKERS
    return lambda: kernels.sign_mean(packed, scales, size, out), nothing


def _majority(size: int) -> tuple[Action, Action]:
    packed = [kernels.sign_pack(torch.randn(size)) for _ in range(WORKERS)]
    return lambda: kernels.sign_majority(packed, size), nothing


def _natural_mean(size: int) -> tuple[Action, Action]:
    packed = [kernels.natural_quantise(torch.randn(size), seed) for seed in range(WORKERS)]
    out = torch.zeros(size)
    return lambda: kernels.natural_mean(packed, size, out), nothing


def _scatter(size: int) -> tuple[Action, Action]:
    sent = [kernels.topk(torch.randn(size), max(size // 100, 1)) for _ in range(WORKERS)]
    indices, values = [i for i, _ in sent], [v for _, v in sent]
    out = torch.zeros(size)
    return lambda: kernels.scatter_mean(indices, values, out), nothing


def _a2sgd(size: int) -> tuple[Action, Action]:
    x, saved, mean = torch.zeros(size), torch.randn(size), torch.tensor([0.5, -0.5])

    def action() -> None:
        kernels.a2sgd_apply(x, kernels.two_means(x), mean, x)

    return action, lambda: x.copy_(saved)


def _momentum(size: int) -> tuple[Action, Action]:
    m, grad, out = torch.randn(size), torch.randn(size), torch.zeros(size)
    roots = (torch.rand(size), torch.rand(size), torch.rand(size))

    def action() -> None:
        kernels.adam_momentum(m, grad, roots, 0.9, out)
        kernels.adam_keep(out, roots[2], m)

    return action, nothing


def _feedback_signs(residual: Tensor, grad: Tensor) -> None:
    share = -(-residual.numel() // 8 // WORKERS) * 8
    _, means = kernels.feedback_signs(residual, grad, 4096, share)
    kernels.commit_signs(residual, grad, means, 4096, share)


def _gspar_sample(size: int) -> tuple[Action, Action]:
    x = torch.randn(size)
    lam = kernels.gspar_probabilities(x, 0.01)
    return lambda: kernels.gspar_sample(x, lam, 1), nothing


def _sketch_insert(cols: int) -> Make:
    def make(size: int) -> tuple[Action, Action]:
        x, table = torch.randn(size), torch.zeros(5, cols)
        return lambda: kernels.sketch_insert(x, 5, cols, 1, table), nothing

    return make


def _sketch_query(cols: int) -> Make:
    def make(size: int) -> tuple[Action, Action]:
        table = torch.zeros(5, cols)
        kernels.sketch_insert(torch.randn(size), 5, cols, 1, table)
        return lambda: kernels.sketch_query_topk(table, size, 1, max(size // 1000, 1)), nothing

    return make


def _rotation(turn: Callable[[Tensor, int, Tensor], None]) -> Make:
    def make(size: int) -> tuple[Action, Action]:
        x, out = torch.randn(size), torch.zeros(size)
        return lambda: turn(x, 1, out), nothing

    return make


def _cosine(transform: Callable[[Tensor, kernels.Chunks, Tensor], None]) -> Make:
    """A matrix of 4,096 columns; the entries beyond its last row are left out."""

    def make(size: int) -> tuple[Action, Action]:
        chunks = kernels.Chunks.of((max(size // 4096 // 64, 1) * 64, 4096))
        x, out = torch.randn(chunks.total), torch.zeros(chunks.total)
        return lambda: transform(x, chunks, out), nothing

    return make


def _k(x: Tensor, ratio: float) -> int:
    return max(int(ratio * x.numel()), 1)


CASES: tuple[Case, ...] = (
    Case("topk 0.1 %", 1.0, _reading(lambda x: kernels.topk(x, _k(x, 0.001)))),
    Case("topk 1 %", None, _reading(lambda x: kernels.topk(x, _k(x, 0.01)))),
    Case("threshold 1 %", None, _reading(lambda x: kernels.threshold(x, 2.5758))),
    Case("feedback + topk 0.1 %", 1.5, _feedback(lambda r, g: kernels.feedback_topk(r, g, _k(r, 0.001)))),
    Case("feedback + topk 1 %", 2.0, _feedback(lambda r, g: kernels.feedback_topk(r, g, _k(r, 0.01)))),
    Case(
        "feedback + topk 1 %, undo in the gradient",
        None,
        _feedback(lambda r, g: kernels.feedback_topk(r, g, _k(r, 0.01), undo=g)),
    ),
    Case(
        "feedback + topk 1 % of chunks of 4,096",
        1.5,
        _feedback(lambda r, g: kernels.feedback_chunk_topk(r, g, kernels.PerChunk(41, 4096))),
    ),
    Case(
        "select on the sum 1 %", None, _feedback(lambda r, g: kernels.select_feedback_topk(r, g, _k(r, 0.01)))
    ),
    Case(
        "feedback + random block 1 %",
        None,
        _feedback(lambda r, g: kernels.feedback_block(r, g, 7, _k(r, 0.01))),
    ),
    Case("gaussiank 0.1 %, normal", 2.5, _reading(lambda x: kernels.gaussiank(x, _k(x, 0.001)))),
    Case("gaussiank 0.1 %, Laplace", 2.5, _reading(lambda x: kernels.gaussiank(x, _k(x, 0.001)), _laplace)),
    Case(
        "feedback + gaussiank 0.1 %",
        None,
        _feedback(lambda r, g: kernels.feedback_gaussiank(r, g, _k(r, 0.001))),
    ),
    Case("quantise 1 bit", None, _reading(lambda x: kernels.quantise(x, 1, BUCKET, "max", 1))),
    Case("quantise 2 bit", 1.3, _reading(lambda x: kernels.quantise(x, 2, BUCKET, "max", 1))),
    Case("quantise 4 bit", 1.3, _reading(lambda x: kernels.quantise(x, 4, BUCKET, "max", 1))),
    Case("quantise 8 bit", 1.3, _reading(lambda x: kernels.quantise(x, 8, BUCKET, "max", 1))),
    Case("quantise 4 bit, l2", None, _reading(lambda x: kernels.quantise(x, 4, BUCKET, "l2", 1))),
    Case("dequantise 4 bit", 0.7, _dequantise(4, 1)),
    Case("dequantise 2 bit, 8 workers", 1.5, _dequantise(2, WORKERS)),
    Case("dequantise 4 bit, 8 workers", 1.5, _dequantise(4, WORKERS)),
    Case("dequantise 8 bit, 8 workers", None, _dequantise(8, WORKERS)),
    Case("LAQ 4 bit: radius, codes, update", 2.0, _laq(at_once=True)),
    Case("LAQ 4 bit: the update later", None, _laq(at_once=False)),
    Case("sign pack", 1.0, _reading(kernels.sign_pack)),
    Case("sign pack + mean |x|", None, _reading(kernels.sign_pack_mean)),
    Case("sign mean, 8 workers", None, _sign_mean),
    Case("sign majority, 8 workers", None, _majority),
    Case("feedback + signs with means of 4,096, committed", None, _feedback(_feedback_signs)),
    Case("adam: momentum of a step, and what it keeps", None, _momentum),
    Case("A2SGD: means + correction in place", 1.2, _a2sgd),
    Case("ternary quantise", None, _reading(lambda x: kernels.ternary_quantise(x, 2.5, 1))),
    Case("natural quantise", None, _reading(lambda x: kernels.natural_quantise(x, 1))),
    Case("natural mean, 8 workers", None, _natural_mean),
    Case("GSpar probabilities, 2 rounds", None, _reading(lambda x: kernels.gspar_probabilities(x, 0.01))),
    Case("GSpar sample 1 %", None, _gspar_sample),
    Case("chunk arg-max, chunks of 100", None, _reading(lambda x: kernels.chunk_argmax(x, 100))),
    Case("scatter mean of 8 x 1 %", 1.2, _scatter),
    Case("rotate", 2.5, _rotation(kernels.rotate)),
    Case("rotate back", 2.5, _rotation(kernels.rotate_back)),
    Case("scales of signs, blocks of 4,096", None, _reading(lambda x: kernels.sign_scales(x, 4096))),
    Case("DCT, chunks of 64 x 64", 6.0, _cosine(kernels.dct)),
    Case("inverse DCT, chunks of 64 x 64", 6.0, _cosine(kernels.inverse_dct)),
    Case("all finite", None, _reading(kernels.all_finite)),
    Case("sketch insert 5 x 20k", 4.0, _sketch_insert(20_000)),
    Case("sketch insert 5 x 100k", 4.0, _sketch_insert(100_000)),
    Case("sketch insert 5 x 500k", 5.0, _sketch_insert(500_000)),
    Case("sketch query + topk 5 x 20k", 5.0, _sketch_query(20_000)),
    Case("sketch query + topk 5 x 100k", 5.0, _sketch_query(100_000)),
    Case("sketch query + topk 5 x 500k", 6.0, _sketch_query(500_000)),
)
