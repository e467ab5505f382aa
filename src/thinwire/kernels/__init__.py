"""Fused kernels: compiled for CPU tensors and, with Triton, for GPUs; plain torch for everything else.

All tensors are flat and contiguous, indices are ascending int32, seeds are 64-bit integers. Randomness comes
from a counter-based generator, so results depend on the seed alone, not on threads, and are the same bits on
every backend. Importing this module compiles nothing; `prepare` does it ahead of the first step.
"""

from thinwire.errors import PayloadError
from thinwire.kernels.a2sgd import a2sgd_apply, two_means
from thinwire.kernels.adam import adam_keep, adam_momentum
from thinwire.kernels.chunks import PerChunk, chunk_topk, feedback_chunk_topk, select_feedback_chunk_topk
from thinwire.kernels.dct import Chunks, dct, inverse_dct
from thinwire.kernels.dispatch import use_reference
from thinwire.kernels.feedback import (
    commit_feedback,
    feedback_block,
    feedback_gaussiank,
    feedback_threshold,
    feedback_topk,
    select_feedback_gaussiank,
    select_feedback_threshold,
    select_feedback_topk,
)
from thinwire.kernels.finite import all_finite, all_flags, finite_flag
from thinwire.kernels.gaussian import gaussiank
from thinwire.kernels.gspar import gspar_budget, gspar_probabilities, gspar_sample
from thinwire.kernels.laq import laq_apply, laq_norms, laq_quantise
from thinwire.kernels.natural import natural_dequantise, natural_mean, natural_quantise
from thinwire.kernels.preparation import prepare
from thinwire.kernels.quantisation import dequantise, dequantise_mean, quantise
from thinwire.kernels.rotation import block_of, rotate, rotate_back
from thinwire.kernels.scalecom import chunk_argmax, chunk_argmax_sum
from thinwire.kernels.scatter import scatter_mean
from thinwire.kernels.selection import threshold, topk
from thinwire.kernels.sign import (
    SIGN_TILE,
    onebit_mean,
    onebit_pack,
    sign_majority,
    sign_mean,
    sign_means,
    sign_pack,
    sign_pack_mean,
    sign_pack_means,
    sign_scales,
    sign_unpack,
)
from thinwire.kernels.sign_feedback import (
    commit_signs,
    feedback_signs,
    lost_by_signs,
    signs_again,
    signs_joined,
)
from thinwire.kernels.sketch import sketch_insert, sketch_query, sketch_query_topk
from thinwire.kernels.ternary import ternary_quantise

__all__ = [
    "SIGN_TILE",
    "Chunks",
    "PayloadError",
    "PerChunk",
    "a2sgd_apply",
    "adam_keep",
    "adam_momentum",
    "all_finite",
    "all_flags",
    "block_of",
    "chunk_argmax",
    "chunk_argmax_sum",
    "chunk_topk",
    "commit_feedback",
    "commit_signs",
    "dct",
    "dequantise",
    "dequantise_mean",
    "feedback_block",
    "feedback_chunk_topk",
    "feedback_gaussiank",
    "feedback_signs",
    "feedback_threshold",
    "feedback_topk",
    "finite_flag",
    "gaussiank",
    "gspar_budget",
    "gspar_probabilities",
    "gspar_sample",
    "inverse_dct",
    "laq_apply",
    "laq_norms",
    "laq_quantise",
    "lost_by_signs",
    "natural_dequantise",
    "natural_mean",
    "natural_quantise",
    "onebit_mean",
    "onebit_pack",
    "prepare",
    "quantise",
    "rotate",
    "rotate_back",
    "scatter_mean",
    "select_feedback_chunk_topk",
    "select_feedback_gaussiank",
    "select_feedback_threshold",
    "select_feedback_topk",
    "sign_majority",
    "sign_mean",
    "sign_means",
    "sign_pack",
    "sign_pack_mean",
    "sign_pack_means",
    "sign_scales",
    "sign_unpack",
    "signs_again",
    "signs_joined",
    "sketch_insert",
    "sketch_query",
    "sketch_query_topk",
    "ternary_quantise",
    "threshold",
    "topk",
    "two_means",
    "use_reference",
]
