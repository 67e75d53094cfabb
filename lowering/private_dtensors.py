"""Where lowering puts something of its own in the place of what torch does with DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _state_dict_utils as state_dict_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.distributed.tensor import _redistribute as redistribution
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardwright.lowering.private import OpOverload, is_strided, unwrap, wait

# pyright: reportPrivateUsage=false, reportArgumentType=false

# ---- ours ----

_MESHES: WeakValueDictionary[int, DeviceMesh] = WeakValueDictionary()
"""Those that our DTensors lie on, while they are there."""


def claim(device_mesh: DeviceMesh) -> None:
    """DTensors on this mesh are ours: what is mended here holds for them, and no other DTensor of the process."""
    _MESHES[id(device_mesh)] = device_mesh


def is_ours(device_mesh: DeviceMesh) -> bool:
    """Whether DTensors on this mesh, or on an equal one, are ours: torch itself puts one in the place of the other."""
    return id(device_mesh) in _MESHES or device_mesh in list(_MESHES.values())


# ---- operators ----

DTensorHandler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], object]
_DISPATCHER = DTensor._op_dispatcher
_TORCHS: dict[OpOverload, DTensorHandler] = dict(_DISPATCHER._custom_op_handlers)
"""What torch has itself for some operators."""


def on_dtensors(name: str, handler: DTensorHandler) -> None:
    """From now on in this process, an ATen operator is this function on our DTensors. One that torch lacks stays away.

    The first DTensor among the arguments says whose they are.
    """
    if op := _operator(name):
        _DISPATCHER._custom_op_handlers[op] = partial(_on_ours, handler)


def before_writes(check: Callable[[OpOverload, list[DTensor]], None]) -> None:
    """From now on in this process, `check` may raise before an operator writes to some of our DTensors."""
    handlers = _DISPATCHER._custom_op_handlers
    for op, written in writing_operators().items():
        handlers[op] = partial(_on_ours, partial(_checked, check, written, handlers.get(op, as_torch_does)))


@cache
def writing_operators() -> Mapping[OpOverload, set[str]]:
    """The operators of ATen that write to arguments, and to which."""
    found = dict[OpOverload, set[str]]()
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    for name in names:
        packet, _, overload = name.partition(".")
        if not packet.endswith("_") and "out" not in overload:
            continue
        if (op := _operator(name)) and (written := written_arguments(op)):
            found[op] = written
    return found


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
    """Those among arguments, and in lists among them."""
    for value in values:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (x for x in value if isinstance(x, DTensor))


def _operator(name: str) -> OpOverload | None:
    """An ATen operator; None where torch has none of that name."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    return op if isinstance(op, OpOverload) else None


def as_torch_does(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """What an operator gives on DTensors where ours in its place leaves it to torch."""
    handlers = _DISPATCHER._custom_op_handlers
    own = handlers.pop(op)
    if op in _TORCHS:
        handlers[op] = _TORCHS[op]
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = own


def name_of(op: OpOverload) -> str:
    """An operator's name, without its overload."""
    return op._schema.name.partition("::")[2]


def argument_names_of(op: OpOverload) -> list[str]:
    """The names of an operator's arguments."""
    return [argument.name for argument in op._schema.arguments]


def written_arguments(op: OpOverload) -> set[str]:
    """The names of the arguments that an operator writes to."""
    found = op._schema.arguments
    return {argument.name for argument in found if argument.alias_info is not None and argument.alias_info.is_write}


def returns_written(op: OpOverload) -> bool:
    """Whether an operator returns what it writes to."""
    return any(result.alias_info is not None for result in op._schema.returns)


def reduced(placement: Partial, value: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    """What the ranks of an axis have summands of, by what a placement says: a sum, a norm, …"""
    return wait(placement._reduce_value(value, mesh, axis))


def find_overflows_together() -> None:
    """From now on, what `torch.amp.GradScaler` finds in gradients that are DTensors holds for all ranks of their mesh.

    A scaler skips the update, and lowers its scale, where a gradient is not finite. torch's own rule for DTensors asks
    other ranks only along the axes on which the *first* gradient is sharded. So a rank could skip alone: where another
    gradient is sharded, and where copies of a replicated one differ, as a kernel may overflow on one device only.
    """
    on_dtensors("_amp_foreach_non_finite_check_and_unscale_", _unscale_together)


_BESIDE: WeakValueDictionary[DeviceMesh, dist.ProcessGroup] = WeakValueDictionary()
"""By the mesh of a pipeline stage, the group of those at a rank's place in all stages' meshes, while it is there."""


def tell_overflows_beside(device_mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """What is found in gradients on this mesh holds for the ranks of this group too, and so for those of their meshes.

    Each of them has to look for it as often.
    """
    _BESIDE[device_mesh] = group


def _unscale_together(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    gradients, found, inverse_scale = args
    op([unwrap(gradient) for gradient in gradients], found, inverse_scale, **kwargs)
    mesh = gradients[0].device_mesh
    beside = _BESIDE.get(mesh)
    for group in (*mesh.get_all_groups(), *([] if beside is None else [beside])):
        dist.all_reduce(found, dist.ReduceOp.MAX, group)


# ---- tools ----

_DISTRIBUTE_TENSORS = state_dict_utils._distribute_tensors
_PLAN_REDISTRIBUTION = redistribution._gen_transform_infos_non_cached


def distribute_whole_tensors(distribute: Callable[[dict[str, Any], Sequence[str], torch.device], None]) -> None:
    """From now on, `distribute` comes first where whole tensors, broadcast from rank 0, go into those of a state dict.

    It is given pairs of both, by name, and replaces those that it has done; torch does the others.
    """

    def both(states: dict[str, Any], names: list[str], device: torch.device, group: Any = None) -> None:  # noqa: ANN401
        distribute(states, names, device)
        _DISTRIBUTE_TENSORS(states, names, device, group)

    state_dict_utils._distribute_tensors = both


Step = tuple[int, tuple[Placement, Placement], list[int]]


def plan_strided_redistributions(plan: Callable[[DTensorSpec, DTensorSpec], list[Step]]) -> None:
    """From now on, DTensors of ours with a strided shard, before or after, are redistributed by what `plan` gives.

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
"""By operator that gives a tensor another shape, what torch says of the placements of the result."""


def check_views(check: Callable[[DTensorSpec, DTensorSpec | None, Sequence[int]], None]) -> None:
    """From now on, where one of ours with a strided shard, before or after, is given another shape, `check` may raise.

    It is given the specification before, that after (None where torch has failed), and the shape as it was passed.
    """

    def checked(own: Callable[[Any], Any], schema: Any) -> Any:  # noqa: ANN401
        tensor, shape = schema.args_schema[:2]
        before = tensor.strategies[0].output_spec
        try:
            found = own(schema)
            option = found.strategies[0]
            before, after = option.input_specs[0], option.output_spec
        except Exception:
            if any(map(is_strided, before.placements)) and is_ours(before.mesh):
                check(before, None, shape)
            raise
        if any(map(is_strided, (*before.placements, *after.placements))) and is_ours(before.mesh):
            check(before, after, shape)
        return found

    for op, own in _VIEWS.items():
        _PROPAGATOR.op_strategy_funcs[op] = partial(checked, own)
