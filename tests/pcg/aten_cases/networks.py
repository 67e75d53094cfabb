"""Normalization, pooling, dropout and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.pcg.aten_cases.case import Case, case, double, flags, real, tensor

aten = torch.ops.aten


def normed(x: Tensor, module: nn.Module, train: bool = True) -> Case:
    return case(double(module, train), x)


def attend(q: tuple[int, ...], k: tuple[int, ...], *masks: Tensor, width: int | None = None, **options: Any) -> Case:
    values = (*k[:-1], width or k[-1])

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    return case(run, real(*q), real(*k), real(*values), *masks)


def layer(module: nn.Module, x: Tensor, *, train: bool = True) -> Case:
    return case(double(module, train), x)


NETWORKS: dict[str, list[Case]] = {
    "native_dropout": [
        case(lambda x: F.dropout(x, 1.0, True), real(3)),
        case(lambda x: torch.native_dropout(x, 0.5, False)[0], real(3)),
    ],
    "bernoulli.p": [case(lambda x: x * torch.empty_like(x).bernoulli_(0.5).ge(0), real(3, 4))],
    "layer_norm": [
        case(lambda x: F.layer_norm(x, (4,)), real(2, 3, 4)),
        case(lambda x, w: F.layer_norm(x, (3, 4), w), real(2, 3, 4), real(3, 4)),
        case(lambda x, w, c: F.layer_norm(x, (4,), w, c, 0.1), real(3, 4), real(4), real(4)),
    ],
    "rms_norm": [
        case(lambda x: F.rms_norm(x, (4,)), real(3, 4) * 1e-6),
        case(lambda x, w: F.rms_norm(x, (4,), w, 1e-3), real(3, 4), real(4)),
        case(lambda x: F.rms_norm(x.float(), (4,)), real(3, 4) * 1e-3),
        case(lambda x: F.rms_norm(x, (3, 4)), real(2, 3, 4)),
    ],
    "_weight_norm_interface": [
        case(lambda v, g: aten._weight_norm_interface(v, g, 0)[0], real(4, 3, 2), real(4, 1, 1)),
        case(lambda v, g: aten._weight_norm_interface(v, g, 1)[0], real(3, 4), real(1, 4)),
    ],
    "native_group_norm": [
        normed(real(2, 6, 3), nn.GroupNorm(3, 6)),
        normed(real(2, 6, 3, 5), nn.GroupNorm(2, 6, affine=False)),
        normed(real(2, 6), nn.GroupNorm(3, 6)),
    ],
    "_native_batch_norm_legit_functional": [
        normed(real(4, 3, 2, 5), nn.BatchNorm2d(3)),
        normed(real(4, 3), nn.BatchNorm1d(3, affine=False)),
        normed(real(4, 3, 5), nn.BatchNorm1d(3, momentum=0.3, eps=0.01)),
    ],
    "_native_batch_norm_legit.no_stats": [
        normed(real(4, 3, 2, 5), nn.BatchNorm2d(3, track_running_stats=False)),
        normed(real(4, 3), nn.BatchNorm1d(3, affine=False, track_running_stats=False), train=False),
    ],
    "_native_batch_norm_legit_no_training": [
        normed(real(4, 3, 2, 5), nn.BatchNorm2d(3), train=False),
        normed(real(4, 3), nn.BatchNorm1d(3, affine=False), train=False),
    ],
    "scaled_dot_product_attention": [
        attend((2, 4, 5, 8), (2, 4, 6, 8)),
        attend((2, 4, 5, 8), (2, 4, 6, 8), width=3),
        attend((2, 4, 5, 8), (2, 4, 5, 8), is_causal=True),
        attend((2, 4, 5, 8), (2, 4, 6, 8), is_causal=True),
        attend((2, 4, 6, 8), (2, 4, 5, 8), is_causal=True),
        attend((2, 4, 5, 8), (2, 2, 6, 8), enable_gqa=True),
        attend((2, 4, 5, 8), (2, 2, 5, 8), is_causal=True, enable_gqa=True, scale=0.3),
        attend((2, 4, 5, 8), (2, 1, 6, 8)),
        attend((3, 5, 8), (3, 6, 8)),
        attend((7, 2, 4, 5, 8), (7, 2, 4, 6, 8)),
        attend((2, 4, 5, 8), (2, 4, 6, 8), flags(2, 4, 5, 6).index_fill(-1, tensor(0), True)),
        attend((2, 4, 5, 8), (2, 4, 6, 8), flags(2, 1, 1, 6).index_fill(-1, tensor(0), True)),
        attend((2, 4, 5, 8), (2, 4, 6, 8), flags(5, 6).index_fill(-1, tensor(0), True), scale=1.0),
        attend((2, 4, 5, 8), (2, 4, 6, 8), real(4, 5, 6)),
        attend((2, 4, 5, 8), (2, 4, 6, 8), real(2, 1, 5, 6)),
        attend((2, 4, 5, 8), (2, 2, 6, 8), real(2, 4, 1, 6), enable_gqa=True),
        attend((2, 4, 5, 8), (2, 4, 6, 8), dropout_p=0.0),
        attend((2, 4, 5, 8), (2, 4, 5, 8), dropout_p=1.0, is_causal=True),
        attend((2, 4, 5, 8), (2, 2, 6, 8), flags(5, 6).index_fill(-1, tensor(0), True), dropout_p=1.0, enable_gqa=True),
        attend((2, 4, 5, 8), (2, 4, 6, 8), real(5, 6), dropout_p=1.0),
    ],
    "rrelu_with_noise_functional": [
        case(lambda x: F.rrelu(x, 0.1, 0.4), real(3, 4)),
        case(lambda x: F.rrelu_(x.clone()), real(3, 4)),
    ],
    "lstm.input": [
        layer(nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), real(2, 5, 3)),
        layer(nn.LSTM(3, 4, bias=False), real(5, 2, 3)),
        layer(nn.LSTM(3, 4, 2, dropout=0.5), real(5, 2, 3), train=False),
    ],
    "gru.input": [layer(nn.GRU(3, 4, 2, bidirectional=True), real(5, 2, 3)), layer(nn.GRU(3, 4), real(5, 3))],
    "rnn_tanh.input": [layer(nn.RNN(3, 4, batch_first=True), real(2, 5, 3))],
    "rnn_relu.input": [layer(nn.RNN(3, 4, nonlinearity="relu"), real(5, 2, 3))],
}
