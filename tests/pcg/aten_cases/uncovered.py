"""Calls whose arguments no row expresses, by the operator that runs opaque instead."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.pcg.aten_cases.case import Case, case, flags, ints, real, spread, tensor
from tests.pcg.aten_cases.networks import attend

UNCOVERED: dict[str, list[Case]] = {
    "aten.div.Tensor_mode": [case(lambda x: torch.div(x, 2, rounding_mode="trunc"), ints(9, 3))],
    "aten.view.dtype": [case(lambda x: x.view(torch.int32), ints(5, 4).float())],
    "aten.bitwise_xor.Tensor": [case(torch.bitwise_xor, ints(5, 4), ints(5, 4))],
    "aten.arange.start_step": [case(lambda x: torch.arange(0, 1.5, 0.5).double() + x, real(3))],
    "aten.roll.default": [case(lambda x: x.roll(1), real(3, 4))],
    "aten.slice_scatter.default": [case(lambda x, y: x.slice_scatter(y, 0, 0, 4, 2), real(4, 3), real(2, 3))],
    "aten.min.dim": [case(lambda x: x.min(0).values, ints(50, 7))],
    "aten.argmin.default": [case(lambda x: x.argmin(0), ints(50, 7))],
    "aten.sort.default": [
        case(lambda x: x.sort(descending=True).values, flags(5)),
        case(lambda x: x.sort()[0], ints(9, 5).to(torch.uint8)),
    ],
    "aten.topk.default": [
        case(lambda x: x.topk(2, largest=False)[0], spread(5)),
        case(lambda x: x.topk(2)[0], ints(9, 5).to(torch.uint8)),
    ],
    "aten.histc.default": [case(lambda x: torch.histc(x, 4), real(5))],
    "aten.linear.default": [case(F.linear, real(2, 3), real(3))],
    "aten.conv2d.default": [case(F.conv2d, real(3, 6, 7), real(4, 3, 3, 2))],
    "aten.convolution.default": [
        case(lambda x, w: F.conv_transpose2d(x, w, groups=2), real(2, 4, 4, 5), real(4, 3, 2, 2)),
        case(lambda x, w: F.conv_transpose2d(x, w, dilation=2), real(2, 3, 4, 5), real(3, 4, 2, 2)),
        case(F.conv_transpose3d, real(2, 3, 4, 5, 6), real(3, 4, 2, 2, 2)),
    ],
    "aten.upsample_nearest1d.vec": [case(lambda x: F.interpolate(x, scale_factor=41), real(2, 3, 4))],
    "aten.embedding.default": [case(lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), real(5, 3), ints(5, 4))],
    "aten.embedding_bag.padding_idx": [
        case(lambda w, i: F.embedding_bag(i, w, mode="max"), real(5, 3), ints(5, 2, 4)),
        case(lambda w, i: F.embedding_bag(i, w, mode="sum", padding_idx=-1), real(5, 3), ints(5, 2, 4)),
        case(
            lambda w, i, n: F.embedding_bag(i, w, n, mode="sum", include_last_offset=True),
            real(5, 3),
            ints(5, 4),
            tensor(0, 1, 4),
        ),
        case(lambda w, i: F.embedding_bag(i, w, scale_grad_by_freq=True), real(5, 3), ints(5, 2, 4)),
        case(
            lambda w, i, n, s: F.embedding_bag(i, w, n, mode="sum", per_sample_weights=s),
            real(5, 3),
            ints(5, 4),
            tensor(0, 1),
            real(4),
        ),
    ],
    "aten.index.Tensor": [case(lambda x, i: x[i, :, i], real(4, 3, 5), ints(4, 2))],
    "aten.index_put.default": [
        case(
            lambda x, i, j, v: torch.ops.aten.index_put(x, [i, None, j], v),
            real(3, 2, 4),
            tensor(1, 2),
            tensor(0, 3),
            real(2, 2),
        ),
    ],
    "aten.scatter_reduce.two": [
        case(lambda x, i, y: x.scatter_reduce(0, i, y, "prod"), real(4), ints(4, 3), real(3)),
    ],
    "aten.layer_norm.default": [case(lambda x, c: F.layer_norm(x, (4,), None, c), real(3, 4), real(4))],
    "aten.max_pool2d.default": [
        case(lambda x: F.max_pool2d(x, 2, dilation=2), spread(2, 3, 6, 5)),
    ],
    "aten.max_pool2d_with_indices.default": [
        case(lambda x: F.max_pool2d(x, 2, return_indices=True), spread(2, 3, 6, 5))
    ],
    "aten.adaptive_max_pool2d.default": [case(lambda x: F.adaptive_max_pool2d(x, 2), spread(2, 3, 6, 5))],
    "aten.adaptive_avg_pool3d.default": [case(lambda x: F.adaptive_avg_pool3d(x, 2), real(2, 3, 6, 5, 4))],
    "aten._upsample_bilinear2d_aa.default": [
        case(
            lambda x: F.interpolate(x, size=(3, 4), mode="bilinear", align_corners=True, antialias=True),
            real(2, 3, 5, 6),
        )
    ],
    "aten.scaled_dot_product_attention.default": [attend((5, 8), (6, 8)), attend((2, 4, 5, 8), (1, 4, 6, 8))],
}
