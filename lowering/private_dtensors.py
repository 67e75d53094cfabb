"""The places in torch's private APIs where lowering replaces torch's treatment of DTensors by its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed import _state_dict_utils as state_dict_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.distributed.tensor import _redistribute as redistribution
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardwright.lowering.private import OpOverload, is_strided, unwrap, wait

# pyright: reportPrivateUsage=false, reportArgumentType=false

# ---- ours ----

_MESHES: WeakValueDictionary[int, DeviceMesh] = WeakValueDictionary()
"""The meshes of our DTensors, while they exist."""


def claim(device_mesh: DeviceMesh) -> None:
    """Declare DTensors on this mesh ours: the replacements apply to them, and to no other DTensor of the process."""
    _MESHES[id(device_mesh)] = device_mesh


def is_ours(device_mesh: DeviceMesh) -> bool:
    """Return whether DTensors on a mesh are ours, or on an equal mesh, as torch itself substitutes equal meshes."""
    return id(device_mesh) in _MESHES or device_mesh in list(_MESHES.values())


def part_if_any(x: Any) -> Any:  # noqa: ANN401
    """Return this rank's part of a DTensor; other values are returned as they are."""
    return unwrap(x) if isinstance(x, DTensor) else x


def spec_if_any(x: object) -> DTensorSpec | None:
    """Return the metadata of a DTensor; None for other values."""
    return x._spec if isinstance(x, DTensor) else None


# ---- operators ----

DTensorHandler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], object]
_DISPATCHER = DTensor._op_dispatcher
_TORCHS: dict[OpOverload, DTensorHandler] = dict(_DISPATCHER._custom_op_handlers)
"""Torch's own handlers, by operator."""


def on_dtensors(name: str, handler: DTensorHandler) -> None:
    """Replace an ATen operator on our DTensors by a handler, in this process. An operator that torch lacks is skipped.

    The first DTensor among the arguments decides whether they are ours.
    """
    if op := _operator(name):
        _DISPATCHER._custom_op_handlers[op] = partial(_on_ours, handler)


def before_writes(check: Callable[[OpOverload, list[DTensor]], None]) -> None:
    """Call `check`, which may raise, in this process before any operator writes to some of our DTensors."""
    handlers = _DISPATCHER._custom_op_handlers
    for op, written in writing_operators().items():
        handlers[op] = partial(_on_ours, partial(_checked, check, written, handlers.get(op, as_torch_does)))


@cache
def writing_operators() -> Mapping[OpOverload, set[str]]:
    """Return the operators of ATen that write to arguments, with the names of these arguments."""
    writing = dict[OpOverload, set[str]]()
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    for name in names:
        packet, _, overload = name.partition(".")
        if not packet.endswith("_") and "out" not in overload:
            continue
        if (op := _operator(name)) and (written := written_arguments(op)):
            writing[op] = written
    return writing


