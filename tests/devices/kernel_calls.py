"""One call of every kernel, on tensors that `put` has moved to a device."""

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import indices as codes
from thinwire.kernels.scatter import ascending_flag, ascending_in_range

N = 4200
Put = Callable[[Tensor], Tensor]
Call = Callable[[Put], object]

_rng = torch.Generator().manual_seed(3)
X = torch.randn(N, generator=_rng)
GRAD = torch.randn(N, generator=_rng)
PER = kernels.PerChunk(3, 100)
CHUNKS = kernels.Chunks.of((60, 70))
LOW = 5
INDICES, VALUES = kernels.topk(X, 40)


def _writes(call: Callable[..., object], *shape: int) -> Call:
    """A kernel with an output, which is the last argument."""

    def made(put: Put) -> object:
        out = put(torch.zeros(shape or (N,)))
        call(put, out)
        return out

    return made


def _feedback(call: Callable[[Tensor, Tensor, Tensor], object]) -> Call:
    def made(put: Put) -> object:
        residual, undo = put(GRAD), put(torch.zeros(N))
        return call(residual, put(X), undo), residual, undo

    return made


def _quantised(bits: int) -> tuple[Tensor, Tensor]:
    return kernels.quantise(X, bits, 512, "max", 3)


def _laq_update(put: Put) -> object:
    last = put(GRAD)
    return kernels.laq_quantise(put(X), last, 4, update=True), last


def _laq_apply(put: Put) -> object:
    packed, radius = kernels.laq_quantise(X, GRAD, 3)
    last = put(GRAD)
    kernels.laq_apply(last, put(packed), radius, 3)
    return last, kernels.laq_norms(put(X), put(GRAD), put(packed), radius, 3)


def _commit(put: Put) -> object:
    residual = put(GRAD)
    kernels.commit_feedback(residual, put(X), put(INDICES))
    return residual


def _adam_momentum(put: Put) -> object:
    out, roots = put(torch.zeros(N)), (put(GRAD.abs()), put(X.abs()), put(GRAD.abs()))
    return kernels.adam_momentum(put(GRAD), put(X), roots, 0.9, out), out


def _adam_keep(put: Put) -> object:
    out, m = put(X), put(torch.zeros(N))
    kernels.adam_keep(out, put(GRAD.relu()), m)
    return out, m


def _commit_signs(put: Put) -> object:
    residual = put(GRAD)
    kernels.commit_signs(residual, put(X), put(torch.tensor([0.3, 0.7, 0.2])), 4096, 4104)
    return residual


def _many(put: Put, parts: list[Tensor]) -> list[Tensor]:
    return [put(part) for part in parts]


