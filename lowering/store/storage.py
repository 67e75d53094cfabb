"""The memory of parameters and buffers: a DTensor outside, and inside a leaf that shares its local storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from shardwright.lowering import private
from shardwright.lowering.ranks.movement import MeshAxis, take
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.layout import Layouts, R, local_blocks, local_shape, shard_order
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.parameters import module_block


def with_others(local: Tensor, layouts: Layouts, ranks: Ranks) -> Tensor:
    """Return a rank's part as a DTensor with those of the others; a tensor that every rank has whole stays as it is."""
    if all(layout == R for layout in layouts):
        return local
    return DTensor.from_local(local, ranks.device_mesh, placements(layouts, ranks.mesh), run_check=False)


def placements(layouts: Layouts, mesh: Mesh) -> tuple[Placement, ...]:
    """Return DTensor's placements for R and S layouts.

    DTensor slices in mesh order, and its split factor counts the blocks of what earlier axes leave. So the number of
    blocks is divided by the sizes of earlier axes that take an outer digit of the same dimension.
    """
    by_axis: list[Placement] = []
    for axis, layout in enumerate(layouts):
        if not layout.is_shard:
            by_axis.append(Replicate())
            continue
        blocks = local_blocks(layouts[: axis + 1], axis, mesh.sizes)
        by_axis.append(ShardPlacement(layout.dim) if blocks == 1 else private.strided_shard(layout.dim, blocks))
    return tuple(by_axis) or (Replicate(),)


Slices = Sequence[tuple[MeshAxis, int, int]]
"""The successive slices from a logical tensor to this rank's part of it: axis, dim and blocks of each."""


def slices(shape: tuple[int, ...], layouts: Layouts, ranks: Ranks) -> Slices:
    """Return the slices that lead from a logical tensor of this shape to this rank's part.

    Of the model's tensor, where that is shorter than `shape`, they give this rank's part without padding.
    """
    steps = shard_order(shape, layouts, ranks.mesh.sizes)
    assert not isinstance(steps, str), steps
    return [(ranks.axes[axis], dim, blocks) for axis, dim, blocks in steps]


def part_of(whole: Tensor, slices: Slices) -> Tensor:
    """Return a rank's part of a logical tensor."""
    for axis, dim, blocks in slices:
        whole = take(whole, axis, dim, blocks)
    return whole


def check_state(name: str, value: object, like: Tensor) -> None:
    """Raise a `PlanError` if a state_dict's value of a parameter or buffer is not a tensor, or has another shape."""
    if not isinstance(value, Tensor) or value.shape != like.shape:
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise PlanError(
            f"{name}: the state has {got}, the model {list(like.shape)}; load a state_dict of the same model"
        )


def whole_state(value: Tensor) -> Tensor:
    """Return a state_dict's value, a logical tensor or a DTensor of any layout, as a logical tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def real_shape(value: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor in a graph, which has complex numbers as pairs of real ones."""
    return (*value.shape, 2) if value.is_complex() else tuple(value.shape)


def as_real(value: Tensor) -> Tensor:
    """Return a tensor as a graph has it, on the same memory: of complex numbers, their pairs of real ones."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def as_complex(pairs: Tensor) -> Tensor:
    """Return pairs of real numbers as complex ones; on the same memory, if each pair lies as one number in it."""
    if not lies_in_pairs(pairs):
        pairs = pairs.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(pairs)


def lies_in_pairs(x: Tensor) -> bool:
    """Return whether pairs of real numbers lie in memory as complex numbers do."""
    return x.stride(-1) == 1 and not any(steps % 2 for steps in (*x.stride()[:-1], x.storage_offset()))


@dataclass
class Held:
    """A parameter or buffer: users and optimizers see `outside`, the program reads `inside`.

    A parameter's `outside` is a DTensor, and `inside` is a leaf on its local storage. A replicated buffer's are the
    same plain tensor; a sharded buffer's are a DTensor and its local part. Complex numbers `outside` are pairs of real
    ones `inside`, in a last dimension. `slices` lead from the whole value to this
    rank's part. `padded` is the logical shape of `inside`; where it is longer than that of `outside`, the padding is
    zeros at the end of `inside`, of which `outside` has the rest. `counts` is False if an earlier pipeline stage has it
    too, whose copy counts in norms.
    """

    names: tuple[str, ...]
    layouts: Layouts
    outside: Tensor
    inside: Tensor
    slices: Slices = ()
    padded: tuple[int, ...] = ()
    counts: bool = True

    def __post_init__(self) -> None:
        self.memory = private.memory_of(self.outside)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_complex(self) -> bool:
        return self.outside.is_complex()

    def load(self, value: Tensor) -> None:
        """Copy a logical tensor, or a DTensor of any layout on the same ranks, into the local storage."""
        part = part_of(whole_state(value), self.slices)
        with torch.no_grad():
            self.trimmed(self.inside.detach()).copy_(as_real(part.to(self.outside.dtype) if self.is_complex else part))

    def own_leaf(self) -> Held:
        """Return the same parameter with a new leaf for autograd on the same memory."""
        return replace(self, inside=self.inside.detach().requires_grad_(self.inside.requires_grad))

    def trimmed(self, part: Tensor) -> Tensor:
        """Return a part of the shape of `inside` without its padding."""
        return _beginning(part, private.unwrap(self.outside).shape) if self.padded != self.outside.shape else part

    def shown(self, part: Tensor) -> Tensor:
        """Return a part of the shape of `inside` as users see it: without padding, complex where the model is."""
        return as_complex(self.trimmed(part)) if self.is_complex else self.trimmed(part)

    def shares(self, part: Tensor) -> bool:
        """Return whether `shown` is on the memory of the part."""
        return not self.is_complex or lies_in_pairs(self.trimmed(part))

    def wrap(self, part: Tensor) -> Tensor:
        """Return a part of the shape of `inside` as a DTensor with the parameter's layout, without its padding."""
        if part.shape != self.inside.shape:
            raise AssertionError(f"{self.name}: a part {list(part.shape)}, expected {list(self.inside.shape)}")
        return private.wrap(self.shown(part), private.spec_of(self.outside))

    def accept_gradient(self, part: Tensor, wrapped: Tensor | None = None) -> None:
        """Add this rank's part of the gradient to `outside.grad`; `wrapped`, if given, is the same as a DTensor.

        Hooks on the parameter are called as autograd calls them. A parameter that has been frozen accepts nothing.
        """
        if not self.outside.requires_grad:
            return
        if hooks := private.gradient_hooks(self.outside):
            wrapped = self._hooked(self.wrap(part) if wrapped is None else wrapped, hooks)
        if self.outside.grad is None:
            self.outside.grad = self.wrap(part) if wrapped is None else wrapped
        else:
            private.unwrap(self.outside.grad).add_(self.shown(part) if wrapped is None else private.unwrap(wrapped))
        for hook in private.accumulated_hooks(self.outside):
            hook(self.outside)

    def _hooked(self, gradient: Tensor, hooks: Sequence[private.Hook]) -> Tensor:
        """Return a gradient after its hooks; each may return another gradient with the parameter's layout."""
        for hook in hooks:
            returned = hook(gradient)
            if returned is None:
                continue
            spec = private.spec_of(self.outside)
            if (
                not isinstance(returned, DTensor)
                or returned.placements != spec.placements
                or returned.shape != spec.shape
            ):
                raise ShardwrightError(
                    f"{self.name}: a hook returned {_described(returned)}, expected a DTensor {list(spec.shape)} with "
                    f"placements {spec.placements}, as the gradient that it was given; compute it from that"
                )
            gradient = returned
        return gradient


