"""Encoders and decoders of what is sent, by the rows of `pcg.encodings`, in plain torch.

Encoded values are bytes: [parts, bytes], where each part has the codes of its blocks, and then their magnitudes. The
last block of a part is filled with zeros. All arithmetic is in float32, or in float64 where the values are that.

Nothing is hidden. A block with a NaN is all NaN. In a block with an infinity but no NaN, infinities stay, and the rest
becomes infinite or NaN. Zeros stay zeros, and so does the largest magnitude of a block, unless it is so small that the
factor that makes codes of values would not be finite.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwright.pcg.encodings import BLOCK, ENCODED_TOGETHER, Encoding, magnitude_bytes

_HALF = BLOCK // 2
_TOGETHER = ENCODED_TOGETHER // BLOCK


def encode(values: Tensor, encoding: Encoding) -> Tensor:
    """Return [parts, bytes], from contiguous values [parts, elements] of any float dtype."""
    num_parts, num_elements = values.shape
    sent = values.new_empty(num_parts, encoding.num_bytes(num_elements, _name(values.dtype)), dtype=torch.uint8)
    codes, magnitudes = _fields(sent, encoding, values.dtype)
    whole = num_elements // BLOCK
    if whole:
        blocks = values[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))
        for stretch in _stretches(blocks, codes[:, :whole], magnitudes[:, :whole]):
            _encode(*stretch, encoding)
    if rest := num_elements - whole * BLOCK:
        last = pad(values[:, whole * BLOCK :], (0, BLOCK - rest)).unsqueeze(1)
        _encode(last, codes[:, whole:], magnitudes[:, whole:], encoding)
    return sent


def decode(sent: Tensor, encoding: Encoding, into: Tensor) -> None:
    """Write what `encode` was given into contiguous [parts, elements], each within `Encoding.bound`."""
    codes, magnitudes = _fields(sent, encoding, into.dtype)
    whole = into.shape[1] // BLOCK
    if whole:
        blocks = into[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))
        for stretch in _stretches(codes[:, :whole], magnitudes[:, :whole], blocks):
            _decode(*stretch, encoding)
    if rest := into.shape[1] - whole * BLOCK:
        last = into.new_empty(len(into), 1, BLOCK)
        _decode(codes[:, whole:], magnitudes[:, whole:], last, encoding)
        into[:, whole * BLOCK :] = last[:, 0, :rest]


def _fields(sent: Tensor, encoding: Encoding, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return views of the codes [parts, blocks, bytes] and of the magnitudes [parts, blocks]."""
    code_bytes, item_bytes = BLOCK * encoding.bits // 8, magnitude_bytes(_name(dtype))
    num_blocks = sent.shape[1] // (code_bytes + item_bytes)
    codes = sent[:, : num_blocks * code_bytes].unflatten(1, (num_blocks, code_bytes))
    return codes, sent[:, num_blocks * code_bytes :].view(_computed(dtype))


def _stretches(*tensors: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield so many blocks [parts, blocks, …] of some tensors at a time that what is made of them takes little room."""
    each = max(1, _TOGETHER // len(tensors[0]))
    yield from zip(*(tensor.split(each, 1) for tensor in tensors), strict=True)


def _encode(blocks: Tensor, codes: Tensor, magnitudes: Tensor, encoding: Encoding) -> None:
    """Write the codes and the magnitudes of [parts, blocks, BLOCK]."""
    values = blocks.to(magnitudes.dtype)
    torch.maximum(values.amax(-1), values.amin(-1).neg_(), out=(most := torch.empty_like(magnitudes)))
    most_of_all = torch.finfo(most.dtype).max
    magnitudes.copy_(most.clamp_(min=2 * encoding.largest / most_of_all))
    quotients = values * (encoding.largest / most.clamp_(max=most_of_all)).unsqueeze(-1)
    quotients.clamp_(-encoding.largest, encoding.largest)  # infinities
    _CODERS[encoding.name][0](quotients, codes)


def _decode(codes: Tensor, magnitudes: Tensor, into: Tensor, encoding: Encoding) -> None:
    values = into if into.dtype == magnitudes.dtype else torch.empty_like(into, dtype=magnitudes.dtype)
    _CODERS[encoding.name][1](codes, values)
    values.div_(encoding.largest).mul_(magnitudes.unsqueeze(-1))  # the largest one is itself again
    if values is not into:
        into.copy_(values)


def _to_int8(quotients: Tensor, codes: Tensor) -> None:
    codes.view(torch.int8).copy_(quotients.round_())


def _of_int8(codes: Tensor, values: Tensor) -> None:
    values.copy_(codes.view(torch.int8))


def _to_int4(quotients: Tensor, codes: Tensor) -> None:
    """Pack a block's first half in the low bits, its second half in the high bits."""
    low, high = quotients.round_().to(torch.int8).split(_HALF, -1)
    codes.view(torch.int8).copy_(high.bitwise_left_shift_(4).bitwise_or_(low.bitwise_and_(15)))


def _of_int4(codes: Tensor, values: Tensor) -> None:
    low, high = values.split(_HALF, -1)
    low.copy_((codes.view(torch.int8) << 4) >> 4)
    high.copy_(codes.view(torch.int8) >> 4)


def _to_fp8(quotients: Tensor, codes: Tensor) -> None:
    codes.view(torch.float8_e4m3fn).copy_(quotients)


def _of_fp8(codes: Tensor, values: Tensor) -> None:
    values.copy_(codes.view(torch.float8_e4m3fn))


_CODERS = {"int8": (_to_int8, _of_int8), "int4": (_to_int4, _of_int4), "fp8": (_to_fp8, _of_fp8)}
"""By encoding: quotients to codes, and codes to quotients."""


def _computed(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
