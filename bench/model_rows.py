"""The models that `bench.models` runs: a row says what makes a model, and what it is called with.

A row is data: names of classes and functions as "module:name", their arguments, and the shapes of a batch. Nothing is
imported until a row's model is made, as the packages are in an environment of their own (`make models`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from shardwright.pcg.capture.capture import find_loss

REAL = (torch.float32, torch.float64)
BATCH = 4
"""Enough for two microbatches of two ranks."""


@dataclass(frozen=True)
class Made:
    """A value made by a call of "module:name", whose arguments may be made themselves."""

    target: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:  # noqa: ANN401
        module, _, name = self.target.partition(":")
        function = reduce(getattr, name.split("."), cast("Any", import_module(module)))
        return function(*map(_value, self.args), **{key: _value(x) for key, x in self.kwargs.items()})


def _value(given: Any) -> Any:  # noqa: ANN401
    return given() if isinstance(given, Made) else given


def made(target: str, *args: Any, **kwargs: Any) -> Made:
    """A call that is made when the model is."""
    return Made(target, args, kwargs)


@dataclass(frozen=True)
class Draw:
    """A tensor of a batch: real numbers, or with `high` whole ones from `low` on; `value`: all the same."""

    shape: tuple[int, ...]
    high: int | None = None
    low: int = 0
    value: float | None = None
    dtype: torch.dtype | None = None

    def __call__(self) -> Tensor:
        if self.value is not None:
            return torch.full(self.shape, self.value, dtype=self.dtype)
        if self.high is not None:
            return torch.randint(self.low, self.high, self.shape)
        return torch.randn(self.shape)


def real(*shape: int) -> Draw:
    """Rows of real numbers."""
    return Draw((BATCH, *shape))


def whole(high: int, *shape: int, low: int = 0) -> Draw:
    """Rows of whole numbers below `high`."""
    return Draw((BATCH, *shape), high, low)


@dataclass(frozen=True)
class Row:
    """A model: `inputs` by name, or in the order of its forward's arguments; `options`: its other arguments."""

    package: str
    name: str
    maker: Made
    inputs: tuple[Draw, ...] | Mapping[str, Draw]
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> None:
        """Import the package."""
        _declare_detection()
        import_module(self.maker.target.partition(":")[0])

    def model(self) -> nn.Module:
        """The model, in fp32."""
        return self.maker()

    def batch(self) -> Any:  # noqa: ANN401
        """Return the model's inputs, by name or in order."""
        if isinstance(self.inputs, Mapping):
            return {name: draw() for name, draw in self.inputs.items()}
        return [draw() for draw in self.inputs]


@cache
def _declare_detection() -> torch.library.Library:
    """Declare what torchvision expects of its compiled part, whose builds for GPUs load under no other build of torch.

    Models of classification use nothing of it.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


class Trained(nn.Module):
    """A model with a loss: its own or, if it has none, that of a regression of each real tensor that it returns."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.options = model, dict(options)

    def predictions(self, inputs: Any) -> tuple[Tensor, list[Tensor]]:  # noqa: ANN401
        """The model's own loss, and what else has to be near a target."""
        by_name = isinstance(inputs, Mapping)
        result = self.model(**inputs, **self.options) if by_name else self.model(*inputs, **self.options)
        if (loss := find_loss(result)) is not None:
            return loss, []
        found = [y for y in tree_leaves(result) if isinstance(y, Tensor) and y.dtype in REAL]
        return sum((y for y in found if not y.dim()), torch.zeros(())), [y for y in found if y.dim()]

    def forward(self, inputs: Any, targets: Sequence[Tensor]) -> Tensor:  # noqa: ANN401
        """The loss."""
        loss, found = self.predictions(inputs)
        pairs = zip(found, targets, strict=True)
        return sum((F.mse_loss(y, target.to(y.dtype)) for y, target in pairs), loss)


def trained(row: Row, seed: int) -> tuple[Trained, dict[str, Any]]:
    """A row's model with a loss, in training mode, and its batch, with targets."""
    torch.manual_seed(seed)
    batch = row.batch()
    model = Trained(row.model(), row.options).train()
    with torch.no_grad():
        targets = [torch.randn(y.shape) for y in copy.deepcopy(model).predictions(batch)[1]]
    return model, {"inputs": batch, "targets": targets}