def hold_parameter(
    part: Tensor, like: Tensor, padded: tuple[int, ...], names: tuple[str, ...], layouts: Layouts, ranks: Ranks
) -> Held:
    """Make a parameter like another tensor, of which this rank has a part, in memory for the `padded` shape."""
    memory = part = as_real(part)
    if padded != real_shape(like):
        memory = part.new_zeros(local_shape(padded, layouts, ranks.mesh.sizes))
        part = _beginning(memory, part.shape).copy_(part)
    own = torch.view_as_complex(part) if like.is_complex() else part
    outside = private.wrap_parameter(own, _spec(like, layouts, ranks), requires_grad=like.requires_grad)
    inside = memory if memory is not part else as_real(private.unwrap(outside))
    inside = inside.detach().requires_grad_(like.requires_grad)
    return Held(names, layouts, outside, inside, slices(padded, layouts, ranks), padded)


def _beginning(part: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a view of the first elements along each dimension."""
    return part[tuple(slice(extent) for extent in shape)]


def hold_buffer(
    part: Tensor, like: Tensor, padded: tuple[int, ...], names: tuple[str, ...], layouts: Layouts, ranks: Ranks
) -> Held:
    """Make a buffer: a plain tensor if it is replicated, a DTensor if it is sharded."""
    is_sharded = any(layout.is_shard for layout in layouts)
    part = part.resolve_conj()
    outside = private.wrap(part, _spec(like, layouts, ranks)) if is_sharded else part
    return Held(names, layouts, outside, as_real(part), slices(padded, layouts, ranks), padded)


Hold = Callable[[Tensor, Tensor, tuple[int, ...], tuple[str, ...], Layouts, Ranks], Held]
"""`hold_parameter` or `hold_buffer`."""


def _spec(like: Tensor, layouts: Layouts, ranks: Ranks) -> private.DTensorSpec:
    meta = torch.empty(like.shape, dtype=like.dtype, device="meta")
    return private.make_spec(ranks.device_mesh, placements(layouts, ranks.mesh), meta)


def refuse_replaced(held: Iterable[Held]) -> None:
    """Raise if another tensor was put into a parameter, which the program does not see."""
    for one in held:
        if private.memory_of(one.outside) != one.memory:
            raise ShardwrightError(
                f"{one.name}: another tensor was put in its place (p.data = ..., vector_to_parameters, swap_tensors), "
                "and the program reads the memory that it had; compile again, and copy into it (p.data.copy_(...))"
            )


def refuse_thawed(held: Iterable[Held]) -> None:
    """Raise if a parameter or buffer was captured without a gradient and requires one now."""
    for one in held:
        if one.outside.requires_grad and not one.inside.requires_grad:
            raise ShardwrightError(
                f"{one.name} was captured with requires_grad=False, so the program computes no gradient of it; "
                "set requires_grad on the model and compile again"
            )


def _described(returned: object) -> str:
    if isinstance(returned, DTensor):
        return f"a DTensor {list(returned.shape)} with placements {returned.placements}"
    return f"a plain tensor {list(returned.shape)}" if isinstance(returned, Tensor) else f"a {type(returned).__name__}"


def by_block(leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return leaves by name and, under each repeated block of the model, its own leaves by their names in the block."""
    by_name: dict[str, Any] = dict(leaves)
    for name, value in leaves.items():
        if block := module_block(name):
            by_name.setdefault(block, {})[name.removeprefix(f"{block}.")] = value
    return by_name
