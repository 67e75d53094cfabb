"""Reductions, scans and sorts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.pcg.aten_cases.case import Case, case, flags, ints, real, spread, tensor


def reduction(f: Callable[..., Tensor], make: Callable[..., Tensor] = real) -> list[Case]:
    return [
        case(lambda x: f(x, 1), make(2, 3, 4)),
        case(lambda x: f(x, -1, True), make(2, 3, 4)),
        case(lambda x: f(x, (0, -1)), make(2, 3, 4)),
        case(lambda x: f(x, (-2, 0), True), make(2, 3, 4)),
        case(lambda x: f(x, -1), make()),
    ]


REDUCTIONS: dict[str, list[Case]] = {
    "sum": [
        *reduction(torch.sum),
        case(torch.sum, real(2, 3)),
        case(lambda x: x.sum(()), real(2, 3)),
        case(torch.sum, flags(2, 3)),
        case(lambda x: x.sum(0), ints(5, 2, 3).int()),
        case(lambda x: x.sum(0, dtype=torch.float32), flags(2, 3)),
        case(lambda x: x.sum(dtype=torch.float64), ints(5, 3)),
        case(torch.sum, real(0, 3)),
        case(torch.sum, real()),
    ],
    "mean": [
        *reduction(torch.mean),
        case(torch.mean, real(2, 3)),
        case(lambda x: x.mean(()), real(2, 3)),
        case(lambda x: x.mean(0, dtype=torch.float64), ints(5, 2, 3)),
        case(lambda x: x.float().mean(-1, keepdim=True), real(2, 3)),
    ],
    "std.correction": [
        case(torch.std, real(2, 3)),
        case(lambda x: x.std(1, correction=0, keepdim=True), real(2, 3)),
        case(lambda x: (x * 0).std(1), real(2, 3)),
    ],
    "std_mean.correction": [case(lambda x: torch.std_mean(x, 1), real(2, 3))],
    "nansum": [
        case(lambda x: x.nansum(0), tensor(1.0, float("nan"), 3.0).double()),
        case(lambda x: x.nansum(1, True), ints(5, 2, 3)),
    ],
    "var.correction": [
        *reduction(torch.var)[:2],
        case(lambda x: x.var((0, -1), keepdim=True), real(2, 3, 4)),
        case(torch.var, real(2, 3)),
        case(lambda x: x.var(unbiased=False), real(2, 3)),
        case(lambda x: x.var(1, unbiased=False), real(2, 3)),
        case(lambda x: x.var(1, correction=0), real(2, 3)),
        case(lambda x: x.var(correction=2), real(2, 3)),
        case(lambda x: x.var(-1, True, True), real(2, 3)),
    ],
    "amax": [
        *reduction(torch.amax, spread),
        case(torch.amax, spread(2, 3)),
        case(torch.amax, flags(2, 3)),
        case(lambda x: torch.amax(x, 0), torch.ones(3, 2).double()),
    ],
    "amin": [
        *reduction(torch.amin, spread),
        case(torch.amin, spread(2, 3)),
        case(torch.amin, ints(5, 2, 3)),
        case(lambda x: torch.amin(x, 0), torch.ones(3, 2).double()),
    ],
    "max.default": [
        case(torch.max, spread(2, 3)),
        case(torch.max, ints(5, 2, 3)),
        case(torch.max, torch.ones(3).double()),
        case(torch.max, real()),
    ],
    "min.default": [
        case(torch.min, spread(2, 3)),
        case(torch.min, ints(5, 2, 3)),
        case(torch.min, torch.ones(3).double()),
    ],
    "max.dim": [
        case(lambda x: tuple(x.max(1)), spread(2, 3)),
        case(lambda x: tuple(x.max(-2, True)), spread(2, 3)),
        case(lambda x: x.max(0)[0], torch.ones(3, 2).double()),
        case(lambda x: x.max(0).indices, spread(3, 2)),
        case(lambda x: tuple(x.max(0)), ints(50, 7)),
    ],
    "min.dim": [
        case(lambda x: tuple(x.min(1)), spread(2, 3)),
        case(lambda x: tuple(x.min(-2, True)), spread(2, 3)),
        case(lambda x: x.min(0).values, torch.ones(3, 2).double()),
    ],
    "any": [
        case(torch.any, flags(2, 3)),
        case(lambda x: x.any(-1), flags(2, 3)),
        case(lambda x: x.any((0, 2), True), flags(2, 3, 4)),
        case(lambda x: torch.any(x, ()), ints(2, 2, 3)),
        case(torch.any, real(2, 3)),
    ],
    "all": [
        case(torch.all, flags(2, 3)),
        case(lambda x: x.all(-1), flags(2, 3)),
        case(lambda x: x.all((0, 2), True), flags(2, 3, 4)),
        case(lambda x: torch.all(x, ()), flags(2, 3)),
        case(lambda x: x.all(0), ints(2, 2, 3)),
    ],
    "argmax": [
        case(lambda x: x.argmax(-1), spread(2, 3)),
        case(lambda x: x.argmax(0, True), spread(2, 3)),
        case(torch.argmax, spread(2, 3)),
        case(lambda x: torch.argmax(x, keepdim=True), spread(2, 3)),
        case(lambda x: x.argmax(0), ints(99, 7)),
    ],
    "argmin": [
        case(lambda x: x.argmin(-1), spread(2, 3)),
        case(lambda x: x.argmin(0, True), spread(2, 3)),
        case(torch.argmin, spread(2, 3)),
    ],
    "softmax": [
        case(lambda x: x.softmax(-1), real(2, 3)),
        case(lambda x: F.softmax(x, 0), real(2, 3)),
        case(lambda x: F.softmax(x, -1, dtype=torch.float32), real(2, 3)),
        case(lambda x: x.softmax(-1, dtype=torch.float64), ints(5, 2, 3)),
    ],
    "log_softmax": [
        case(lambda x: x.log_softmax(-1), real(2, 3)),
        case(lambda x: F.log_softmax(x, 0, dtype=torch.float32), real(2, 3)),
    ],
    "logcumsumexp": [
        case(lambda x: x.logcumsumexp(-1), real(2, 3)),
        case(lambda x: x.logcumsumexp(0), real(5, 4) * 50),
    ],
    "cumsum": [
        case(lambda x: x.cumsum(-1), real(2, 3)),
        case(lambda x: x.cumsum(0), flags(4)),
        case(lambda x: x.cumsum(0), ints(5, 4).int()),
        case(lambda x: x.cumsum(0, dtype=torch.float64), ints(5, 4)),
        case(lambda x: x.cumsum(0, dtype=torch.int32), flags(4)),
    ],
    "sort": [
        case(lambda x: tuple(x.sort()), spread(2, 5)),
        case(lambda x: tuple(x.sort(0, descending=True)), spread(5, 2)),
        case(lambda x: tuple(torch.sort(x, stable=True, dim=-1)), ints(4, 9)),
        case(lambda x: tuple(torch.sort(x, stable=True, descending=True)), ints(4, 9)),
        case(lambda x: x.argsort(-1), spread(2, 5)),
        case(lambda x: x.msort(), spread(5, 2)),
    ],
    "topk": [
        case(lambda x: tuple(x.topk(2)), spread(3, 5)),
        case(lambda x: tuple(x.topk(3, 0)), spread(5, 2)),
        case(lambda x: x.topk(1, -1).indices, spread(3, 5)),
        case(lambda x: tuple(t.sum(-1) for t in x.topk(3, -1, sorted=False)), spread(2, 9)),
    ],
    "logsumexp": [
        *(
            case(lambda x, d=d, k=k: x.logsumexp(d, keepdim=k), real(3, 4))
            for d in (0, -1, (0, 1))
            for k in (False, True)
        ),
        case(lambda x: torch.cat([x, x.new_full((3, 1), -torch.inf)], 1).logsumexp(1), 50 * real(3, 4)),
    ],
    "linalg_vector_norm": [
        *(
            case(lambda x, d=d, n=n: torch.linalg.vector_norm(x, n, d), real(3, 4))
            for d in (None, 0, (0, 1))
            for n in (1, 2)
        ),
        case(
            lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True), torch.tensor([[3.0, 4.0], [0.0, 0.0]]).double()
        ),
        case(lambda x: F.normalize(x, dim=1), real(3, 4)),
    ],
    "_cdist_forward": [
        *(case(lambda x, y, p=p: torch.cdist(x, y, p), real(2, 3, 4), real(2, 5, 4)) for p in (1.0, 2.0)),
        case(lambda x: torch.cdist(x, x), real(3, 4)),
    ],
    "_euclidean_dist": [
        case(torch.cdist, real(2, 27, 4), real(2, 5, 4)),
        case(lambda x: torch.cdist(x, x), ints(5, 27, 4).double()),
    ],
    "norm.ScalarOpt_dim": [case(F.pairwise_distance, real(3, 4), real(3, 4))],
    "histc": [
        case(lambda x: torch.histc(x, 4, 0, 3), ints(5, 20).double()),
        case(lambda x: torch.histc(x, 4, -1, 1), real(3, 5)),
    ],
}
