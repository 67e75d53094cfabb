"""Operators on a compiled model's DTensors of which torch would give each rank something of its own.

* A number that is read (`.item()`, `float`, `if`) of a value that ranks have summands of is the whole one.
* What is drawn (`nn.init`, `randn_like`, `F.dropout`) is drawn for the whole tensor, as one process does, and each rank
  keeps its part. Ranks draw from the state of the first one's generator. Those whose own is in that state go on from
  where it is then, as one process does; the others' stays theirs.
* An extreme keeps a NaN, whichever rank has it: gloo drops those that are not on the first.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from shardwright.lowering import private

_WRITTEN = (
    "normal_ uniform_ exponential_ log_normal_ cauchy_ geometric_ random_ random_.from random_.to bernoulli_.float "
    "bernoulli_.Tensor eye.m_out"
)
"""Write all of their first operand, or of `out`, and do not read it."""
_LIKE = (
    "rand_like randn_like randint_like randint_like.low_dtype randint_like.Tensor rand_like.generator "
    "randn_like.generator randint_like.generator randint_like.low_generator_dtype"
)
"""Read nothing of their first operand but its shape."""
_OF_VALUES = (
    "native_dropout bernoulli bernoulli.p poisson binomial multinomial normal.Tensor_float normal.float_Tensor "
    "normal.Tensor_Tensor rrelu_with_noise _standard_gamma _sample_dirichlet"
)
"""Draw by the values of their operands."""


def watch() -> None:
    """From now on in this process, torch calls ours for these operators on DTensors, and for what finds overflows."""
    private.find_overflows_together()
    private.on_dtensors("_local_scalar_dense", _read)
    for name in f"{_WRITTEN} {_LIKE} {_OF_VALUES}".split():
        private.on_dtensors(name, _draw)


def all_extreme(x: Tensor, group: dist.ProcessGroup | None = None, *, least: bool = False) -> Tensor:
    """The largest of each element over a group's ranks, or the least; NaN where any rank has one."""
    sign = -1 if least else 1
    if not x.is_floating_point():
        found = x.to(torch.int64) * sign
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        return (found * sign).to(x.dtype)
    lost = x.isnan()
    sent = torch.stack([(x * sign).masked_fill(lost, float("-inf")), lost.to(x.dtype)])
    dist.all_reduce(sent, dist.ReduceOp.MAX, group)
    return (sent[0] * sign).masked_fill(sent[1] > 0, float("nan"))


# ---- numbers ----


def _read(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """The number that a DTensor of one element is. Every rank of its mesh takes part, where they have summands."""
    (tensor,) = args
    return op(_whole(tensor), **kwargs)


def _whole(tensor: DTensor) -> Tensor:
    if any(not isinstance(placement, (Partial, Replicate)) for placement in tensor.placements):
        return tensor.full_tensor().detach()
    axes = enumerate(tensor.placements)
    return reduce(lambda value, at: _summed(value, at[1], tensor, at[0]), axes, private.unwrap(tensor).detach())


def _summed(value: Tensor, placement: Placement, tensor: DTensor, axis: int) -> Tensor:
    """A value of which the ranks of an axis have summands, or others of which it is the extreme."""
    if not isinstance(placement, Partial):
        return value
    if placement.reduce_op in ("max", "min"):
        return all_extreme(value, tensor.device_mesh.get_group(axis), least=placement.reduce_op == "min")
    return private.reduced(placement, value, tensor.device_mesh, axis)


# ---- draws ----


def _draw(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """What one process would draw; the results that have the shape of the DTensor are laid out as it is."""
    like = next(x for x in (*args, *kwargs.values()) if isinstance(x, DTensor))
    written = private.written_arguments(op)
    reads_nothing = private.name_of(op).endswith("_like")

    def whole(position: int, name: str, x: object) -> object:
        if not isinstance(x, DTensor):
            return x
        if name in written or (reads_nothing and position == 0):
            return torch.empty(x.shape, dtype=x.dtype, device=private.unwrap(x).device)
        return x.full_tensor().detach()

    names = private.argument_names_of(op)
    given = [whole(i, name, x) for i, (name, x) in enumerate(zip(names, args, strict=False))]
    named = {name: whole(-1, name, x) for name, x in kwargs.items()}
    generator = kwargs.get("generator") or private.default_generator(private.unwrap(like).device)
    with _alike(like, generator):
        results = op(*given, **named)
    for name, mine, drawn in _pairs(names, args, kwargs, given, named):
        if name in written:
            private.unwrap(mine).copy_(_part(drawn, mine))
    if written and private.returns_written(op):
        return next(mine for name, mine, _ in _pairs(names, args, kwargs, given, named) if name in written)
    return tuple(_wrapped(r, like) for r in results) if isinstance(results, tuple) else _wrapped(results, like)


def _pairs(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Any], named: Mapping[str, Any]
) -> Iterable[tuple[str, DTensor, Tensor]]:
    """The DTensors among the arguments, by name, each with the whole tensor in its place."""
    everything = [*zip(names, args, given, strict=False), *((name, x, named[name]) for name, x in kwargs.items())]
    return [(name, x, whole) for name, x, whole in everything if isinstance(x, DTensor)]


@contextmanager
def _alike(like: DTensor, generator: torch.Generator) -> Generator[None]:
    """A generator is in the state that the first rank's is in."""
    own = generator.get_state()
    sent = own.to(private.unwrap(like).device, copy=True)
    for group in like.device_mesh.get_all_groups():
        dist.broadcast(sent, group=group, group_src=0)
    first = sent.cpu()
    generator.set_state(first)
    try:
        yield
    finally:
        if not torch.equal(own, first):
            generator.set_state(own)


def _wrapped(whole: Tensor, like: DTensor) -> DTensor:
    """A whole tensor as a DTensor, laid out as another one of its shape."""
    spec = private.spec_of(like)
    replicated = tuple(Replicate() for _ in spec.placements)
    same = whole.shape == like.shape
    kept = tuple(p if same and not isinstance(p, Partial) else Replicate() for p in spec.placements)
    found = private.wrap(whole, private.make_spec(spec.mesh, replicated, whole))
    return found if kept == replicated else found.redistribute(placements=kept)


def _part(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a whole tensor of a DTensor's shape."""
    return private.unwrap(_wrapped(whole, like))
