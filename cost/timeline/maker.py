"""Makes the stages of one graph on equal devices, from the costs of its operators."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property, reduce
from itertools import chain

from shardwright.cost.collectives.buffers import axes_bytes
from shardwright.cost.timeline.chain import Unit
from shardwright.cost.timeline.clock import SHARING
from shardwright.cost.timeline.ending import price_end, what_is_stored
from shardwright.cost.timeline.pool import joined, pool_bytes
from shardwright.cost.timeline.pricing import price_backward, price_forward
from shardwright.cost.timeline.segments import ChunkSegments, SimulatedSegments, Stage
from shardwright.cost.timeline.steps import Steps
from shardwright.cost.timeline.timeline import Kind, piece_timelines
from shardwright.pcg.analysis import kept_constants
from shardwright.pcg.step.actions import actions
from shardwright.pcg.step.chunk import Chunk, Stretch
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.parameters import Parameter
from shardwright.pcg.step.schedules import Phase, phases
from shardwright.pcg.step.sections import Places, Share, places, sections, shared, stretches, units

KnownPieces = dict[tuple[str, tuple[tuple[Stretch, int], ...], bool, bool], ChunkSegments]
"""Pieces of chunks by everything that they depend on: the name, the operations, and the way they are run."""
_NAMES = 1 + Parameter._fields.index("module")
"""The number of a parameter's fields that are names: the first ones."""


class Maker:
    """Makes stages on equal devices; equal pieces are built once."""

    def __init__(
        self, steps: Steps, repeats: Mapping[str, int], known: KnownPieces, simulated: SimulatedSegments
    ) -> None:
        """Make stages of `steps`. `known`: pieces of the same operations under other recomputation."""
        self.steps, self._known, self._simulated = steps, known, simulated
        self.cut = sections(steps, repeats, by_block=steps.execution.schedule.num_stages > 1)
        self._pieces: dict[tuple[Share, bool, bool], ChunkSegments] = {}
        self._stages: dict[tuple[object, ...], Stage] = {}
        self._units: dict[Hashable, Unit] = {}
        self._axes_bytes = axes_bytes(steps.graph, steps.cluster, steps.fused.values())

    @cached_property
    def places(self) -> Places:
        """The places of all operations."""
        return places(self.cut)

    @cached_property
    def shared(self) -> frozenset[str]:
        """The parameters that several sections read."""
        return shared(self.cut, self.steps.in_one)

    def pieces(self, shares: Iterable[tuple[Share, bool]], execution: Execution) -> tuple[ChunkSegments, ...]:
        """Return a piece for each chunk of a stage, from its share and whether its backward has two parts."""
        return tuple(self._piece(share, hold=_holds(execution), two=two) for share, two in shares)

    def leaves(self, pieces: Sequence[ChunkSegments]) -> Mapping[str, int]:
        """Return the parameters of a stage with their counts; a parameter that several sections read counts once."""
        counts = Counter[str]()
        for leaf, times in chain.from_iterable(piece.leaves.items() for piece in pieces):
            counts[leaf] = max(counts[leaf], times) if leaf in self.shared else counts[leaf] + times
        return counts

    def stage(
        self, pieces: tuple[ChunkSegments, ...], execution: Execution, between_bytes: float, sum_s: float, posted: float
    ) -> Stage:
        """Return a stage of these pieces.

        `between_bytes`: memory of its connections with other stages; `sum_s`: to sum gradients with them; `posted`:
        bytes of messages.
        """
        key = (pieces, execution.assumed.num_microbatches, between_bytes, sum_s, posted)
        if key not in self._stages:
            leaves = self.leaves(pieces)
            stored = what_is_stored(self.steps, leaves)
            held = stored.held
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
            self._stages[key] = Stage(
                pieces, dict(state), price_end(self.steps, stored, leaves, sum_s), self.steps.cluster.device, held
            )
        return self._stages[key]

    def units(self, execution: Execution) -> tuple[Unit, ...]:
        """Return the cost that every occurrence of a section adds to a stage, in order."""
        by_section = [self._unit(number, execution) for number in range(len(self.cut))]
        return tuple(by_section[number] for number in units(self.cut))

    def _unit(self, number: int, execution: Execution) -> Unit:
        """Return the unit of a section; sections that differ in names only are measured once."""
        share, two = ((number, self.cut[number].times),), "weights" in phases(execution.schedule.name)
        key = _but_for_names(self.steps, self._stretches(share)), _holds(execution), two
        if key not in self._units:
            self._units[key] = self._one_more(share, execution)
        return self._units[key]

    def _one_more(self, share: Share, execution: Execution) -> Unit:
        """Return the unit of a section; if it occurs many times, the difference that one more occurrence makes."""
        ((number, times),) = share
        one = self._measured(((number, 1),), execution)
        if times == 1:
            return one
        adds = zip(self._measured(share, execution), one, strict=True)
        return Unit(*((all_of_them - alone) / (times - 1) for all_of_them, alone in adds))._replace(
            peak_bytes=one.peak_bytes
        )

    def _measured(self, share: Share, execution: Execution) -> Unit:
        """Return a share measured as the only one of a stage, in a microbatch that is neither first nor last."""
        (piece,) = self.pieces([(share, "weights" in phases(execution.schedule.name))], execution)
        ways: tuple[Phase, ...] = ("forward", "backward", "weights")
        kinds = [Kind(way, first, False) for first in (False, True) for way in ways]
        timelines = list(piece_timelines(piece, kinds, SHARING[self.steps.cluster.device.kind], self._simulated))
        each, first = timelines[:3], timelines[3:]
        stays = sum(sum(timeline.net.values()) for timeline in first)  # gradients, until the update
        kept_bytes = sum(each[0].net.values())
        peak = max(each[0].peak_bytes - kept_bytes, *(timeline.peak_bytes for timeline in each[1:]))
        stored = sum(what_is_stored(self.steps, self.leaves([piece])).held.values())
        seconds = sum(timeline.ready_s for timeline in each)
        return Unit(seconds, stored + stays, kept_bytes, peak + sum(piece.pool.values()))

    def _piece(self, share: Share, *, hold: bool, two: bool) -> ChunkSegments:
        key = (share, hold, two)
        if key not in self._pieces:
            name = " + ".join(f"{n} × {self.cut[s].name}" for s, n in share)
            alike = name, tuple(self._stretches(share)), hold, two
            if (piece := self._known.get(alike)) is None:
                piece = self._known[alike] = _made(self.steps, *alike)
            self._pieces[key] = piece
        return self._pieces[key]

    def _stretches(self, share: Share) -> Sequence[tuple[Stretch, int]]:
        """Return the stretches that a share runs, with the number of times."""
        if self.steps.execution.schedule.num_stages == 1:
            return [(self.cut[number].stretch, times) for number, times in share]
        return stretches(self.cut, share, self.steps.in_one, self.places, self.steps.drawn)

    def _buffers(self, num_microbatches: int) -> float:
        """Return the bytes of the model's buffers, the batch, and values computed once, which equal blocks share."""
        return sum(num_bytes * (num_microbatches if of_batch else 1) for num_bytes, of_batch in self._buffer_bytes)

    @cached_property
    def _buffer_bytes(self) -> list[tuple[int, bool]]:
        """The bytes of each buffer, and whether each microbatch has its own."""
        graph, constants = self.steps.graph, kept_constants(self.steps.graph, self.steps.once)
        return [
            (graph.types[n.name].local_bytes(graph.mesh), n.op == "input")
            for n in graph.nodes if n.name in constants or (n.is_leaf and n.op != "parameter")
        ]  # fmt: skip


