"""What a case is, and how its operands are drawn. Sizes are distinct, so that mixing up dimensions fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

DRAWS = torch.Generator().manual_seed(0)
INF = float("inf")


@dataclass(frozen=True)
class Case:
    """A function or module, and the tensors it is called with."""

    run: Callable[..., Any]
    operands: tuple[Tensor, ...]


def case(run: Callable[..., Any], *operands: Tensor) -> Case:
    return Case(run, operands)


def real(*shape: int) -> Tensor:
    """Normal values of magnitude 0.05 at least."""
    x = torch.randn(shape, generator=DRAWS, dtype=torch.float64)
    return torch.where(x.abs() < 0.05, x.sign() * 0.05 + x, x)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape, generator=DRAWS, dtype=torch.float64) + 0.5


def spread(*shape: int) -> Tensor:
    """Pairwise different values: no ties."""
    size = torch.Size(shape).numel()
    return (torch.randperm(size, generator=DRAWS).double() * 0.1 - 0.05 * size + 0.03).reshape(shape)


def ints(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=DRAWS)


def flags(*shape: int) -> Tensor:
    """Bools, of which the first is True."""
    x = torch.rand(shape, generator=DRAWS) < 0.6
    x.view(-1)[0] = True
    return x


def tensor(*values: float) -> Tensor:
    return torch.tensor(values)


def double(module: nn.Module, train: bool = True) -> nn.Module:
    """The module in double precision, its parameters and statistics away from their defaults."""
    for values in (*module.parameters(), *module.buffers()):
        if values.is_floating_point():
            values.data = positive(*values.shape).to(values.dtype)
    return module.double().train(train)


def unary(f: Callable[[Tensor], Tensor], *more: Tensor) -> list[Case]:
    return [case(f, real(3, 4)), case(f, real()), *(case(f, x) for x in more)]


def binary(f: Callable[[Any, Any], Tensor], make: Callable[..., Tensor] = real) -> list[Case]:
    """Same shapes, broadcasting in both directions, scalars of both kinds, mixed dtypes."""
    return [
        case(f, make(3, 4), make(3, 4)),
        case(f, make(3, 4), make(4)),
        case(f, make(3, 1), make(2, 1, 4)),
        case(f, make(3, 4), make()),
        case(lambda x: f(x, 2), make(3)),
        case(lambda x: f(x, 1.5), make(3)),
        case(f, make(4), ints(5, 3, 4, low=1)),
        case(lambda x: f(x, 3), ints(9, 4, low=1)),
        case(f, ints(9, 4, low=1), ints(5, 3, 4, low=1)),
    ]


def compared(f: Callable[[Any, Any], Tensor]) -> list[Case]:
    return [
        case(f, real(3, 4), real(4)),
        case(lambda x: f(x, 0), real(3)),
        case(lambda x: f(x, 0.5), ints(3, 4)),
        case(lambda x: f(x, 1), ints(3, 4)),
        case(f, ints(3, 5), ints(3, 2, 5)),
        case(f, flags(4), flags(4)),
    ]


def bitwise(f: Callable[[Any, Any], Tensor]) -> list[Case]:
    return [
        case(f, flags(3, 4), flags(4)),
        case(f, ints(9, 4), ints(9, 3, 4)),
        case(lambda x: f(x, 5), ints(9, 4)),
        case(lambda x: f(x, True), flags(4)),
    ]


def logical(f: Callable[[Any, Any], Tensor]) -> list[Case]:
    return [case(f, flags(3, 4), flags(4)), case(f, ints(3, 4), ints(3, 4)), case(f, real(4), ints(2, 4))]
