"""Lookups by integer tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.pcg.aten_cases.case import Case, case, double, flags, ints, real, spread, tensor


class Bag(nn.Module):
    """An embedding bag of ids as a matrix, or as a vector with the positions at which bags start."""

    def __init__(self, *, weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.bag, self.weighted = double(nn.EmbeddingBag(7, 3, **options)), weighted

    def forward(self, ids: Tensor, other: Tensor | None = None) -> Tensor:
        return self.bag(ids, per_sample_weights=other) if self.weighted else self.bag(ids, other)


def setting(x: Tensor, at: Any, value: Tensor) -> Tensor:
    x = x.clone()
    x[at] = value
    return x


LOOKUPS: dict[str, list[Case]] = {
    "embedding": [
        case(lambda w, i: F.embedding(i, w), real(5, 3), ints(5, 2, 4)),
        case(lambda w, i: F.embedding(i, w), real(5, 3), ints(5, 4).int()),
        case(lambda w, i: F.embedding(i, w), real(5, 3), ints(5)),
        case(lambda w, i: F.embedding(i, w, padding_idx=0), real(5, 3), tensor(0, 2, 0, 1)),
        case(lambda w, i: F.embedding(i, w, padding_idx=-1), real(5, 3), tensor(4, 2, 0, 4)),
        case(lambda w, i: F.embedding(i, w, padding_idx=-2), real(5, 3), tensor(4, 3, 3)),
        case(double(nn.Embedding(5, 3, padding_idx=2)), ints(5, 9)),
    ],
    "embedding_bag": [
        case(Bag(mode="sum"), ints(7, 2, 4)),
        case(Bag(mode="mean"), ints(7, 2, 4)),
        case(Bag(mode="sum", weighted=True), ints(7, 2, 4), real(2, 4)),
        case(Bag(mode="mean"), ints(7, 3, 1)),
        case(Bag(mode="sum"), ints(7, 6), tensor(0, 1, 1, 4)),
        case(Bag(mode="mean"), ints(7, 6), tensor(0, 4, 4)),
        case(lambda w, i: F.embedding_bag(i, w, torch.arange(0, 6, 3), mode="sum"), real(5, 2), ints(5, 6)),
        case(lambda w, i: F.embedding_bag(i, w, torch.arange(0, 4, 2), mode="sum"), real(5, 2), ints(5, 6)),
    ],
    "index": [
        case(lambda x, i: x[i], real(4, 3), ints(4, 5)),
        case(lambda x, i: x[:, i], real(3, 4), ints(4, 2, 5, low=-4)),
        case(lambda x, i: x[i], real(4, 3), tensor(-1, 0, -4)),
        case(lambda x, i, j: x[i, j], real(4, 3), ints(4, 5), ints(3, 2, 1)),
        case(lambda x, i, j: x[:, i, j], real(2, 4, 3), ints(4, 5), ints(3, 5)),
        case(lambda x, i: x[torch.arange(4), i], real(4, 3), tensor(-1, 0, 2, -3)),
        case(lambda x, i: x[torch.arange(4)[:, None], i], real(4, 3, 2), ints(3, 4, 5, low=-3)),
        case(lambda x, i, j: x[:, torch.arange(4), i, j], real(2, 4, 3, 2), ints(3, 4), ints(2, 4)),
        case(lambda x, i: x[torch.arange(4), i], real(5, 3), ints(3, 4)),
        case(lambda x, i: x[torch.arange(4), i], real(4, 3), ints(3, 1)),
        case(lambda x: x[[0, -1]], real(4, 3)),
        case(lambda x, i: x[i], flags(4), ints(4, 2)),
    ],
    "_unsafe_index": [
        case(lambda x, i, j: torch.ops.aten._unsafe_index(x, [None, i, j]), real(2, 4, 3), ints(4, 5, 1), ints(3, 2)),
    ],
    "index_select": [
        case(lambda x, i: x.index_select(1, i), real(3, 4), ints(4, 2)),
        case(lambda x, i: x.index_select(-1, i), real(3, 4), ints(4, 2).int()),
        case(lambda x, i: x.index_select(0, i), real(3, 4), ints(3)),
        case(lambda x, i: x.index_select(0, i), ints(9, 3, 4), ints(3, 5)),
    ],
    "gather": [
        case(lambda x, i: x.gather(1, i), real(3, 4), ints(4, 3, 2)),
        case(lambda x, i: x.gather(-1, i), real(3, 4), ints(4, 2, 3)),
        case(lambda x, i: x.gather(0, i), real(3, 4), ints(3, 5, 2)),
        case(lambda x, i: x.take_along_dim(i, 0), real(3, 4), ints(3, 2, 4)),
    ],
    "scatter.value": [
        case(lambda x, i: x.scatter(1, i, 1), real(3, 4), ints(4, 3, 2)),
        case(lambda x, i: x.scatter(0, i, -2.5), real(3, 4), ints(3, 2, 4)),
        case(lambda x, i: x.scatter(-1, i, 7), ints(9, 2, 3, 4), ints(4, 2, 3, 6)),
        case(lambda x, i: x.scatter(1, i, True), flags(3, 4), ints(4, 3, 1)),
    ],
    "index_put": [
        case(lambda x, i, v: x.index_put((i,), v), real(5), tensor(3, 0), real(2)),
        case(lambda x, i, v: x.index_put((i,), v), real(5), tensor(-1, 1), real()),
        case(lambda x, i, v: x.index_put((i,), v, accumulate=True), real(5), tensor(1, 1), real(2)),
        case(lambda x, i, v: x.index_put((i,), v), real(5, 2), tensor(1, -2), real(2, 2)),
        case(lambda x, i, v: x.index_put((i, i), v), real(5, 5), tensor(1, 3), real(2)),
        case(
            lambda x, i, j, v: x.index_put((i, j), v, accumulate=True),
            real(3, 4, 2),
            tensor(0, -1),
            ints(4, 3, 1),
            real(2),
        ),
        case(lambda x, v: setting(x, (slice(None), [2, 0]), v), real(2, 4, 3), real(3)),
        case(lambda x, m, v: x.index_put((m,), v), real(3, 4), flags(3, 4), real()),
        case(lambda x, m, v: x.index_put((m,), v), real(3, 4), flags(3), real(1)),
        case(lambda x: x.clone().index_put_((x > 0,), torch.tensor(0.0).double()), real(3, 4)),
    ],
    "index_add": [
        case(lambda x, i, y: x.index_add(0, i, y), real(4, 3), tensor(1, 3, 1, 0, 1), real(5, 3)),
        case(lambda x, i, y: x.index_add(-1, i, y, alpha=2), real(2, 3), tensor(1, 1).int(), real(2, 2)),
        case(lambda i, y: torch.zeros(4, 3).double().index_add_(0, i, y), ints(4, 6), real(6, 3)),
        case(lambda x, i, y: x.index_add(0, i, y), ints(9, 4), ints(4, 6), ints(9, 6)),
    ],
    "index_copy": [case(lambda x, i, y: x.index_copy(1, i, y), real(2, 4), tensor(3, 0), real(2, 2))],
    "index_fill": [
        case(lambda x, i: x.index_fill(1, i, 2.5), real(2, 4), tensor(3, -4)),
        case(lambda x, i, v: x.index_fill(0, i, v.detach()), real(3, 2), tensor(2, 2), real()),
    ],
    "scatter_add": [
        case(lambda x, i, y: x.scatter_add(0, i[:, None].expand(-1, 3), y), real(4, 3), ints(4, 6), real(6, 3)),
        case(lambda x, i, y: x.scatter_add(1, i, y.detach()), real(2, 4, 3), ints(4, 2, 5, 3), real(2, 6, 3)),
        case(lambda x, i, y: x.scatter_add(0, i, y), real(4), ints(4, 3), real(3)),
    ],
    "scatter.src": [case(lambda x, y: x.scatter(1, tensor(3, 0).expand(2, 2), y), real(2, 4), real(2, 2))],
    "scatter_reduce.two": [
        case(
            lambda x, i, y, r=r, s=s: x.scatter_reduce(0, i[:, None].expand(-1, 3), y, r, include_self=s),
            spread(4, 3),
            tensor(0, 2, 0, 2, 2),
            spread(5, 3) + 0.05,
        )
        for r in ("sum", "mean", "amax", "amin")
        for s in (True, False)
    ]
    + [
        case(lambda i, y, r=r: torch.zeros(2, 4).double().scatter_reduce(1, i, y, r), ints(4, 2, 5), real(2, 5))
        for r in ("mean", "amax")
    ],
}
