"""The stages of one graph on equal devices, made from what its operators cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property, reduce
from itertools import chain

from shardwright.cost.collectives.buffers import axes_bytes
from shardwright.cost.timeline.chain import Unit
from shardwright.cost.timeline.clock import SHARING
from shardwright.cost.timeline.memory import Stored, state_bytes, update_bytes
from shardwright.cost.timeline.pool import joined, pool_bytes
from shardwright.cost.timeline.pricing import is_bucketed, price_backward, price_forward
from shardwright.cost.timeline.segments import ChunkSegments, SimulatedSegments, Stage
from shardwright.cost.timeline.steps import Steps
from shardwright.cost.timeline.tasks import Recorder, Segment
from shardwright.cost.timeline.timeline import Kind, piece_timelines
from shardwright.pcg.analysis import kept_constants
from shardwright.pcg.stages import STAGES
from shardwright.pcg.step.actions import actions
from shardwright.pcg.step.chunk import Chunk, Stretch
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.parameters import Parameter
from shardwright.pcg.step.schedules import Phase, phases
from shardwright.pcg.step.sections import Places, Share, places, sections, shared, stretches, units

KnownPieces = dict[tuple[str, tuple[tuple[Stretch, int], ...], bool, bool], ChunkSegments]
"""By all that they are made of: what a piece is called, its operations, and how it is run."""
_NAMES = 1 + Parameter._fields.index("module")
"""So many fields of a parameter are names, the first ones."""


class Maker:
    """Makes stages on equal devices; equal pieces are built once."""

    def __init__(
        self, steps: Steps, repeats: Mapping[str, int], known: KnownPieces, simulated: SimulatedSegments
    ) -> None:
        """`known`: pieces of the same operations, of which other values are made again."""
        self.steps, self._known, self._simulated = steps, known, simulated
        self.cut = sections(steps, repeats, by_block=steps.execution.schedule.num_stages > 1)
        self._pieces: dict[tuple[Share, bool, bool], ChunkSegments] = {}
        self._stages: dict[tuple[object, ...], Stage] = {}
        self._units: dict[Hashable, Unit] = {}
        self._axes_bytes = axes_bytes(steps.graph, steps.cluster, steps.fused.values())
        self._first_uses_s = _first_uses_s(steps)

    @cached_property
    def places(self) -> Places:
        """Of all operations."""
        return places(self.cut)

    @cached_property
    def shared(self) -> frozenset[str]:
        """Parameters that several sections read."""
        return shared(self.cut, self.steps.in_one)

    def pieces(self, shares: Iterable[tuple[Share, bool]], execution: Execution) -> tuple[ChunkSegments, ...]:
        """One for each chunk of a stage; with the shares, whether their backward has two parts."""
        return tuple(self._piece(share, hold=_holds(execution), two=two) for share, two in shares)

    def leaves(self, pieces: Sequence[ChunkSegments]) -> Mapping[str, int]:
        """The parameters of a stage, with how many of each: one of those that several sections read."""
        found = Counter[str]()
        for leaf, times in chain.from_iterable(piece.leaves.items() for piece in pieces):
            found[leaf] = max(found[leaf], times) if leaf in self.shared else found[leaf] + times
        return found

    def stage(
        self, pieces: tuple[ChunkSegments, ...], execution: Execution, between_bytes: float, sum_s: float, posted: float
    ) -> Stage:
        """What its connections with other stages keep, what it takes to sum gradients with those, bytes of messages."""
        key = (pieces, execution.assumed.num_microbatches, between_bytes, sum_s, posted)
        if key not in self._stages:
            held, end = self._held(self.leaves(pieces), sum_s)
            state = defaultdict[str, float](float)
            for (category, _), num_bytes in held.items():
                state[category] += num_bytes
            pool = reduce(joined, (piece.pool for piece in pieces))
            state["buffers"] = self._buffers(
                execution.assumed.num_microbatches // self.steps.graph.mesh.num_microbatches
            )
            state["context"] = self.steps.cluster.device.context_bytes
            state["communication"] = self._axes_bytes + between_bytes
            state["temporary"] += posted
            if pool:
                state["gathered"] = sum(pool.values())
            self._stages[key] = Stage(pieces, dict(state), end, self.steps.cluster.device, held)
        return self._stages[key]

    def units(self, execution: Execution) -> tuple[Unit, ...]:
        """What every occurrence of a section adds to a stage, in order."""
        own = [self._unit(number, execution) for number in range(len(self.cut))]
        return tuple(own[number] for number in units(self.cut))

    def _unit(self, number: int, execution: Execution) -> Unit:
        """Of a section, which is measured once for all that differ in names alone."""
        share, two = ((number, self.cut[number].times),), "weights" in phases(execution.schedule.name)
        key = _but_for_names(self.steps, self._stretches(share)), _holds(execution), two
        if key not in self._units:
            self._units[key] = self._one_more(share, execution)
        return self._units[key]

    def _one_more(self, share: Share, execution: Execution) -> Unit:
        """Of a section that occurs many times, what one more adds to those before it."""
        ((number, times),) = share
        one = self._measured(((number, 1),), execution)
        if times == 1:
            return one
        adds = zip(self._measured(share, execution), one, strict=True)
        return Unit(*((all_of_them - alone) / (times - 1) for all_of_them, alone in adds))._replace(
            peak_bytes=one.peak_bytes
        )

    def _measured(self, share: Share, execution: Execution) -> Unit:
        """A share as the only one of a stage, in neither the first nor the last microbatch."""
        (piece,) = self.pieces([(share, "weights" in phases(execution.schedule.name))], execution)
        ways: tuple[Phase, ...] = ("forward", "backward", "weights")
        kinds = [Kind(way, first, False) for first in (False, True) for way in ways]
        found = list(piece_timelines(piece, kinds, SHARING[self.steps.cluster.device.kind], self._simulated))
        each, first = found[:3], found[3:]
        stays = sum(sum(timeline.net.values()) for timeline in first)  # gradients, until the update
        kept = sum(each[0].net.values())
        peak = max(each[0].peak_bytes - kept, *(timeline.peak_bytes for timeline in each[1:]))
        stored = sum(self._held(self.leaves([piece]), 0.0)[0].values())
        seconds = sum(timeline.ready_s for timeline in each)
        return Unit(seconds, stored + stays, kept, peak + sum(piece.pool.values()))

    def _piece(self, share: Share, *, hold: bool, two: bool) -> ChunkSegments:
        key = (share, hold, two)
        if key not in self._pieces:
            name = " + ".join(f"{n} × {self.cut[s].name}" for s, n in share)
            alike = name, tuple(self._stretches(share)), hold, two
            if (found := self._known.get(alike)) is None:
                found = self._known[alike] = _made(self.steps, *alike)
            self._pieces[key] = found
        return self._pieces[key]

    def _stretches(self, share: Share) -> Sequence[tuple[Stretch, int]]:
        """What a share runs."""
        if self.steps.execution.schedule.num_stages == 1:
            return [(self.cut[number].stretch, times) for number, times in share]
        return stretches(self.cut, share, self.steps.in_one, self.places)

    def _buffers(self, num_microbatches: int) -> float:
        """Of the model, the batch, and what is computed once, which equal blocks share."""
        return sum(num_bytes * (num_microbatches if of_batch else 1) for num_bytes, of_batch in self._buffer_bytes)

    @cached_property
    def _buffer_bytes(self) -> list[tuple[int, bool]]:
        """Of each of these, and whether each microbatch has its own."""
        graph, constants = self.steps.graph, kept_constants(self.steps.graph, self.steps.once)
        return [
            (graph.types[n.name].local_bytes(graph.mesh), n.op == "input")
            for n in graph.nodes if n.name in constants or (n.is_leaf and n.op != "parameter")
        ]  # fmt: skip

    def _held(self, leaves: Mapping[str, int], sum_s: float) -> tuple[dict[tuple[str, str], float], Segment]:
        """What parameters keep, by category and leaf, and the end of a step.

        That is the update; then gradients are freed and, under ZeRO-1, weights gathered.

        `sum_s`: before that, to sum gradients with other stages.
        """
        steps, execution, device = self.steps, self.steps.execution, self.steps.cluster.device
        held, updated, freed = dict[tuple[str, str], float](), 0.0, list[tuple[str, float]]()
        gathered = defaultdict[str, float](float)
        overhead_s = device.step_overhead_s + self._first_uses_s
        known = dict[tuple[Stored, int], tuple[Mapping[str, float], float]]()
        for leaf, times in leaves.items():
            parameter = steps.parameters[leaf]
            dtype, is_gathered = parameter.dtype, parameter.slices is not None
            stored = Stored(parameter.num_elements, dtype, parameter.grad, is_gathered, steps.dtype(dtype))
            shards = 1
            if execution.assumed.shard_optimizer and parameter.grad and not stored.gathered:
                for axis in parameter.sums:
                    shards *= steps.graph.mesh.sizes[steps.graph.mesh.index(axis)]
                    gathered[axis] += times * parameter.used_bytes
            if (own := known.get((stored, shards))) is None:
                own = state_bytes(stored, execution, shards), update_bytes(stored, execution, shards)
                known[stored, shards] = own
            kept, to_update = own
            for category, num_bytes in kept.items():
                held[category, leaf] = times * num_bytes
            if parameter.grad:
                overhead_s += times * device.update_overhead_s
                updated += times * to_update
                if is_bucketed(parameter):
                    held["gradients", leaf] = times * parameter.gradient_bytes
                else:
                    freed.append((leaf, times * parameter.gradient_bytes))
        end = Recorder(execution.assumed.overlap)
        if sum_s:
            end.launch("gradients of several stages", STAGES, sum_s, blocks=True)
        task = end.compute("optimizer", updated / device.memory_bytes_per_s + overhead_s)
        for axis, num_bytes in gathered.items():
            seconds = steps.collective_s("all_gather", axis, num_bytes)
            end.launch("gather updated weights", axis, seconds, blocks=True)
        for leaf, num_bytes in freed:
            end.take("gradients", num_bytes, None, (task,), name=leaf)
        return held, end.segment()


def _holds(execution: Execution) -> bool:
    """Whether backward begins with what forward has gathered last."""
    return execution.schedule.num_stages == 1 and (
        execution.assumed.num_microbatches == 1 or execution.schedule.name != "gpipe"
    )


def _but_for_names(steps: Steps, own: Sequence[tuple[Stretch, int]]) -> Hashable:
    """All that a piece is made of, with a number for each name, in the order in which they come."""
    numbers, found = dict[str, int](), list[Hashable]()

    def of(names: Iterable[str]) -> Hashable:
        return tuple([numbers.setdefault(name, len(numbers)) for name in names])

    for stretch, times in own:
        found.append((times, tuple(map(of, stretch.carried))))
        for o in stretch.operations:
            names = (o.name, o.alias, o.block), o.reads, o.weights, o.views, o.saved, o.keeps, o.gradients
            sizes = o.num_bytes, o.mask_bytes, *[steps.num_bytes.get(name) for name in o.reads]
            facts = o.sums_in_place, o.grad, o.apart, o.early, o.name in steps.loss_sums
            region = o.region and (of([o.region.name]), o.region.results)
            parameters = [
                (leaf in stretch.leaves, steps.graph.types[leaf], of([parameter.module]), parameter[_NAMES:])
                for leaf in (*o.weights, *o.views)
                for parameter in (steps.parameters[leaf],)
            ]
            found.append((tuple(map(of, names)), sizes, facts, region, tuple(parameters), steps.costs[o.name]))
    return tuple(found)


def _made(steps: Steps, name: str, own: Sequence[tuple[Stretch, int]], hold: bool, two: bool) -> ChunkSegments:
    execution = steps.execution
    chunk = Chunk(own, steps.parameters, execution, steps.num_bytes)
    todo = actions(chunk, hold=hold, late=execution.assumed.late_gathers, ahead=execution.assumed.overlap, two=two)
    segments = price_forward(steps, chunk, todo), *price_backward(steps, chunk, todo, two=two)
    return ChunkSegments(name, *segments, dict(chunk.leaves()), pool_bytes(steps, chunk, todo))


def _first_uses_s(steps: Steps) -> float:
    """What the first of each operator takes longer in a step, at most: a pipeline stage may have fewer of them.

    None is what is computed once, has no call of its own forward, or is compiled.
    """
    graph, known = steps.graph, steps.cluster.device.first_uses
    if steps.execution.assumed.compiled:
        return 0.0
    nodes = [n for n in graph.nodes if n.op in known and n.name not in steps.once]
    forward = {n.op for n in nodes if steps.written(n) != "fused"}
    backward = {n.op for n in nodes if graph.types[n.name].grad}
    return sum(known[op][0] for op in forward) + sum(known[op][1] for op in backward)