def _checked(
    check: Callable[[OpOverload, list[DTensor]], None],
    written: set[str],
    handler: DTensorHandler,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> object:
    named = (*zip(argument_names_of(op), args, strict=False), *kwargs.items())
    check(op, list(_dtensors(value for name, value in named if name in written)))
    return handler(op, args, kwargs)


def _on_ours(handler: DTensorHandler, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    first = next(_dtensors((*args, *kwargs.values())), None)
    if first is None or not is_ours(first.device_mesh):
        return as_torch_does(op, args, kwargs)
    return handler(op, args, kwargs)


def _dtensors(values: Iterable[object]) -> Iterator[DTensor]:
    """Yield the DTensors among arguments, and in lists among them."""
    for value in values:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (x for x in value if isinstance(x, DTensor))


def _operator(name: str) -> OpOverload | None:
    """Return an ATen operator, or None if torch has none of this name."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    return op if isinstance(op, OpOverload) else None


def as_torch_does(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Run an operator as torch does on DTensors, without our handler."""
    handlers = _DISPATCHER._custom_op_handlers
    handler = handlers.pop(op)
    if op in _TORCHS:
        handlers[op] = _TORCHS[op]
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


def name_of(op: OpOverload) -> str:
    """Return an operator's name, without its overload."""
    return op._schema.name.partition("::")[2]


def argument_names_of(op: OpOverload) -> list[str]:
    """Return the names of an operator's arguments."""
    return [argument.name for argument in op._schema.arguments]


def written_arguments(op: OpOverload) -> set[str]:
    """Return the names of the arguments that an operator writes to."""
    arguments = op._schema.arguments
    return {argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write}


def returns_written(op: OpOverload) -> bool:
    """Return whether an operator returns the tensors that it writes to."""
    return any(result.alias_info is not None for result in op._schema.returns)


def reduced(placement: Partial, value: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    """Return a value reduced over the ranks of an axis by a partial placement: a sum, a norm, …"""
    return wait(placement._reduce_value(value, mesh, axis))


_UNSCALE = GradScaler._unscale_grads_


def find_overflows_together() -> None:
    """Make all ranks of a module share the overflows that `torch.amp.GradScaler` finds in gradients that are DTensors.

    A scaler skips the update, and lowers its scale, if a gradient is not finite. torch's own rule for DTensors asks
    other ranks only along the axes on which the *first* gradient is sharded. So a rank could skip alone if another
    gradient is sharded on other axes, or if copies of a replicated gradient differ: a kernel may overflow on one device
    only. Torch searches once for each dtype. Stages may have other dtypes, so the outcome of all searches is shared.
    """
    on_dtensors("_amp_foreach_non_finite_check_and_unscale_", _unscale_parts)
    GradScaler._unscale_grads_ = _unscale_together


_BESIDE: WeakValueDictionary[DeviceMesh, dist.ProcessGroup] = WeakValueDictionary()
"""By the mesh of a pipeline stage, the group of a rank's column over all stages, while it exists."""


def tell_overflows_beside(device_mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Share the overflows in gradients on this mesh with the ranks of this group, too, and so with their meshes.

    All these ranks must unscale equally often.
    """
    _BESIDE[device_mesh] = group


def _unscale_parts(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale this rank's parts. Complex numbers, which the operator does not take, are pairs of real ones."""
    gradients, found_inf, inverse_scale = args
    parts = (unwrap(gradient) for gradient in gradients)
    op([torch.view_as_real(x) if x.is_complex() else x for x in parts], found_inf, inverse_scale, **kwargs)


def _unscale_together(
    self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> dict[torch.device, Tensor]:
    infinite = _UNSCALE(self, optimizer, *args, **kwargs)
    owned = (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor))
    for mesh in {id(p.device_mesh): p.device_mesh for p in owned if is_ours(p.device_mesh)}.values():
        device = torch.device(mesh.device_type)
        flag = torch.stack([torch.zeros((), device=device), *(x.to(device).view(()) for x in infinite.values())]).amax()
        group_beyond = _BESIDE.get(mesh)
        for group in (*mesh.get_all_groups(), *([] if group_beyond is None else [group_beyond])):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group)
        infinite[device] = flag
    return infinite


# ---- tools ----

_DISTRIBUTE_TENSORS = state_dict_utils._distribute_tensors
_PLAN_REDISTRIBUTION = redistribution._gen_transform_infos_non_cached


def distribute_whole_tensors(distribute: Callable[[dict[str, Any], Sequence[str], torch.device], None]) -> None:
    """Call `distribute` first when whole tensors, broadcast from rank 0, are copied into those of a state dict.

    It receives pairs of both, by name, and replaces the pairs that it has copied; torch copies the others.
    """

    def both(states: dict[str, Any], names: list[str], device: torch.device, group: Any = None) -> None:  # noqa: ANN401
        distribute(states, names, device)
        _DISTRIBUTE_TENSORS(states, names, device, group)

    state_dict_utils._distribute_tensors = both


ReshardStep = tuple[int, tuple[Placement, Placement], list[int]]


def plan_strided_redistributions(plan: Callable[[DTensorSpec, DTensorSpec], list[ReshardStep]]) -> None:
    """Redistribute our DTensors by the steps of `plan` if they have a strided shard, before or after.

    A step is an axis, its placements before and after, and the shape that earlier axes leave of the logical tensor.
    """

    def chosen(source: DTensorSpec, target: DTensorSpec, *args: Any, **kwargs: Any) -> list[Any]:
        if not any(map(is_strided, (*source.placements, *target.placements))) or not is_ours(source.mesh):
            return _PLAN_REDISTRIBUTION(source, target, *args, **kwargs)
        return [redistribution._TransformInfo(*step) for step in plan(source, target)]

    redistribution._gen_transform_infos_non_cached = chosen
    redistribution._gen_transform_infos.cache_clear()


_PROPAGATOR = DTensor._op_dispatcher.sharding_propagator
_VIEWS = {
    getattr(torch.ops.aten, name).default: _PROPAGATOR.op_strategy_funcs[getattr(torch.ops.aten, name).default]
    for name in ("view", "view_copy", "_unsafe_view", "reshape")
}
"""Torch's rules for the placements of results, by the operator that changes a tensor's shape."""


def check_views(check: Callable[[DTensorSpec, DTensorSpec | None, Sequence[int]], None]) -> None:
    """Call `check`, which may raise, when one of our DTensors with a strided shard, before or after, changes its shape.

    It receives the specifications before and after (None if torch has failed), and the shape as it was passed.
    """

    def checked(strategy_of: Callable[[Any], Any], schema: Any) -> Any:  # noqa: ANN401
        tensor, shape = schema.args_schema[:2]
        before = tensor.strategies[0].output_spec
        try:
            strategy = strategy_of(schema)
            option = strategy.strategies[0]
            before, after = option.input_specs[0], option.output_spec
        except Exception:
            if any(map(is_strided, before.placements)) and is_ours(before.mesh):
                check(before, None, shape)
            raise
        if any(map(is_strided, (*before.placements, *after.placements))) and is_ours(before.mesh):
            check(before, after, shape)
        return strategy

    for op, function in _VIEWS.items():
        _PROPAGATOR.op_strategy_funcs[op] = partial(checked, function)