SIGNS = kernels.sign_pack(X)
CALLS: dict[str, Call] = {
    "a2sgd_apply": _writes(
        lambda put, out: kernels.a2sgd_apply(put(X), put(torch.ones(2)), put(torch.zeros(2)), out)
    ),
    "adam_keep": _adam_keep,
    "adam_momentum": _adam_momentum,
    "two_means": lambda put: kernels.two_means(put(X)),
    "chunk_topk": lambda put: kernels.chunk_topk(put(X), PER),
    "select_feedback_chunk_topk": lambda put: kernels.select_feedback_chunk_topk(put(GRAD), put(X), PER),
    "feedback_chunk_topk": _feedback(lambda r, g, u: kernels.feedback_chunk_topk(r, g, PER, u)),
    "dct": _writes(lambda put, out: kernels.dct(put(X), CHUNKS, out), CHUNKS.total),
    "inverse_dct": _writes(lambda put, out: kernels.inverse_dct(put(X), CHUNKS, out)),
    "commit_feedback": _commit,
    "feedback_block": _feedback(lambda r, g, u: kernels.feedback_block(r, g, 4000, 300, u)),
    "feedback_gaussiank": _feedback(lambda r, g, u: kernels.feedback_gaussiank(r, g, 40, u)),
    "feedback_threshold": _feedback(lambda r, g, u: kernels.feedback_threshold(r, g, 2.5, u)),
    "feedback_topk": _feedback(lambda r, g, u: kernels.feedback_topk(r, g, 40, u)),
    "select_feedback_gaussiank": lambda put: kernels.select_feedback_gaussiank(put(GRAD), put(X), 40),
    "select_feedback_threshold": lambda put: kernels.select_feedback_threshold(put(GRAD), put(X), 2.5),
    "select_feedback_topk": lambda put: kernels.select_feedback_topk(put(GRAD), put(X), 40),
    "all_finite": lambda put: kernels.all_finite(put(X)),
    "finite_flag": lambda put: kernels.finite_flag(put(X)),
    "all_flags": lambda put: kernels.all_flags([True, put(torch.tensor(True))]),
    "gaussiank": lambda put: kernels.gaussiank(put(X), 40),
    "gspar_budget": lambda put: kernels.gspar_budget(put(X), 0.5),
    "gspar_probabilities": lambda put: kernels.gspar_probabilities(put(X), 0.1),
    "gspar_sample": lambda put: kernels.gspar_sample(put(X), 0.4, 1),
    "laq_apply": _laq_apply,
    "laq_norms": _laq_apply,
    "laq_quantise": _laq_update,
    "natural_quantise": lambda put: kernels.natural_quantise(put(X), 1),
    "natural_dequantise": _writes(
        lambda put, out: kernels.natural_dequantise(put(kernels.natural_quantise(X, 1)), N, out)
    ),
    "natural_mean": _writes(
        lambda put, out: kernels.natural_mean(
            _many(put, [kernels.natural_quantise(X, s) for s in (1, 2)]), N, out
        )
    ),
    **{f"quantise {b}": lambda put, b=b: kernels.quantise(put(X), b, 512, "max", 3) for b in (1, 2, 4, 8)},
    "quantise": lambda put: kernels.quantise(put(X), 4, 100, "l2", 3),
    "dequantise": _writes(
        lambda put, out: kernels.dequantise(*_many(put, list(_quantised(2))), 2, 512, N, out)
    ),
    "dequantise_mean": _writes(
        lambda put, out: kernels.dequantise_mean(
            [put(_quantised(4)[0])] * 2, [put(_quantised(4)[1])] * 2, 4, 512, N, out
        )
    ),
    "rotate": _writes(lambda put, out: kernels.rotate(put(X), 5, out)),
    "rotate_back": _writes(lambda put, out: kernels.rotate_back(put(X), 5, out)),
    "chunk_argmax": lambda put: kernels.chunk_argmax(put(X), 100),
    "chunk_argmax_sum": lambda put: kernels.chunk_argmax_sum(put(GRAD), put(X), 100),
    "scatter_mean": _writes(
        lambda put, out: kernels.scatter_mean([put(INDICES)] * 2, [put(VALUES)] * 2, out)
    ),
    "ascending_flag": lambda put: ascending_flag(put(INDICES), N),
    "ascending_in_range": lambda put: ascending_in_range(put(INDICES), N),
    "threshold": lambda put: kernels.threshold(put(X), 2.5),
    "topk": lambda put: kernels.topk(put(X), 40),
    "onebit_mean": _writes(
        lambda put, out: kernels.onebit_mean([put(SIGNS)] * 2, [put(torch.tensor([1.0, -2.0]))] * 2, N, out)
    ),
    "onebit_pack": lambda put: kernels.onebit_pack(put(X)),
    "sign_majority": lambda put: kernels.sign_majority(
        _many(put, [SIGNS, kernels.sign_pack(GRAD), kernels.sign_pack(-X)]), N
    ),
    "sign_mean": _writes(
        lambda put, out: kernels.sign_mean([put(SIGNS)] * 2, [put(torch.ones(1))] * 2, N, out)
    ),
    "sign_means": _writes(
        lambda put, out: kernels.sign_means(
            [put(SIGNS)] * 2, [put(torch.tensor([0.3, 0.7]))] * 2, 4096, N, out
        )
    ),
    "commit_signs": _commit_signs,
    "feedback_signs": lambda put: kernels.feedback_signs(put(GRAD), put(X), 4096, 4104),
    "lost_by_signs": _writes(
        lambda put, out: kernels.lost_by_signs(put(X), put(torch.tensor([0.3, 0.7])), 4096, 3.0, out)
    ),
    "signs_again": lambda put: kernels.signs_again(
        put(GRAD), put(X), [put(SIGNS)] * 2, [put(torch.tensor([0.3, 0.7]))] * 2, 4096
    ),
    "signs_joined": _writes(
        lambda put, out: kernels.signs_joined(
            [put(SIGNS[:264])] * 2, [put(torch.tensor([0.3]))] * 2, 4096, 2112, out
        )
    ),
    "sign_pack": lambda put: kernels.sign_pack(put(X)),
    "sign_pack_mean": lambda put: kernels.sign_pack_mean(put(X)),
    "sign_pack_means": lambda put: kernels.sign_pack_means(put(X), 4096),
    "sign_scales": lambda put: kernels.sign_scales(put(X), 100),
    "sign_unpack": _writes(lambda put, out: kernels.sign_unpack(put(SIGNS), put(torch.ones(1)), N, out)),
    "sketch_insert": _writes(lambda put, out: kernels.sketch_insert(put(X), 5, 200, 1, out), 5, 200),
    "sketch_query": _writes(lambda put, out: kernels.sketch_query(put(torch.ones(5, 200)), N, 1, out)),
    "sketch_query_topk": lambda put: kernels.sketch_query_topk(put(X[:1000].view(5, 200)), N, 1, 40),
    "ternary_quantise": lambda put: kernels.ternary_quantise(put(X), 2.5, 1),
    "bitmap": lambda put: codes.bitmap(put(INDICES), N),
    "from_bitmap": lambda put: codes.from_bitmap(put(codes.bitmap(INDICES, N)), N, 40),
    "elias_fano": lambda put: codes.elias_fano(put(INDICES), N, LOW),
    "from_elias_fano": lambda put: codes.from_elias_fano(put(codes.elias_fano(INDICES, N, LOW)), N, 40, LOW),
    "rice": lambda put: codes.rice(put(INDICES), N, LOW),
    "from_rice": lambda put: codes.from_rice(put(codes.rice(INDICES, N, LOW)), N, 40, LOW),
}

# Kernels whose result has a length that the values decide, or is a number for the host.
DATA_DEPENDENT = {
    "all_finite": 1,
    "ascending_in_range": 3,
    "feedback_gaussiank": 1,
    "feedback_threshold": 1,
    "gaussiank": 1,
    "gspar_budget": 12,
    "gspar_probabilities": 1,
    "gspar_sample": 2,
    "laq_apply": 2,
    "laq_norms": 2,
    "laq_quantise": 2,
    "rice": 1,
    "select_feedback_gaussiank": 1,
    "select_feedback_threshold": 1,
    "threshold": 1,
}
"""How often at most the host waits for them; for all others never."""
