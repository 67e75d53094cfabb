"""A model and a loss function as one module, which returns the loss.

It is the model itself in another class: both have one `__dict__`, so one set of modules, parameters, buffers, hooks and
attributes under the same names, and one mode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, cast

from torch import Tensor, nn

from shardwright.pcg.capture.hooks import is_guard
from shardwright.pcg.errors import CaptureError

LossFunction = Callable[[Any, Mapping[str, Any]], Any]
"""`loss_fn(result, batch)` returns the scalar loss, from what the model returns and the batch by argument name."""


def with_loss(model: nn.Module, loss_fn: LossFunction | None) -> nn.Module:
    """Return a module over the same `__dict__` as the model whose forward returns `loss_fn(result, batch)`.

    Its batch has the model's arguments, and what only `loss_fn` reads. With `loss_fn` None it is the model.

    Raises `CaptureError` if the model itself has forward hooks, which would see the loss and not the model's result.
    """
    if loss_fn is None:
        return model

    def loss(result: Any, batch: Mapping[str, Any]) -> Tensor:  # noqa: ANN401
        value = loss_fn(result, batch)
        if not isinstance(value, Tensor) or value.dim():
            what = (
                f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            )
            raise CaptureError(f"loss_fn returns {what}; expected a tensor with one element and no dimension")
        return value

    return _viewed(model, loss)


def without_loss(model: nn.Module) -> nn.Module:
    """Return a module over the same `__dict__` that returns the model's result, and ignores what only a loss reads."""
    return _viewed(model, lambda result, _: result)


def calls_loss(frame: FrameType | None) -> bool:
    """Return whether a function that a frame of Python calls is a loss function."""
    return frame is not None and frame.f_code.co_filename == __file__ and frame.f_code.co_name == "loss"


def _viewed(model: nn.Module, finish: LossFunction) -> nn.Module:
    if any(not is_guard(hook) for hook in (*model._forward_hooks.values(), *model._forward_pre_hooks.values())):
        raise CaptureError(
            f"{type(model).__name__}: loss_fn= for a model with forward hooks of its own, which would see the loss in "
            "place of the model's result; do what they do in loss_fn, or in a module around the model"
        )
    kind, own, alone = type(model), inspect.signature(model.forward), inspect.Parameter.POSITIONAL_ONLY
    taken = own.parameters.values()
    rest = next((p.name for p in taken if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    if rest is not None:
        raise CaptureError(
            f"{kind.__name__}: loss_fn= for a forward that takes *{rest}, whose arguments have no names in a batch; "
            "give it named ones, or put the loss into a module around the model"
        )
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken)
    others = [] if takes_all else [inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD)]

    def forward(self: nn.Module) -> Callable[..., Any]:
        """Return the bound method. As a property it comes before a `forward` among the model's attributes."""
        inner = vars(self).get("forward") or kind.forward.__get__(self)

        def called(*args: Any, **batch: Any) -> Any:  # noqa: ANN401
            batch = {**dict(zip(own.parameters, args, strict=False)), **batch}
            names = {name for name in batch if takes_all or name in own.parameters}
            first = [name for name, p in own.parameters.items() if name in names and p.kind is alone]
            named = {name: batch[name] for name in batch if name in names.difference(first)}
            return finish(inner(*(batch[name] for name in first), **named), batch)

        cast("Any", called).__signature__ = own.replace(parameters=[*taken, *others])
        return called

    words = {"forward": property(forward), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    view = kind.__new__(type(kind.__name__, (kind,), words))
    object.__setattr__(view, "__dict__", vars(model))
    return view
