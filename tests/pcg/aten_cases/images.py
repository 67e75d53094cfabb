"""Pooling, resampling, padding by what is there, patches."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.pcg.aten_cases.case import Case, case, real, spread

aten = torch.ops.aten


def resampled(mode: str, shape: tuple[int, ...], *sizes: dict[str, Any]) -> list[Case]:
    return [case(lambda x, o=o: F.interpolate(x, mode=mode, **o), real(*shape)) for o in sizes]


def padded(mode: str, *shapes: tuple[int, ...], rank: int) -> list[Case]:
    pads = (1, 2, 2, 0, 1, 1)[: 2 * rank]
    return [case(lambda x: F.pad(x, pads, mode), real(*shape)) for shape in shapes]


FINE = ({"size": (7, 3)}, {"size": (3, 9), "align_corners": True}, {"scale_factor": 1.7}, {"scale_factor": (2, 0.6)})

IMAGES: dict[str, list[Case]] = {
    "max_pool2d": [
        case(lambda x: F.max_pool2d(x, 2, ceil_mode=True), spread(2, 3, 5, 5)),
        case(lambda x: F.max_pool2d(x, (3, 2), (2, 3), 1, ceil_mode=True), spread(2, 3, 6, 8)),
        case(lambda x: F.max_pool2d(x, 2, 3, 1, ceil_mode=True), spread(2, 3, 6, 7)),
        case(lambda x: F.max_pool2d(x, 2), spread(3, 6, 5)),
        case(lambda x: F.max_pool2d(x, 2), spread(2, 3, 6, 5)),
        case(lambda x: F.max_pool2d(x, 3, 2, 1), spread(2, 3, 6, 7)),
        case(lambda x: F.max_pool2d(x, (2, 3), (1, 2)), spread(2, 3, 6, 7)),
    ],
    "max_pool2d_with_indices": [case(lambda x: F.max_pool2d(x, 2, return_indices=True)[0], spread(2, 3, 6, 5))],
    "avg_pool2d": [
        case(lambda x: F.avg_pool2d(x, 2, ceil_mode=True), real(2, 3, 5, 5)),
        case(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), real(2, 3, 6, 8)),
        case(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), real(2, 3, 6, 8)),
        case(lambda x: F.avg_pool2d(x, 2, padding=1, count_include_pad=False), real(2, 3, 6, 5)),
        case(lambda x: F.avg_pool2d(x, 2, divisor_override=3), real(2, 3, 6, 5)),
        case(lambda x: F.avg_pool2d(x, 2), real(3, 6, 5)),
        case(lambda x: F.avg_pool2d(x, 2), real(2, 3, 6, 5)),
        case(lambda x: F.avg_pool2d(x, 3, 2, 1), real(2, 3, 6, 7)),
        case(lambda x: F.avg_pool2d(x, 2, count_include_pad=False), real(2, 3, 6, 5)),
        case(lambda x: F.avg_pool2d(x, (2, 1), stride=(1, 2)), real(2, 3, 6, 5)),
    ],
    "adaptive_avg_pool2d": [
        case(lambda x: F.adaptive_avg_pool2d(x, 1), real(2, 3, 6, 5)),
        case(lambda x: F.adaptive_avg_pool2d(x, (4, 3)), real(2, 3, 6, 5)),
        case(lambda x: F.adaptive_avg_pool2d(x, (None, 2)), real(2, 3, 6, 5)),
        case(lambda x: F.adaptive_avg_pool2d(x, 1), real(3, 6, 5)),
        case(lambda x: F.adaptive_avg_pool2d(x, 2), real(3, 6, 5)),
    ],
    "upsample_nearest1d.vec": [case(lambda x: F.interpolate(x, scale_factor=3), real(2, 3, 4))],
    "upsample_nearest2d.vec": [
        case(lambda x: F.interpolate(x, scale_factor=2), real(2, 3, 4, 5)),
        case(lambda x: F.interpolate(x, size=(4, 15)), real(2, 3, 4, 5)),
        case(lambda x: F.interpolate(x, size=(6, 7)), real(2, 3, 4, 5)),
        case(lambda x: F.interpolate(x, scale_factor=1.5), real(2, 3, 4, 4)),
    ],
    "upsample_nearest3d.vec": [case(lambda x: F.interpolate(x, scale_factor=(1, 2, 3)), real(1, 2, 2, 3, 2))],
    "_adaptive_avg_pool2d": [case(lambda x: aten._adaptive_avg_pool2d(x, [4, 3]), real(2, 3, 6, 5))],
    "max_pool3d_with_indices": [
        case(lambda x: F.max_pool3d(x, 2, ceil_mode=True), spread(2, 3, 5, 4, 5)),
        case(lambda x: F.max_pool3d(x, (1, 2, 3), (2, 1, 2), (0, 1, 1)), spread(3, 3, 4, 5)),
    ],
    "avg_pool3d": [
        case(lambda x: F.avg_pool3d(x, 2, 1, 1, count_include_pad=False), real(2, 3, 3, 4, 5)),
        case(lambda x: F.avg_pool3d(x, (1, 2, 3), ceil_mode=True), real(3, 3, 5, 4)),
    ],
    "adaptive_avg_pool3d": [case(lambda x: F.adaptive_avg_pool3d(x, (1, 2, 3)), real(2, 3, 5, 4, 6))],
    "_adaptive_avg_pool3d": [case(lambda x: aten._adaptive_avg_pool3d(x, [1, 2, 3]), real(2, 3, 5, 4, 6))],
    "adaptive_max_pool2d": [
        case(lambda x: F.adaptive_max_pool2d(x, (2, 3)), spread(2, 3, 4, 6)),
        case(lambda x: F.adaptive_max_pool2d(x, 1), spread(3, 4, 6)),
    ],
    "adaptive_max_pool3d": [case(lambda x: F.adaptive_max_pool3d(x, (1, 2, 3)), spread(2, 3, 5, 4, 6))],
    "upsample_linear1d.vec": resampled("linear", (2, 3, 5), {"size": 8}, {"size": 1, "align_corners": True}),
    "upsample_bilinear2d.vec": resampled("bilinear", (2, 3, 5, 6), *FINE),
    "upsample_trilinear3d.vec": resampled("trilinear", (1, 2, 3, 4, 2), {"scale_factor": 2}),
    "upsample_bicubic2d.vec": resampled("bicubic", (2, 3, 5, 6), *FINE),
    "_upsample_bilinear2d_aa.default": resampled(
        "bilinear", (2, 3, 5, 6), *({**o, "antialias": True} for o in FINE[::2])
    ),
    "_upsample_bicubic2d_aa.default": resampled(
        "bicubic", (2, 3, 5, 6), *({**o, "antialias": True} for o in FINE[::2])
    ),
    "pixel_shuffle": [case(lambda x: F.pixel_shuffle(x, 2), real(2, 12, 3, 5))],
    "pixel_unshuffle": [case(lambda x: F.pixel_unshuffle(x, 2), real(2, 3, 4, 6))],
    "channel_shuffle": [case(lambda x: F.channel_shuffle(x, 2), real(2, 6, 3, 4))],
    "reflection_pad1d": padded("reflect", (2, 3, 5), (3, 5), rank=1),
    "reflection_pad2d": [
        *padded("reflect", (2, 3, 4, 5), rank=2),
        case(lambda x: F.pad(x, (-1, 2, 0, -1), "reflect"), real(2, 3, 4, 5)),
    ],
    "reflection_pad3d": padded("reflect", (2, 3, 4, 5, 6), rank=3),
    "replication_pad1d": padded("replicate", (2, 3, 5), rank=1),
    "replication_pad2d": padded("replicate", (2, 3, 4, 5), (3, 4, 5), rank=2),
    "replication_pad3d": padded("replicate", (2, 3, 4, 5, 6), rank=3),
    "im2col": [
        case(lambda x: F.unfold(x, (3, 2), (1, 2), 1, (2, 1)), real(2, 3, 6, 5)),
        case(lambda x: F.unfold(x, 2), real(3, 6, 5)),
    ],
    "col2im": [
        case(lambda x: F.fold(x, (6, 5), (3, 2), (1, 2), 1, (2, 1)), real(2, 18, 15)),
        case(lambda x: F.fold(x, (4, 6), 2, stride=2), real(12, 6)),
    ],
    "unfold": [
        case(lambda x: x.unfold(1, 3, 2), real(2, 7, 3)),
        case(lambda x: x.unfold(-1, 2, 2), real(2, 3, 6)),
        case(lambda x: x.unfold(0, 1, 1), real()),
    ],
    "unfold_backward": [
        case(lambda x: torch.ops.aten.unfold_backward(x, (2, 7, 3), 1, 3, 2), real(2, 3, 3, 3)),
        case(lambda x: torch.ops.aten.unfold_backward(x, (2, 3, 6), -1, 2, 2), real(2, 3, 3, 2)),
        case(lambda x: torch.ops.aten.unfold_backward(x, (5,), 0, 2, 1), real(4, 2)),
        case(lambda x: torch.ops.aten.unfold_backward(x, (2, 7), 1, 3, 2), real(1, 3, 3)),
    ],
}
