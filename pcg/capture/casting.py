"""Parameters cast to 16 bits from masters in float32, in forward, like FSDP2's `MixedPrecisionPolicy(param_dtype=…)`.

While the model runs, its modules hold casts in place of their parameters, one cast of each, and *units* cast the
floats in their arguments: the model, each block, and each module with weights outside of blocks, like `fully_shard`
on all of them. Buffers stay as they are. Nothing else is cast, so an operator runs in the dtype of its operands: in
16 bits except where the model itself widens. Modules that look at `weight.dtype` see the 16 bits.

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
    """Give modules their parameters in the 16-bit formats of `low`, around forwards of the model.

    `units` names modules that are units in any case. `in_backward`: parameters stay cast after a forward, for operators
    that backward runs again (`torch.utils.checkpoint`).
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
    """Casts that take the place of parameters in their modules."""

    def __init__(self, casts: Mapping[nn.Module, torch.dtype]) -> None:
        self.casts = casts
        self.own: dict[_Place, Tensor] = {}

    def put(self) -> None:
        """Put the casts in place, one cast for all places of a parameter."""
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
    """Return the arguments with their floats in this dtype, whatever the nest."""
    cast: Callable[[Tensor], Tensor] = lambda x: x.to(dtype) if x.dtype in _FLOATS else x  # noqa: E731
    return tree_map_only(Tensor, cast, (args, kwargs))


def _units(model: nn.Module, casts: Mapping[nn.Module, torch.dtype]) -> Iterator[nn.Module]:
    """Yield the model, its outermost blocks (the entries of a list), and modules with weights outside of these.

    In a block whose modules differ in dtype, all modules with weights are units too.
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
