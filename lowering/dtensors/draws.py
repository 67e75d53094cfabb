"""Draws on DTensors (`nn.init`, `randn_like`, `F.dropout`) are those of one process, of which ranks keep their parts.

Ranks draw from the state of the first one's generator. Those whose own is in that state go on from where it is then, as
one process does; the others' stays theirs. torch has each rank draw its part alone: on CPUs all draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardwright.lowering import private, private_dtensors

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


def draw_whole() -> None:
    """From now on in this process, draws on DTensors are ours."""
    for name in f"{_WRITTEN} {_LIKE} {_OF_VALUES}".split():
        private_dtensors.on_dtensors(name, _draw)


def _draw(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """What one process would draw; the results that have the shape of the DTensor are laid out as it is."""
    like = next(x for x in (*args, *kwargs.values()) if isinstance(x, DTensor))
    written = private_dtensors.written_arguments(op)
    reads_nothing = private_dtensors.name_of(op).endswith("_like")

    def whole(position: int, name: str, x: object) -> object:
        if not isinstance(x, DTensor):
            return x
        if name in written or (reads_nothing and position == 0):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=private.unwrap(x).device)
        return x.full_tensor().detach()

    names = private_dtensors.argument_names_of(op)
    given = [whole(i, name, x) for i, (name, x) in enumerate(zip(names, args, strict=False))]
    named = {name: whole(-1, name, x) for name, x in kwargs.items()}
    generator = kwargs.get("generator") or private.default_generator(private.unwrap(like).device)
    with _alike(like, generator):
        results = op(*given, **named)
    for name, mine, drawn in _pairs(names, args, kwargs, given, named):
        if name in written:
            private.unwrap(mine).copy_(_part(drawn, mine))
    if written and private_dtensors.returns_written(op):
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
