"""Tensors made from nothing."""

from __future__ import annotations

import torch

from tests.pcg.aten_cases.case import INF, Case, case, flags, ints, real

CONSTANTS: dict[str, list[Case]] = {
    "full": [
        case(lambda x: torch.full((2, 3), 0.5) + x, real(3)),
        case(lambda x: torch.full((3,), 2) * x, ints(5, 3)),
        case(lambda x: torch.full((3,), True) & x, flags(3)),
        case(lambda x: torch.full((3,), 2, dtype=torch.float64) * x, real(3)),
        case(lambda x: torch.full((), -INF).double() + x, real(3)),
    ],
    "zeros": [
        case(lambda x: torch.zeros(3) + x, real(3)),
        case(lambda x: torch.zeros(2, 3, dtype=torch.bool) | x, flags(3)),
        case(lambda x: x.new_zeros(()) + torch.zeros(()), ints(5)),
    ],
    "ones": [
        case(lambda x: torch.ones(3) * x, real(3)),
        case(lambda x: torch.ones(3, dtype=torch.int64) * x, ints(5, 3)),
    ],
    "empty": [case(lambda x: torch.empty(3, dtype=x.dtype).fill_(2) * x, real(3))],
    "zeros_like": [case(torch.zeros_like, real(3)), case(lambda x: torch.zeros_like(x, dtype=torch.int64), real(3))],
    "ones_like": [case(torch.ones_like, real(3)), case(lambda x: torch.ones_like(x, dtype=torch.bool), ints(5, 3))],
    "empty_like": [case(lambda x: torch.empty_like(x).copy_(x), real(3))],
    "full_like": [
        case(lambda x: torch.full_like(x, 2.5), real(3)),
        case(lambda x: torch.full_like(x, 2.7), ints(5, 3)),
        case(lambda x: torch.full_like(x, 2), flags(3)),
        case(lambda x: torch.full_like(x, 2.5, dtype=torch.float32), ints(5, 3)),
    ],
    "new_zeros": [
        case(lambda x: x.new_zeros(2, 3), real(3)),
        case(lambda x: x.new_zeros((2,), dtype=torch.int64), real(3)),
    ],
    "new_ones": [case(lambda x: x.new_ones(2, 3), real(3)), case(lambda x: x.new_ones((), dtype=torch.bool), real(3))],
    "new_empty": [case(lambda x: x.new_empty(3).copy_(x), real(3))],
    "new_full": [case(lambda x: x.new_full((2, 3), 1.5), real(3)), case(lambda x: x.new_full((2,), 3), ints(5, 3))],
    "scalar_tensor": [
        case(lambda x: torch.scalar_tensor(2.5, dtype=x.dtype) * x, real(3)),
        case(lambda x: torch.scalar_tensor(2) * x, real(3)),
    ],
    "fill": [
        case(lambda x: x.clone().fill_(2.5), real(3)),
        case(lambda x, y: x.clone().fill_(y), real(3), real()),
        case(lambda x: x.clone().fill_(2.5), ints(5, 3)),
    ],
    "zero": [case(lambda x: x.clone().zero_(), real(3)), case(lambda x: x.clone().zero_(), flags(3))],
    "arange": [
        case(lambda x: torch.arange(3) + x, real(3)),
        case(lambda x: torch.arange(1, 7, 2) + x, ints(5, 3)),
        case(lambda x: torch.arange(5, -1, -2) + x, ints(5, 3)),
        case(lambda x: torch.arange(3, dtype=torch.float64) + x, real(3)),
        case(lambda x: torch.arange(0.0, 3.0) + x, real(3)),
        case(lambda x: torch.arange(0, 6, 2.0, dtype=torch.int32) + x, ints(5, 3)),
    ],
    "linspace": [
        case(lambda x: torch.linspace(-1, 2, 7, dtype=torch.float64) + x, real(7)),
        case(lambda x: torch.linspace(0.5, 2, 6) * x, real(6)),
        case(lambda x: torch.linspace(3, 2, 1) * x, real(2)),
    ],
    "eye": [
        case(lambda x: torch.eye(3) * x, real(3)),
        case(lambda x: torch.eye(2, 3, dtype=torch.float64) * x, real(3)),
    ],
}
