"""Lookups by integer tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.pcg.aten_cases.case import Case, case, double, flags, ints, real, tensor


class Bag(nn.Module):
    """An embedding bag of ids as a matrix, or as a vector with the positions at which bags start."""

    def __init__(self, *, weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.bag, self.weighted = double(nn.EmbeddingBag(7, 3, **options)), weighted

    def forward(self, ids: Tensor, other: Tensor | None = None) -> Tensor:
        return self.bag(ids, per_sample_weights=other) if self.weighted else self.bag(ids, other)


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
        case(lambda x, m, v: x.index_put((m,), v), real(3, 4), flags(3, 4), real()),
        case(lambda x, m, v: x.index_put((m,), v), real(3, 4), flags(3), real(1)),
        case(lambda x: x.clone().index_put_((x > 0,), torch.tensor(0.0).double()), real(3, 4)),
    ],
}
