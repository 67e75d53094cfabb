"""The differences between an eager step and the program of its captured graph, beyond rounding.

The allowed error is ε^(2/3) of the value's norm, where ε belongs to the coarsest dtype in which the graph computes: a
third of the digits may be lost. A larger error is compared with rounding itself. The eager step runs twice more, on
parameters and inputs that are off by ±ε of themselves, as if each product were rounded anew (backward error analysis).
An error may then be `TIMES` the distance by which these steps move the value. So there is no alarm for a model that is
chaotic in its dtype, such as deep batch norms in 16 bits, nor for a gradient that is only rounding, such as that of the
bias of attention's keys. If a gradient is exactly zero on one side, the other may have this distance once. A gradient
that cancels, such as that of the bias of scores of which only differences are used, may by chance not move at all: on
both sides it is smaller than what rounding moves gradients by. A gradient as small as this is compared as any other one
if it moves by a small part of itself only, as those of layers do whose results count little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from shardwright.lowering.trial.steps import Trial
from shardwright.pcg.graph import Graph
from shardwright.pcg.types import is_float

TIMES = 4.0
SMALL = 1e-5
"""The least share of the whole gradient's norm that a gradient's error is reported relative to."""
STEADY = 0.1
"""The part of itself by which a gradient moves at least if it is only rounding, unless it does not move at all."""
FEW = 8
"""A tensor of fewer elements may by chance hardly move; it is allowed the typical move of other tensors."""


@dataclass(frozen=True)
class Difference:
    """A difference: the thing that differs, and in words how."""

    what: str
    how: str


@dataclass(frozen=True)
class Comparison:
    """The distance between two steps, relative to the eager one.

    `noise`: the relative distance by which rounding moves gradients, if it had to be measured; else 0.
    """

    differences: tuple[Difference, ...] = ()
    loss_error: float = 0.0
    gradient_error: float = 0.0
    buffer_error: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True)
class _Noise:
    """The distances by which rounding moves values, as norms, by name.

    `each`: the typical distance of a gradient; `least`: a gradient of this norm or less may be only rounding.
    """

    losses: tuple[float, float] = (0.0, 0.0)
    gradients: Mapping[str, float] = field(default_factory=dict[str, float])
    buffers: Mapping[str, float] = field(default_factory=dict[str, float])
    relative: float = 0.0
    each: float = 0.0
    least: float = 0.0


def epsilon_of(graph: Graph) -> float:
    """Return ε of the coarsest dtype in which the graph computes."""
    dtypes = {kind.dtype for kind in graph.types.values() if is_float(kind.dtype)}
    return max((torch.finfo(getattr(torch, name)).eps for name in dtypes), default=torch.finfo(torch.float32).eps)


def compared(
    eager: Trial,
    program: Trial,
    epsilon: float,
    moved: Callable[[], Sequence[Trial]],
    old: Mapping[str, Tensor],
) -> Comparison:
    """Compare a step of the program with the eager one.

    `moved` makes eager steps on parameters and inputs that are off by ±ε; it is called only if needed. `old`: the
    buffers before the step, by name.
    """
    whole = math.hypot(*(_norm(g) for g in eager.gradients.values()))
    differences = list(_all(eager, program, epsilon, _Noise(), old))
    noise = _Noise()
    if differences:
        noise = _noise(eager, moved(), SMALL * whole)
        differences = list(_all(eager, program, epsilon, noise, old))
    return Comparison(
        tuple(differences),
        max(_relative(abs(a - b), abs(a)) for a, b in zip(eager.losses, program.losses, strict=True)),
        _worst(eager.gradients, program.gradients, SMALL * whole, noise.gradients),
        _worst(eager.buffers, program.buffers, SMALL, noise.buffers),
        noise.relative,
    )


def _all(
    eager: Trial, program: Trial, epsilon: float, noise: _Noise, old: Mapping[str, Tensor]
) -> Iterator[Difference]:
    share = epsilon ** (2 / 3)
    names = ("the loss", "the loss of a second forward")
    for what, a, b, free in zip(names, eager.losses, program.losses, noise.losses, strict=True):
        if not abs(a - b) <= share * abs(a) + TIMES * free:
            yield Difference(what, f"{a:.9g} eagerly, {b:.9g} by the graph")
    yield from _gradients(eager, program, share, epsilon, noise)
    for name, value in eager.buffers.items():
        yield from _buffer(name, value, program.buffers.get(name), share, noise, old.get(name))
    for name in eager.moved:
        yield Difference(f"the parameter {name!r}", "forward itself changes it, the graph does not")
    for name, state in eager.random.items():
        if state != program.random[name]:
            yield Difference(name, "the graph leaves it in another state; it draws only what loss and buffers need")


# ---- gradients ----


def _gradients(eager: Trial, program: Trial, share: float, epsilon: float, noise: _Noise) -> Iterator[Difference]:
    for name in {**eager.gradients, **program.gradients}:
        mine, other = eager.gradients.get(name), program.gradients.get(name)
        if (how := _gradient(mine, other, share, noise, name)) is not None:
            yield Difference(f"the gradient of {name!r}", how)


def _gradient(mine: Tensor | None, other: Tensor | None, share: float, noise: _Noise, name: str) -> str | None:
    """Return in words how a gradient differs, or None."""
    size, by_graph = (0.0 if g is None else _norm(g) for g in (mine, other))
    if not math.isfinite(size) and not math.isfinite(by_graph):
        return None
    free = noise.gradients.get(name, 0.0)
    if max(size, by_graph) <= noise.least and not 0 < free < STEADY * size:
        return None
    if not size or not by_graph:
        if max(size, by_graph) <= max(free, noise.relative * size):
            return None
        return (
            f"is lost: its norm is {size:.3g} eagerly, none by the graph"
            if size
            else (f"there is none eagerly, and one of norm {by_graph:.3g} by the graph")
        )
    assert mine is not None
    assert other is not None
    few = noise.each if mine.numel() < FEW else 0.0
    allowed = share * size + TIMES * max(free, noise.relative * size, few)
    if (error := _distance(mine, other)) <= allowed:
        return None
    if _norm(mine.double() + other.double().to(mine.device)) <= allowed:
        return "has the other sign"
    factor = float((mine.double() * other.double()).sum()) / size**2
    if abs(factor) > 0 and _norm(other.double() - factor * mine.double()) <= max(allowed, share * by_graph):
        return f"is {factor:.4g} times the eager one"
    return f"is off by {error / size:.3g} of its norm"


# ---- buffers ----


def _buffer(
    name: str, mine: Tensor, other: Tensor | None, share: float, noise: _Noise, old: Tensor | None
) -> Iterator[Difference]:
    what = f"the buffer {name!r}"
    if other is None:
        yield Difference(what, "forward makes it, the graph does not")
    elif mine.shape != other.shape or mine.dtype != other.dtype:
        yield Difference(what, f"{_type(mine)} eagerly, {_type(other)} by the graph")
    elif not torch.equal(mine, other) and _distance(mine, other) > _allowed(mine, share, noise.buffers.get(name, 0.0)):
        stays = old is not None and torch.equal(other, old)
        yield Difference(
            what,
            "stays as it was by the graph, and does not eagerly"
            if stays
            else f"is off by {_relative(_distance(mine, other), _norm(mine)):.3g} of its norm",
        )


def _allowed(value: Tensor, share: float, noise: float) -> float:
    return (share * _norm(value) if value.is_floating_point() else 0.0) + TIMES * noise


def _type(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


# ---- norms ----


def _noise(eager: Trial, moved: Sequence[Trial], small: float) -> _Noise:
    """Return the largest distances of some steps from the eager one. A gradient above `small` is not only rounding."""
    gradients = _moves(eager.gradients, [step.gradients for step in moved])
    buffers = _moves(eager.buffers, [step.buffers for step in moved])
    first, second = (max((abs(s.losses[i] - eager.losses[i]) for s in moved), default=0.0) for i in (0, 1))
    relative = [_relative(free, _norm(eager.gradients[name])) for name, free in gradients.items()]
    each = math.hypot(*gradients.values()) / math.sqrt(max(1, len(gradients)))
    middle, least = median(relative) if relative else 0.0, min(TIMES * each, small)
    return _Noise((first, second), gradients, buffers, middle, each, least)


def _moves(mine: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    moves = dict[str, float]()
    for name, value in mine.items():
        moved = [other[name] for other in others if name in other and other[name].shape == value.shape]
        moves[name] = max((_distance(value, other) for other in moved), default=0.0)
    return moves


def _worst(mine: Mapping[str, Tensor], others: Mapping[str, Tensor], least: float, free: Mapping[str, float]) -> float:
    """Return the largest relative error: of the eager value's norm or, if larger, of `least` or of rounding."""
    shared = [name for name in mine if name in others and mine[name].shape == others[name].shape]
    sizes = {name: max(_norm(mine[name]), least, free.get(name, 0.0)) for name in shared}
    errors = [_relative(_distance(mine[name], others[name]), sizes[name]) for name in shared]
    return max((error for error in errors if math.isfinite(error)), default=0.0)


def _distance(one: Tensor, other: Tensor) -> float:
    return 0.0 if torch.equal(one, other) else _norm(one.double() - other.double())


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm()) if tensor.numel() else 0.0


def _relative(error: float, size: float) -> float:
    return error / size if size else (math.inf if error else 0.0)