def _holds(execution: Execution) -> bool:
    """Return whether backward begins with the blocks that forward gathered last."""
    return execution.schedule.num_stages == 1 and (
        execution.assumed.num_microbatches == 1 or execution.schedule.name != "gpipe"
    )


def _but_for_names(steps: Steps, stretches: Sequence[tuple[Stretch, int]]) -> Hashable:
    """Return everything that a piece depends on, with names replaced by numbers in order of appearance."""
    numbers, facts_in_order = dict[str, int](), list[Hashable]()

    def of(names: Iterable[str]) -> Hashable:
        return tuple([numbers.setdefault(name, len(numbers)) for name in names])

    for stretch, times in stretches:
        facts_in_order.append((times, tuple(map(of, stretch.carried))))
        for o in stretch.operations:
            names = (o.name, o.alias, o.block), o.reads, o.weights, o.views, o.saved, o.keeps, o.gradients
            sizes = o.num_bytes, o.mask_bytes, *[steps.num_bytes.get(name) for name in o.reads]
            facts = o.sums_in_place, o.grad, o.split_backward, o.verb
            region = o.region and (of([o.region.name]), o.region.results)
            parameters = [
                (leaf in stretch.leaves, steps.graph.types[leaf], of([parameter.module]), parameter[_NAMES:])
                for leaf in (*o.weights, *o.views)
                for parameter in (steps.parameters[leaf],)
            ]
            facts_in_order.append((tuple(map(of, names)), sizes, facts, region, tuple(parameters), steps.costs[o.name]))
    return tuple(facts_in_order)


def _made(steps: Steps, name: str, stretches: Sequence[tuple[Stretch, int]], hold: bool, two: bool) -> ChunkSegments:
    execution = steps.execution
    chunk = Chunk(stretches, steps.parameters, execution, steps.num_bytes)
    todo = actions(chunk, hold=hold, late=execution.assumed.late_gathers, ahead=execution.assumed.overlap, two=two)
    segments = price_forward(steps, chunk, todo), *price_backward(steps, chunk, todo, two=two)
    return ChunkSegments(name, *segments, dict(chunk.leaves()), pool_bytes(steps, chunk, todo))
