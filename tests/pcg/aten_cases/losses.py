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


SMOOTH: list[dict[str, Any]] = [{}, {"beta": 0.4}, {"reduction": "sum"}, {"reduction": "none"}]
HUBER: list[dict[str, Any]] = [{}, {"delta": 0.4}, {"delta": 2.0, "reduction": "none"}]
LIKELIHOOD: list[dict[str, Any]] = [{}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 2}]
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
        *(entropy((6, 4), tensor(0, 2, 1, 3, 2, 1), reduction="none", **o) for o in ENTROPY[2:5]),
        entropy((4,), ints(4), reduction="none"),
        weighted_entropy(real(2, 4, 5), ints(4, 2, 5), reduction="none", label_smoothing=0.1),
        *(entropy((3, 4), positive(3, 4), reduction=r, label_smoothing=0.1) for r in ("mean", "sum", "none")),
        entropy((2, 3, 4), positive(2, 3, 4)),
        weighted_entropy(real(3, 4), positive(3, 4)),
    ],
    "nll_loss_forward": [
        *(case(lambda x, t, o=o: F.nll_loss(x, t, **o), real(5, 4), tensor(0, 2, 1, 3, 2)) for o in LIKELIHOOD),
        case(lambda x, t, w: F.nll_loss(x, t, w.detach()), real(3, 4), tensor(1, -100, 2), positive(4)),
        case(F.nll_loss, real(4), ints(4)),
    ],
    "nll_loss2d_forward": [
        *(case(lambda x, t, o=o: F.nll_loss(x, t, **o), real(2, 4, 3, 5), ints(4, 2, 3, 5)) for o in LIKELIHOOD),
        case(F.nll_loss, real(2, 4, 3), ints(4, 2, 3)),
    ],
    "binary_cross_entropy": [
        *(
            case(
                lambda x, t, r=r: F.binary_cross_entropy(x, t, reduction=r), positive(3, 4) - 0.5, positive(3, 4) - 0.5
            )
            for r in ("mean", "sum", "none")
        ),
        case(F.binary_cross_entropy, tensor(0.0, 1.0, 1.0).double(), tensor(0.0, 1.0, 0.0).double()),
        case(
            lambda x, t, w: F.binary_cross_entropy(x, t, w.detach()),
            positive(3, 4) - 0.5,
            positive(3, 4) - 0.5,
            positive(4),
        ),
    ],
    "smooth_l1_loss": [case(lambda x, y, o=o: F.smooth_l1_loss(x, y, **o), real(3, 4), real(3, 4)) for o in SMOOTH],
    "huber_loss": [case(lambda x, y, o=o: F.huber_loss(x, y, **o), real(3, 4), real(3, 4)) for o in HUBER],
    "soft_margin_loss": [case(lambda x, y: F.soft_margin_loss(x, y.detach().sign()), real(3, 4), real(3, 4))],
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
