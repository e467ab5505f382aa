"""Index codes in plain torch: every step is a whole-tensor operation, so it runs on any device."""

import torch
from torch import Tensor

INDEX_BITS = 2**31 - 1
_SIGN_BIT = -(2**31)


def bitmap(indices: Tensor, n: int) -> Tensor:
    return _pack_set_bits(indices.long(), (n + 7) // 8)


def from_bitmap(code: Tensor) -> Tensor:
    return _set_bits(code).to(torch.int32)


def elias_fano(indices: Tensor, n: int, low: int) -> Tensor:
    wide = indices.long()
    position = torch.arange(wide.numel(), device=wide.device)
    unary = _pack_set_bits((wide >> low) + position, (wide.numel() + (n >> low) + 8) // 8)
    return torch.cat([_pack_low_bits(wide, low), unary])


def from_elias_fano(code: Tensor, k: int, low: int, plain: int) -> Tensor | None:
    ones = _set_bits(code[plain:])
    if ones.numel() != k:
        return None
    high = ones - torch.arange(k, device=code.device)
    if k and (int(high.min()) < 0 or int(high.max()) >= 2**31 >> low):
        return None
    return ((high << low) | _unpack_low_bits(code[:plain], k, low)).to(torch.int32)


def rice(marked: Tensor, n: int, low: int, signed: int) -> Tensor:
    index = marked.long() & INDEX_BITS
    gap = index.diff(prepend=index.new_full((1,), -1)) - 1
    field = (gap & ((1 << low) - 1)) | ((marked < 0).long() * signed << low)
    ones = ((gap >> low) + 1).cumsum(0) - 1
    unary = _pack_set_bits(ones, (int(ones[-1]) + 8) // 8 if index.numel() else 0)
    return torch.cat([_pack_low_bits(field, low + signed), unary])


def from_rice(code: Tensor, n: int, k: int, low: int, signed: int, plain: int) -> Tensor | None:
    ones = _set_bits(code[plain:])
    if ones.numel() != k or (int(ones[-1]) // 8 if k else -1) != code.numel() - plain - 1:
        return None
    high = ones.diff(prepend=ones.new_full((1,), -1)) - 1
    field = _unpack_low_bits(code[:plain], k, low + signed)
    index = (((high << low) | (field & ((1 << low) - 1))) + 1).cumsum(0) - 1
    if k and int(index[-1]) >= n:
        return None
    return (index | ((field >> low) * _SIGN_BIT)).to(torch.int32)


def static_from_rice(code: Tensor, k: int, low: int, signed: int, plain: int) -> Tensor:
    """`from_rice` in the same way: all are -1 if the code is not one of k indices."""
    ones = _some_set_bits(code[plain:], k)
    high = ones.diff(prepend=ones.new_full((1,), -1)) - 1
    field = _unpack_low_bits(code[:plain], k, low + signed)
    index = (((high << low) | (field & ((1 << low) - 1))) + 1).cumsum(0) - 1
    right = (ones[-1] // 8 == code.numel() - plain - 1) & (ones[-1] >= 0) & (index[-1] < INDEX_BITS)
    return torch.where(right, index | ((field >> low) * _SIGN_BIT), -1).to(torch.int32)


def _pack_set_bits(positions: Tensor, length: int) -> Tensor:
    bits = torch.zeros(length * 8, dtype=torch.uint8, device=positions.device)
    bits[positions] = 1
    return _pack(bits)


def _set_bits(code: Tensor) -> Tensor:
    return _unpack(code).nonzero().view(-1)


def _some_set_bits(code: Tensor, k: int) -> Tensor:
    """Where the k set bits are; all -1 if there is another number of them. Nobody waits for the number."""
    bits = _unpack(code).long()
    # The k-th goes to place k - 1, those behind it and all unset bits to a place that is cut off.
    place = torch.where(bits == 1, bits.cumsum(0) - 1, k).clamp(max=k)
    found = torch.full((k + 1,), -1, dtype=torch.int64, device=code.device)
    found.scatter_(0, place, torch.arange(bits.numel(), device=code.device))
    return torch.where(bits.sum() == k, found[:k], -1)


def static_from_bitmap(code: Tensor, k: int) -> Tensor:
    """`from_bitmap` of k indices, without a check: all are -1 if the code is not one of k indices."""
    return _some_set_bits(code, k).to(torch.int32)


def static_from_elias_fano(code: Tensor, k: int, low: int, plain: int) -> Tensor:
    """`from_elias_fano` in the same way."""
    high = _some_set_bits(code[plain:], k) - torch.arange(k, device=code.device)
    fits = (high >= 0) & (high <= 2**31 >> low)
    index = (high << low) | _unpack_low_bits(code[:plain], k, low)
    return torch.where((fits & (index < 2**31)).all(), index, -1).to(torch.int32)


def _pack_low_bits(values: Tensor, low: int) -> Tensor:
    shifts = torch.arange(low, device=values.device)
    bits = ((values[:, None] >> shifts) & 1).to(torch.uint8).view(-1)
    padded = torch.zeros((bits.numel() + 7) // 8 * 8, dtype=torch.uint8, device=values.device)
    padded[: bits.numel()] = bits
    return _pack(padded)


def _unpack_low_bits(code: Tensor, k: int, low: int) -> Tensor:
    shifts = torch.arange(low, device=code.device)
    bits = _unpack(code)[: k * low].view(k, low).long()
    return (bits << shifts).sum(1)


def _pack(bits: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)


def _unpack(code: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=code.device)
    return ((code[:, None] >> shifts) & 1).view(-1)
