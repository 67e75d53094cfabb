"""Parameters in 16 bits over masters in float32: what FSDP2's `MixedPrecisionPolicy(param_dtype=…)` does, in forward.

While the model runs, its modules have casts of their parameters in place of these, one of each, and *units* cast the
floats that they are given: the model, each block, and each module with weights outside of blocks, as in `fully_shard`
of all of them. Buffers stay as they are. Nothing else is cast, so an operator runs in the dtype of what it reads: in
16 bits but for what the model itself widens. What modules are written to do with `weight.dtype` they do with that.

Capture and a step of one process run the same hooks; in a captured graph they are casts of leaves, which are gathered
after they are cast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_Place = tuple[nn.Module, str]


@contextmanager
def in_param_dtype(
    model: nn.Module, low: Mapping[nn.Module, str], units: Collection[nn.Module], *, in_backward: bool = False
) -> Generator[None]:
    """Around forwards of the model: parameters of modules are in the 16-bit format that `low` says of them.

    Modules of it that are `units` anyway are given too. `in_backward`: parameters stay so after a forward, for what
    backward runs again (`torch.utils.checkpoint`).
    """
    casts = {module: getattr(torch, name) for module, name in low.items() if name}
    if not casts:
        yield
        return
    swapped = _Swapped(casts)

    def enter(*_: object) -> None:
        swapped.put()

    def leave(*_: object) -> None:
        if not in_backward:
            swapped.back()

    with ExitStack() as stack:
        stack.callback(swapped.back)
        for unit in {*_units(model, casts), *units}:
            if unit in casts:
                cast = partial(_cast_arguments, casts[unit])
                stack.callback(unit.register_forward_pre_hook(cast, prepend=True, with_kwargs=True).remove)
        stack.callback(model.register_forward_pre_hook(enter, prepend=True).remove)
        stack.callback(model.register_forward_hook(leave, always_call=True).remove)
        yield


class _Swapped:
    """Casts of parameters where modules have these."""

    def __init__(self, casts: Mapping[nn.Module, torch.dtype]) -> None:
        self.casts = casts
        self.own: dict[_Place, Tensor] = {}

    def put(self) -> None:
        """One cast for all places of a parameter."""
        made: dict[tuple[int, torch.dtype], Tensor] = {}
        for module, dtype in {} if self.own else self.casts.items():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.dtype in _FLOATS and parameter.dtype != dtype:
                    self.own[module, name] = parameter
                    key = id(parameter), dtype
                    if key not in made:
                        made[key] = parameter.to(dtype)
                    module._parameters[name] = made[key]  # pyright: ignore[reportArgumentType]

    def back(self) -> None:
        for (module, name), parameter in self.own.items():
            module._parameters[name] = parameter  # pyright: ignore[reportArgumentType]
        self.own.clear()


def _cast_arguments(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """With floats in this dtype, in whatever nest."""
    cast: Callable[[Tensor], Tensor] = lambda x: x.to(dtype) if x.dtype in _FLOATS else x  # noqa: E731
    return tree_map_only(Tensor, cast, (args, kwargs))


def _units(model: nn.Module, casts: Mapping[nn.Module, torch.dtype]) -> Iterator[nn.Module]:
    """The model, its outermost blocks (what a list holds), and what has weights outside of these.

    Of a block with modules in it of another dtype, whatever has weights too.
    """

    def inside(module: nn.Module, is_block: bool, in_block: bool) -> Iterator[nn.Module]:
        owners = [m for m in module.modules() if m._parameters]
        apart = len({casts.get(owner) for owner in owners}) > 1 or (not in_block and _has_list(module))
        if module._parameters or (owners and (is_block or not apart)):
            yield module
        for name, child in module.named_children() if apart else ():
            begins = not in_block and name.isdecimal()
            yield from inside(child, begins, in_block or begins)

    yield from (model, *inside(model, is_block=False, in_block=False))


def _has_list(module: nn.Module) -> bool:
    return any(part.isdecimal() for name, _ in module.named_modules() for part in name.split("."))
