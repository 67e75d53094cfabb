"""Operators that move elements."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.pcg.aten_cases.case import INF, Case, case, flags, ints, real

STRUCTURE: dict[str, list[Case]] = {
    "view": [
        case(lambda x: x.view(4, 3), real(3, 4)),
        case(lambda x: x.view(2, -1), real(3, 4)),
        case(lambda x: x.reshape(-1), real(3, 4)),
        case(lambda x: x.flatten(1), real(2, 3, 4)),
        case(lambda x: x.flatten(), real()),
        case(lambda x: x.unflatten(-1, (2, -1)), real(3, 4)),
        case(lambda x: x.view(0, 3), real(0, 3)),
        case(lambda x, y: x.view_as(y), real(3, 4), real(2, 6)),
        case(lambda x: x.view(1), real()),
    ],
    "_unsafe_view": [
        case(lambda x: x.T.reshape(-1), real(3, 4)),
        case(lambda x: x.transpose(0, 1).flatten(1), real(2, 3, 4)),
    ],
    "unsqueeze": [
        case(lambda x: x.unsqueeze(0), real(3)),
        case(lambda x: x.unsqueeze(-1), real(3, 4)),
        case(lambda x: x[:, None, ..., None], real(3, 4)),
        case(lambda x: x.unsqueeze(-1), real()),
    ],
    "squeeze": [
        case(lambda x: x.squeeze(), real(1, 3, 1)),
        case(lambda x: x.squeeze(-1), real(1, 3, 1)),
        case(lambda x: x.squeeze(1), real(1, 3, 1)),
        case(lambda x: x.squeeze((0, -1)), real(1, 3, 1)),
        case(lambda x: x.squeeze(()), real(1, 3)),
        case(lambda x: x.squeeze(0), real()),
    ],
    "permute": [
        case(lambda x: x.permute(2, 0, 1), real(2, 3, 4)),
        case(lambda x: x.permute(-1, 0, -2), real(2, 3, 4)),
        case(lambda x: x.movedim(0, -1), real(2, 3, 4)),
        case(lambda x: x.permute(()), real()),
        case(lambda x: x.T, real(2, 3)),
    ],
    "transpose": [
        case(lambda x: x.transpose(0, -1), real(2, 3, 4)),
        case(lambda x: x.mT, real(2, 3, 4)),
        case(lambda x: x.transpose(0, 0), real()),
        case(lambda x: x.swapaxes(1, 2), real(2, 3, 4)),
    ],
    "t": [case(lambda x: x.t(), real(2, 3)), case(lambda x: x.t(), real(3))],
    "expand": [
        case(lambda x: x.expand(3, 4), real(4)),
        case(lambda x: x.expand(2, -1, 4), real(3, 1)),
        case(lambda x: x.expand(-1, -1), real(3, 4)),
        case(lambda x: x.expand(2, 3), real()),
        case(lambda x, y: x.expand_as(y), real(3, 1), real(2, 3, 4)),
        case(torch.broadcast_tensors, real(3, 1), real(2, 1, 4)),
    ],
    "repeat": [
        case(lambda x: x.repeat(2, 3), real(3, 4)),
        case(lambda x: x.repeat(2, 1, 3), real(4)),
        case(lambda x: x.tile(2), real(3, 4)),
        case(lambda x: x.repeat(1, 1), real(3, 4)),
    ],
    "copy": [
        case(lambda x, y: x.clone().copy_(y), real(3, 4), real(4)),
        case(lambda x, y: x.clone().copy_(y), real(4), ints(5, 4)),
        case(lambda x, y: x.clone().copy_(y), ints(5, 4), real(4) * 3),
    ],
    "flip": [
        case(lambda x: x.flip(0), real(3, 4)),
        case(lambda x: x.flip(-1, 0), real(3, 4)),
        case(lambda x: x.flip(()), real(3, 4)),
    ],
    "slice": [
        case(lambda x: x[1:], real(4)),
        case(lambda x: x[:, :-1], real(3, 4)),
        case(lambda x: x[-3:-1], real(4)),
        case(lambda x: x[1::2], real(6)),
        case(lambda x: x[..., ::3], real(2, 7)),
        case(lambda x: x[2:1], real(4)),
        case(lambda x: x[-9:9], real(4)),
        case(lambda x: x[1:5:3, 1:3], real(6, 4)),
        case(lambda x: x.narrow(1, -2, 2), real(3, 4)),
        case(lambda x: x.tensor_split(3, -1), real(2, 5)),
        case(torch.diff, real(3, 4)),
        case(lambda x, y: torch.diff(x, 2, 0, prepend=y), ints(9, 4), ints(9, 2)),
        case(torch.diff, flags(5)),
    ],
    "select": [
        case(lambda x: x[1], real(3, 4)),
        case(lambda x: x[:, -1], real(3, 4)),
        case(lambda x: x.select(-1, 0), real(3, 4)),
        case(lambda x: x[-1, 2], real(3, 4)),
    ],
    "split": [
        case(lambda x: x.split(2), real(5, 3)),
        case(lambda x: x.split(2, -1), real(2, 4)),
        case(lambda x: x.chunk(3, 1), real(2, 7)),
        case(lambda x: x.chunk(4), real(6)),
        case(lambda x: x.chunk(5), real(3)),
        case(lambda x: x.split(3), real(0, 2)),
    ],
    "unsafe_split": [case(lambda x: x.unsafe_split(2), real(5, 3)), case(lambda x: x.unsafe_chunk(2, -1), real(2, 4))],
    "unsafe_split_with_sizes": [case(lambda x: x.unsafe_split_with_sizes([1, 3, 1]), real(5, 3))],
    "split_with_sizes": [
        case(lambda x: x.split([1, 3, 1]), real(5, 3)),
        case(lambda x: x.split([2, 0, 2], -1), real(3, 4)),
    ],
    "unbind": [case(lambda x: x.unbind(), real(3, 4)), case(lambda x: x.unbind(-1), real(3, 4))],
    "cat": [
        case(lambda x, y: torch.cat([x, y]), real(2, 3), real(4, 3)),
        case(lambda x, y: torch.cat([x, y, x], -1), real(3, 2), real(3, 4)),
        case(lambda x: torch.cat([x]), real(3)),
        case(lambda x, y: torch.cat([x, y]), ints(5, 3), real(2)),
        case(lambda x: torch.cat([x.new_zeros(0), x]), real(2, 3)),
        case(lambda x: torch.cat([x[:, :2].exp(), x[:, 3:]], 1), real(2, 3)),
        case(lambda x: torch.cat([x[:, 3:], x[:, 3:].exp()], -1), real(2, 3)),
        case(lambda x: torch.concat([x, x], 1), real(2, 3)),
        case(lambda x: torch.hstack([x, x]), real(2, 3)),
        case(lambda x: torch.cat([x[:0], x]), real(3)),
        case(lambda x, y: torch.cat([x, y]), flags(3), ints(5, 2)),
    ],
    "stack": [
        case(lambda x, y: torch.stack([x, y]), real(3), real(3)),
        case(lambda x, y: torch.stack([x, y, x], -1), real(3, 4), real(3, 4)),
        case(lambda x, y: torch.stack([x, y], -2), real(3), ints(5, 3)),
    ],
    "tril": [
        case(torch.tril, real(3, 5)),
        case(lambda x: x.tril(-1), real(2, 4, 3)),
        case(lambda x: torch.ones_like(x).bool().tril(2), real(4, 4)),
    ],
    "triu": [
        case(torch.triu, real(3, 5)),
        case(lambda x: x.triu(1), real(2, 4, 3)),
        case(lambda x: x.triu(-2), ints(5, 4, 4)),
        case(lambda x: (x.new_ones(3, 3) * -INF).triu(1), real(1)),
    ],
    "roll": [
        case(lambda x: x.roll(1, 0), real(3, 4)),
        case(lambda x: x.roll((-1, 5), (0, -1)), real(3, 4)),
        case(lambda x: x.roll(3, 0), real(3, 4)),
    ],
    "slice_scatter": [
        case(lambda x, y: torch.slice_scatter(x, y, 1, 1, 3), real(3, 4), real(3, 2)),
        case(lambda x, y: x.slice_scatter(y, 0, -2), real(3, 4), real(2, 4)),
        case(lambda x, y: x.slice_scatter(y, 0, 2, 1), real(3, 4), real(0, 4)),
        case(lambda x, y: x.slice_scatter(y), real(3), real(3)),
    ],
    "select_scatter": [
        case(lambda x, y: x.select_scatter(y, 1, -2), real(3, 4), real(3)),
        case(lambda x, y: x.select_scatter(y, -2, 0), real(3, 4), real(4)),
    ],
    "constant_pad_nd": [
        case(lambda x: F.pad(x, (1, 2)), real(3, 4)),
        case(lambda x: F.pad(x, (0, 0, 1, 0), value=3.0), real(3, 4)),
        case(lambda x: F.pad(x, (1, -1)), real(3, 4)),
        case(lambda x: F.pad(x, (-1, -2)), real(3, 5)),
        case(lambda x: F.pad(x, (1, 1), value=-INF), real(3)),
        case(lambda x: F.pad(x, (1, 1), value=5), ints(5, 3)),
        case(lambda x: F.pad(x, (0, 1), value=1), flags(3)),
        case(lambda x: F.pad(x, (0, 0)), real(3)),
    ],
    "diagonal": [
        case(torch.diagonal, real(3, 4)),
        case(lambda x: x.diagonal(1, 2, 0), real(3, 2, 4)),
        case(lambda x: x.diagonal(-2, -1, -2), real(2, 3, 5)),
    ],
    "diag_embed": [
        case(torch.diag_embed, real(2, 3)),
        case(lambda x: torch.diag_embed(x, 1, 0, 2), real(2, 3)),
        case(lambda x: torch.diag_embed(x, -2), real(3)),
    ],
}
