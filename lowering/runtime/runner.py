"""The runner of one program: it has the gathered blocks, the values that autograd saves, and the reducer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardwright.lowering.random.exact import Draw
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.ranks.untraced import leave_untraced
from shardwright.lowering.runtime.blocks import Blocks
from shardwright.lowering.runtime.buffers import SlicedParameter
from shardwright.lowering.runtime.host import Host, Trip
from shardwright.lowering.runtime.reducer import Reducer, Unit
from shardwright.lowering.runtime.saved import Saved
from shardwright.lowering.runtime.schedule import offloads, schedule, spread_after
from shardwright.lowering.store.foreign import ForeignCalls
from shardwright.lowering.store.storage import Held, by_block, part_of
from shardwright.lowering.text.emit import emit
from shardwright.lowering.text.outside import Outside
from shardwright.lowering.text.program import Program, compile_source, left_to_python
from shardwright.pcg.analysis import buffers_in_backward
from shardwright.pcg.step.parameters import Parameter
from shardwright.pcg.step.verbs import Microbatch, happens


class Runner:
    """The runner of a graph's program, for a whole model or one virtual stage of it."""

    def __init__(
        self,
        outside: Outside,
        ranks: Ranks,
        leaves: Mapping[str, Tensor],
        held: Mapping[str, Held],
        foreign: ForeignCalls | None = None,
    ) -> None:
        """Compile the program of `outside`. `leaves`: the graph's constants, by the model's names.

        `held`: the parameters and buffers that the store keeps, by the model's names. `foreign`: what is called as it
        is.
        """
        self.graph, self.ranks, self.held = outside.graph, ranks, held
        self.leaves = {**leaves, **{name: one.inside for name, one in held.items()}}
        todo, uses = outside.actions, [use.parameter for use in outside.chunk.uses]
        units = ([uses[number] for number in unit] for unit in todo.units)
        self.reducer = Reducer(
            [self._unit(unit) for unit in units],
            [self._of(p.leaf) for p in outside.operations.parameters.values() if p.grad],
            spread_after(todo),
        )
        self.blocks = Blocks(self.reducer.deliver, schedule(todo))
        for block in outside.chunk.blocks:
            first = block.parameters[0]
            encodings = first.gathered_as, first.summed_as
            self.blocks.add(*self._shares(block.parameters), _dtype(first.reduced_dtype), encodings)
        self.reducer.at_end.append(self.blocks.finish)
        copies = offloads(todo)
        self.host = Host(ranks.device, ranks.timeout_s) if copies.leaving and not ranks.is_dry else None
        trips = None if self.host is None else partial(Trip, copies, self.host)
        self.saved = Saved(self.blocks, self.leaves.values(), ranks.device, trips)
        regions = any(o.region for o in outside.operations.listed)
        self.replaces = bool(self.blocks.items or copies.leaving or regions)  # what autograd saves, by handles
        self.in_two = outside.in_two
        self._totals: set[Microbatch] = {action.microbatch for action in chain(*todo.forward) if action.verb == "total"}
        self.constants: dict[str, Tensor] | None = None
        self._parts = by_block(self.leaves)
        self._updated = buffers_in_backward(self.graph)  # buffers that backward reads after the step has written them
        self._runtime: tuple[Any, ...] = (self.blocks.items, self.saved)
        self._foreign: dict[str, Any] = foreign.given(self.graph) if foreign is not None else {}
        self._outside = outside
        self.program: Program = compile_source(emit(self.graph, outside))

    def run(self, local: Mapping[str, Tensor], draw: Draw) -> dict[str, Any]:
        """Run the program on a microbatch and return its outputs."""
        device, axes = self.ranks.device, self.ranks.axes
        if self.constants is None:
            with torch.no_grad():
                constants = self.program.constants(device, *axes)
                self.constants = {name: _by_itself(value) for name, value in constants.items()}
        parts = self._parts
        if self._updated:
            parts = by_block({**self.leaves, **{name: self.leaves[name].clone() for name in self._updated}})
        with self.saved.hooks() if self.replaces else nullcontext():
            return self.program.forward(
                parts, local, self.constants, *self._runtime, device, *axes, draw=draw, **self._foreign
            )

    def sums_loss(self, *, first: bool, last: bool) -> bool:
        """Return whether ranks sum the loss in a step's first, last or other microbatch."""
        return any(happens(when, first=first, last=last) for when in self._totals)

    def write_back(self, buffers: Mapping[str, Tensor]) -> None:
        own = {self.held[name].inside.untyped_storage()._cdata for name in buffers}
        with torch.no_grad():
            parts = {name: part_of(x.detach(), self.held[name].slices) for name, x in buffers.items()}
            for name, x in parts.items():
                if x.untyped_storage()._cdata in own:  # one buffer's new value is another buffer's old value
                    parts[name] = x.clone()
            for name, x in parts.items():
                self.held[name].inside.copy_(x)

    def mark(self) -> None:
        """Give operators and blocks the names of `emit(marked=True)`, for a profiler."""
        self.program = compile_source(emit(self.graph, self._outside, marked=True))

    def compile(self, **options: Any) -> None:
        """Run the program through `torch.compile`."""
        leave_untraced()
        self.program = self.program.optimized(**options)
        self._runtime = (
            left_to_python(self.blocks.items, "gather", "free"),
            *left_to_python([self.saved], "checkpoint", "remade", "offload", "release", "before"),
        )
        self._foreign = {word: left_to_python([parts], "call")[0] for word, parts in self._foreign.items()}

    def _of(self, leaf: str) -> Held:
        return self.held[str(self.graph.by_name[leaf].attr("target"))]

    def _unit(self, own: Sequence[Parameter]) -> Unit:
        like, members = own[0], [self._of(p.leaf) for p in own]
        return Unit(self.ranks.merged(like.sums), members, _dtype(like.reduced_dtype), like.summed_as)

    def _shares(self, parameters: Sequence[Parameter]) -> tuple[list[Tensor], list[SlicedParameter]]:
        shards = [self._of(p.leaf).inside for p in parameters]
        slices = [p.slices for p in parameters if p.slices is not None]
        axes = [self.ranks.merged((s.axis,)) for s in slices]
        dtypes = [_dtype(p.used_dtype) for p in parameters]
        shares = [
            SlicedParameter(
                tuple(shard.shape),
                dtype,
                shard.device,
                axis,
                s.dim,
                s.blocks,
                s.copied,
                p.gathered_as is not None,
            )
            for p, shard, dtype, axis, s in zip(parameters, shards, dtypes, axes, slices, strict=True)
        ]
        return shards, shares


def _by_itself(value: Tensor) -> Tensor:
    """Return a tensor in memory of its own size, not as a part of a larger storage."""
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
