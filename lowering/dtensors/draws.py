"""Draws on DTensors (`nn.init`, `randn_like`, `F.dropout`): each rank draws as one process would and keeps its part.

All ranks draw from the state of the first rank's generator. A generator that was in this state advances, as in one
process; any other generator is put back to its own state. In torch, each rank draws its part alone, and on CPUs all
ranks draw the same numbers.
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
"""Operators that write all of their first operand, or of `out`, and do not read it."""
_LIKE = (
    "rand_like randn_like randint_like randint_like.low_dtype randint_like.Tensor rand_like.generator "
    "randn_like.generator randint_like.generator randint_like.low_generator_dtype"
)
"""Operators that read only the shape of their first operand."""
_OF_VALUES = (
    "native_dropout bernoulli bernoulli.p poisson binomial multinomial normal.Tensor_float normal.float_Tensor "
    "normal.Tensor_Tensor rrelu_with_noise _standard_gamma _sample_dirichlet"
)
"""Operators whose draws depend on the values of their operands."""


def draw_whole() -> None:
    """Replace torch's draws on DTensors by ours in this process."""
    for name in f"{_WRITTEN} {_LIKE} {_OF_VALUES}".split():
        private_dtensors.on_dtensors(name, _draw)


def _draw(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Draw what one process would draw; results of the DTensor's shape get its placements."""
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
    """Return the DTensors among the arguments as (name, DTensor, the whole tensor in its place)."""
    everything = [*zip(names, args, given, strict=False), *((name, x, named[name]) for name, x in kwargs.items())]
    return [(name, x, whole) for name, x, whole in everything if isinstance(x, DTensor)]


@contextmanager
def _alike(like: DTensor, generator: torch.Generator) -> Generator[None]:
    """Put a generator into the state of the first rank's, and put it back afterwards if the two states differed."""
    state = generator.get_state()
    sent = state.to(private.unwrap(like).device, copy=True)
    for group in like.device_mesh.get_all_groups():
        dist.broadcast(sent, group=group, group_src=0)
    first = sent.cpu()
    generator.set_state(first)
    try:
        yield
    finally:
        if not torch.equal(state, first):
            generator.set_state(state)


def _wrapped(whole: Tensor, like: DTensor) -> DTensor:
    """Return a whole tensor as a DTensor with the placements of `like` if their shapes agree, else replicated."""
    spec = private.spec_of(like)
    replicated = tuple(Replicate() for _ in spec.placements)
    same = whole.shape == like.shape
    placements = tuple(p if same and not isinstance(p, Partial) else Replicate() for p in spec.placements)
    wrapped = private.wrap(whole, private.make_spec(spec.mesh, replicated, whole))
    return wrapped if placements == replicated else wrapped.redistribute(placements=placements)


def _part(whole: Tensor, like: DTensor) -> Tensor:
    """Return this rank's part of a whole tensor, cut as the DTensor `like` is."""
    return private.unwrap(_wrapped(whole, like))
