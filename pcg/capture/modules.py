"""Precision by module: each module's forward has a `torch.autocast` region of its own, in capture as in eager.

In fp32 that region is disabled, and arguments in 16 bits are widened, as `torch.amp.custom_fwd` does with
`cast_inputs=torch.float32`. In amp_bf16 and amp_fp16 it is enabled. So the module whose forward computes decides: a
weight that the forward of another module reads is read in that module's precision.

In bf16_params and fp16_params the region is disabled too, and the module whose parameters are read decides: those of
the module, and of modules in it, are in 16 bits (`pcg.capture.casting`).

If nothing around is in 16 bits, results in 16 bits are widened, because products in float32 read only float32.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from shardwright.pcg.capture.casting import in_param_dtype
from shardwright.pcg.errors import PlanError
from shardwright.pcg.precision import HALVES, low_dtype
from shardwright.pcg.step.precisions import Precision, PrecisionByModule, PrecisionMode, base_of, of_modules
from shardwright.pcg.step.recompute import fits

_NEAR = 3


class _Own(NamedTuple):
    """The decision about a module: the pattern and its precision; the module by name; the precision around it."""

    pattern: str
    precision: Precision
    name: str
    around: Precision | None


@contextmanager
def in_own_precision(
    model: nn.Module, precision: PrecisionMode | None, device: str, *, in_backward: bool = False
) -> Generator[None]:
    """Run modules in the precisions of `precision`, around a forward on a kind of device, "cpu" or "cuda".

    The first pattern that fits a module, or one around it, decides. The region of `torch.autocast` of all others
    is the caller's. `in_backward`: the context spans backward too, which runs parts of forward again. Raises a
    `PlanError` if a pattern decides about no module, or only about modules whose forward is not called.
    """
    owns, low = _decided(model, precision)
    called = set[str]()
    with ExitStack() as stack:
        stack.enter_context(in_param_dtype(model, low, owns, in_backward=in_backward))
        for module, own in owns.items():
            for hook in _in_region(module, own, device, called):
                stack.callback(hook.remove)
        yield
    for own in owns.values():
        if own.pattern not in called:
            raise PlanError(
                f"precision: {own.pattern!r} names {own.name!r} of {type(model).__name__}, which no forward calls; "
                "name the module whose forward reads its weights"
            )


def _in_region(module: nn.Module, own: _Own, device: str, called: set[str]) -> tuple[RemovableHandle, RemovableHandle]:
    """Run a module's forward in its region, by hooks: `torch.export` loses the path where a forward is replaced."""
    low, is_low = low_dtype(own.precision, "autocast"), bool(low_dtype(own.precision))
    is_cast_around = bool(low_dtype(own.around, "parameters"))
    entered: list[tuple[autocast, bool]] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:  # noqa: ANN401
        called.add(own.pattern)
        region = autocast(device, getattr(torch, low) if low else None, enabled=bool(low))
        entered.append((region, torch.is_autocast_enabled(device) or is_cast_around))
        region.__enter__()
        return (args, kwargs) if is_low else _widened((args, kwargs))

    def leave(_: nn.Module, args: Any, result: Any) -> Any:  # noqa: ANN401
        region, is_low_around = entered.pop()
        region.__exit__(None, None, None)
        return result if is_low_around else _widened(result)

    return (
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, prepend=True, always_call=True),
    )


def _widened(values: Any) -> Any:  # noqa: ANN401
    """Return the values with 16-bit tensors in float32, whatever the nest."""
    halves = [getattr(torch, name) for name in HALVES]
    return tree_map_only(Tensor, lambda x: x.float() if x.dtype in halves else x, values)


def _decided(
    model: nn.Module, precision: PrecisionMode | None
) -> tuple[Mapping[nn.Module, _Own], Mapping[nn.Module, str]]:
    """Return the decision for the outermost modules with a forward, and the dtype that each module casts to."""
    pairs: PrecisionByModule = of_modules(precision)
    precisions: list[Precision | None] = [*(own for _, own in pairs), base_of(precision)]
    rest = len(pairs)
    around: dict[str, tuple[int, int]] = {}  # places of the deciding pattern, and of the one for the forward around
    outermost: dict[nn.Module, tuple[int, str, int]] = {}
    places: dict[nn.Module, int] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        outer, inside = around.get(name.rpartition(".")[0], (rest, rest))
        mine = min(outer, next((i for i, (pattern, _) in enumerate(pairs) if fits(name, pattern)), rest))
        if type(module).forward is not nn.Module.forward:  # a list of modules has none
            if mine != inside:
                outermost[module] = min(outermost.get(module, (rest, "", rest)), (mine, name, inside))
            inside = mine
        places[module] = min(places.get(module, rest), mine)
        around[name] = mine, inside
    for place, (pattern, _) in enumerate(pairs):
        if all(place != mine for mine, _ in around.values()):
            raise PlanError(_names_none(model, pattern, list(around)))
    owns = {
        module: _Own(*pairs[place], name, precisions[inside]) for module, (place, name, inside) in outermost.items()
    }
    return owns, {module: low_dtype(precisions[place], "parameters") for module, place in places.items()}


def _names_none(model: nn.Module, pattern: str, names: list[str]) -> str:
    if any(fits(name, pattern) for name in names):
        return (
            f"precision: every module that {pattern!r} names is named by an earlier pattern, or one around it is, and "
            "the first that fits decides; put it before that"
        )
    near = get_close_matches(pattern, names, _NEAR) or [name for name in names if name][:_NEAR]
    shown = ", ".join(map(repr, near)) or "none, it has no modules inside"
    return f"precision: {pattern!r} names no module of {type(model).__name__}; give names or patterns, such as {shown}"
