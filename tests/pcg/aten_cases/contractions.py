"""Products and convolutions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.pcg.aten_cases.case import Case, case, ints, real, tensor


def grouped_mm_fallback(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    from transformers.integrations import moe

    assert moe
    return torch.ops.transformers.grouped_mm_fallback(x, w, ends)


CONTRACTIONS: dict[str, list[Case]] = {
    "linear": [
        case(F.linear, real(3, 4), real(5, 4)),
        case(F.linear, real(2, 3, 4), real(5, 4), real(5)),
        case(F.linear, real(4), real(5, 4)),
    ],
    "mm": [
        case(torch.mm, real(2, 3), real(3, 4)),
        case(torch.mm, ints(5, 2, 3), ints(5, 3, 4)),
        case(torch.mm, real(2, 0), real(0, 3)),
    ],
    "bmm": [
        case(torch.bmm, real(2, 3, 4), real(2, 4, 5)),
        case(lambda x, y: torch.einsum("bij,bkj->bik", x, y), real(2, 3, 4), real(2, 5, 4)),
    ],
    "matmul": [
        case(torch.matmul, real(2, 3), real(3, 4)),
        case(torch.matmul, real(2, 1, 3, 4), real(5, 4, 6)),
        case(torch.matmul, real(5, 3, 4), real(4, 6)),
        case(torch.matmul, real(3), real(3)),
        case(torch.matmul, real(3), real(2, 3, 4)),
        case(torch.matmul, real(2, 3, 4), real(4)),
        case(torch.matmul, real(3, 4), real(2, 4, 5)),
    ],
    "mv": [case(torch.mv, real(3, 4), real(4))],
    "dot": [case(torch.dot, real(4), real(4))],
    "addmm": [
        case(torch.addmm, real(4), real(2, 3), real(3, 4)),
        case(torch.addmm, real(2, 4), real(2, 3), real(3, 4)),
        case(lambda c, x, y: torch.addmm(c, x, y, beta=0.5), real(4), real(2, 3), real(3, 4)),
    ],
    "addmv": [case(lambda c, x, y: torch.addmv(c, x, y, beta=2, alpha=0.5), real(2), real(2, 3), real(3))],
    "addbmm": [case(lambda c, x, y: torch.addbmm(c, x, y, alpha=0.5), real(3, 5), real(2, 3, 4), real(2, 4, 5))],
    "addr": [case(lambda c, x, y: torch.addr(c, x, y, beta=0.5), real(3, 4), real(3), real(4))],
    "baddbmm": [
        case(torch.baddbmm, real(2, 3, 5), real(2, 3, 4), real(2, 4, 5)),
        case(torch.baddbmm, real(3, 1), real(2, 3, 4), real(2, 4, 5)),
        case(lambda c, x, y: torch.baddbmm(c, x, y, alpha=0.25), real(2, 1, 5), real(2, 3, 4), real(2, 4, 5)),
        case(
            lambda x, y: torch.baddbmm(torch.full((5,), torch.nan).double(), x, y, beta=0, alpha=3),
            real(2, 3, 4),
            real(2, 4, 5),
        ),
    ],
    "conv2d.default": [
        case(F.conv2d, real(2, 3, 6, 7), real(4, 3, 3, 2)),
        case(lambda x, w, c: F.conv2d(x, w, c, stride=2, padding=1), real(2, 3, 6, 7), real(4, 3, 3, 3), real(4)),
        case(
            lambda x, w: F.conv2d(x, w, stride=(1, 2), padding=(0, 1), dilation=(2, 1), groups=2),
            real(2, 4, 6, 7),
            real(6, 2, 2, 3),
        ),
        case(lambda x, w: F.conv2d(x, w, groups=4), real(2, 4, 5, 6), real(4, 1, 3, 3)),
    ],
    "convolution": [
        case(F.conv3d, real(2, 3, 4, 5, 6), real(4, 3, 2, 2, 2)),
        case(
            lambda x, w, c: F.conv3d(x, w, c, (1, 2, 1), 1, (2, 1, 1), 2),
            real(2, 4, 4, 5, 3),
            real(6, 2, 2, 2, 1),
            real(6),
        ),
        case(lambda x, w, c: F.conv2d(x, w, c, padding="same"), real(2, 3, 6, 7), real(4, 3, 3, 5), real(4)),
        case(lambda x, w: F.conv2d(x, w, padding="valid"), real(2, 3, 6, 7), real(4, 3, 3, 2)),
        case(F.conv1d, real(2, 3, 7), real(4, 3, 3), real(4)),
        case(lambda x, w: F.conv1d(x, w, stride=2, padding=2, dilation=2, groups=3), real(2, 3, 9), real(6, 1, 3)),
        case(F.conv_transpose2d, real(2, 3, 4, 5), real(3, 4, 2, 2), real(4)),
        *(
            case(
                lambda x, w, s=stride, p=padding, o=more: F.conv_transpose2d(x, w, None, s, p, o),
                real(2, 3, 4, 5),
                real(3, 4, *kernel),
            )
            for kernel, stride, padding, more in (
                ((2, 2), 2, 0, 0),
                ((4, 4), 2, 1, 0),
                ((3, 3), 2, 1, 1),
                ((3, 2), (1, 3), (2, 0), (0, 2)),
                ((1, 5), (3, 2), (0, 1), (1, 0)),
            )
        ),
        case(lambda x, w, c: F.conv_transpose1d(x, w, c, 2, 1, 1), real(2, 3, 5), real(3, 4, 3), real(4)),
    ],
    "_grouped_mm": [
        case(
            torch.ops.aten._grouped_mm,
            real(8, 16).bfloat16(),
            real(3, 16, 8).bfloat16(),
            torch.tensor([2, 2, 8], dtype=torch.int32),
        )
    ],
    "transformers::grouped_mm_fallback": [case(grouped_mm_fallback, real(8, 3), real(3, 3, 5), tensor(2, 2, 8))],
}
