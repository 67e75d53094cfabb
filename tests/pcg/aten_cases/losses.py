"""Losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tests.pcg.aten_cases.case import Case, case, ints, positive, real, tensor

ENTROPY: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"ignore_index": 2},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "ignore_index": 2},
    {"label_smoothing": 0.2, "reduction": "sum", "ignore_index": 1},
]


def entropy(logits: tuple[int, ...], target: Tensor, **options: Any) -> Case:
    return case(lambda x, t: F.cross_entropy(x, t, **options), real(*logits), target)


def weighted_entropy(logits: Tensor, target: Tensor, **options: Any) -> Case:
    weight = positive(logits.shape[1])
    return case(lambda x, t, w: F.cross_entropy(x, t, w.detach(), **options), logits, target, weight)


LOSSES: dict[str, list[Case]] = {
    "cross_entropy_loss": [
        *(entropy((6, 4), tensor(0, 2, 1, 3, 2, 1), **o) for o in ENTROPY),
        *(entropy((2, 4, 5), ints(4, 2, 5), **o) for o in ENTROPY[:4]),
        entropy((4,), ints(4)),
        entropy((3, 4), tensor(-100, 1, -100)),
        entropy((3, 4), tensor(-100, -100, -100)),
        entropy((3, 4), tensor(-1, 1, 2), ignore_index=-1),
        entropy((2, 4, 3, 5), ints(4, 2, 3, 5)),
        *(weighted_entropy(real(6, 4), tensor(0, 2, 1, 3, 2, 1), **o) for o in ENTROPY),
        *(weighted_entropy(real(2, 4, 5), ints(4, 2, 5), **o) for o in ENTROPY[3:]),
        weighted_entropy(real(3, 4), tensor(-100, 1, -100)),
        weighted_entropy(real(3, 4), tensor(-1, 1, 2), ignore_index=-1),
    ],
    "binary_cross_entropy_with_logits": [
        case(lambda x, t, r=r: F.binary_cross_entropy_with_logits(x, t, reduction=r), real(3, 4), positive(3, 4) - 0.5)
        for r in ("mean", "sum", "none")
    ]
    + [
        case(
            lambda x, t, w, p, o=o: F.binary_cross_entropy_with_logits(
                x, t, **{name: value.detach() for name, value in {"weight": w, "pos_weight": p}.items() if name in o}
            ),
            real(3, 4),
            positive(3, 4) - 0.5,
            positive(4),
            positive(4),
        )
        for o in (("weight",), ("pos_weight",), ("weight", "pos_weight"))
    ],
    "mse_loss": [
        *(
            case(lambda x, y, r=r: F.mse_loss(x, y, reduction=r), real(3, 4), real(3, 4))
            for r in ("mean", "sum", "none")
        ),
        case(F.mse_loss, real(), real()),
    ],
}
