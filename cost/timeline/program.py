"""A typed parallel graph as a program: what each pipeline stage does, and what passes between stages.

A program is a list of distinct chunks (segments of one microbatch forward and backward), and stages that refer to them.
Stages that are equal share their chunks, so neither building nor simulating a program grows with depth or with the
number of stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import chain, pairwise

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.device import Device
from shardwright.cost.collectives.buffers import axes_bytes, stages_bytes
from shardwright.cost.collectives.groups import between
from shardwright.cost.collectives.resharding import StageLayout, resharding_s
from shardwright.cost.timeline.balance import balanced
from shardwright.cost.timeline.memory import Stored, state_bytes, update_bytes
from shardwright.cost.timeline.pool import BufferKind, joined, pool_bytes
from shardwright.cost.timeline.pricing import is_bucketed, price_backward, price_forward
from shardwright.cost.timeline.steps import Steps
from shardwright.cost.timeline.streams import SegmentTimeline
from shardwright.cost.timeline.tasks import Recorder, Segment
from shardwright.pcg.analysis import kept_constants, written
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts, local_shape
from shardwright.pcg.stages import STAGES
from shardwright.pcg.step.actions import actions
from shardwright.pcg.step.chunk import Chunk
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.messages import Message
from shardwright.pcg.step.schedules import phases
from shardwright.pcg.step.sections import (
    Section,
    Share,
    computed_in_one,
    crossing,
    everything,
    sections,
    shared,
    spread,
    stretches,
    units,
)
from shardwright.pcg.types import TensorType


@dataclass(frozen=True, slots=True, eq=False)
class ChunkSegments:
    """A chunk's segments for one microbatch.

    name      what is in it
    weights   the second part of backward, where it has two
    leaves    the parameters that it reads, with how many of each
    pool      bytes of the buffer sets that it needs
    """

    name: str
    forward: Segment
    backward: Segment
    weights: Segment
    leaves: Mapping[str, int] = field(default_factory=dict)
    pool: Mapping[BufferKind, float] = field(default_factory=dict)

    def without(self, categories: Collection[str]) -> ChunkSegments:
        """The same without the memory of some categories."""
        segments = (segment.without(categories) for segment in (self.forward, self.backward, self.weights))
        forward, backward, weights = segments
        return replace(self, forward=forward, backward=backward, weights=weights)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One pipeline stage.

    pieces   of its chunks, in order
    state    bytes by category that are there all the time
    held     what of that is there for parameters, by category and leaf
    end      after the last backward: the optimizer's update
    """

    pieces: tuple[ChunkSegments, ...]
    state: Mapping[str, float]
    end: Segment
    device: Device
    held: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def without(self, categories: Collection[str]) -> Stage:
        """The same without the memory of some categories."""
        state = {name: num_bytes for name, num_bytes in self.state.items() if name not in categories}
        held = {key: num_bytes for key, num_bytes in self.held.items() if key[0] not in categories}
        pieces = tuple(piece.without(categories) for piece in self.pieces)
        return replace(self, pieces=pieces, state=state, end=self.end.without(categories), held=held)


@dataclass(frozen=True)
class StepProgram:
    """What runs, on each device of every stage.

    execution   with all microbatches, and the split of several stages
    hops_s      seconds to send a microbatch from each virtual stage to the next one, one way; the slower of the two
    hops_bytes  what a device sends of it on that way
    simulated   timelines of segments that are known already, shared by programs of the same pieces
    """

    execution: Execution
    stages: tuple[Stage, ...]
    hops_s: tuple[float, ...] = ()
    hops_bytes: tuple[float, ...] = ()
    simulated: dict[tuple[object, ...], SegmentTimeline] = field(default_factory=dict, compare=False, repr=False)

    def messages(self, stage: int = 0) -> Counter[Message]:
        """What a device of a stage sends to those of the same stage in a step, each with how often."""
        many, found = self.execution.num_microbatches, Counter[Message]()
        for piece in self.stages[stage].pieces:
            for segment in (piece.forward, piece.backward, piece.weights):
                for number in range(many):
                    found += segment.in_microbatch(first=number == 0, last=number == many - 1).messages()
        return found

    def without(self, categories: Collection[str]) -> StepProgram:
        """The same without the memory of some categories."""
        return replace(self, stages=tuple(stage.without(categories) for stage in self.stages), simulated={})

    @cached_property
    def serial_s(self) -> float:
        """What the busiest stage takes if nothing overlaps and it never waits for another stage."""
        many = self.execution.num_microbatches

        def stage_s(stage: Stage) -> float:
            total = stage.end.serial_s()
            for piece in stage.pieces:
                for segment in (piece.forward, piece.backward, piece.weights):
                    first, each = (segment.in_microbatch(first=first, last=many == 1) for first in (True, False))
                    last = segment.in_microbatch(first=False, last=True)
                    total += first.serial_s() + max(0, many - 2) * each.serial_s() + (many > 1) * last.serial_s()
            return total

        return max(map(stage_s, self.stages))


def program(
    graph: Graph,
    cluster: Cluster,
    execution: Execution = DEFAULT,
    repeats: Mapping[str, int] | None = None,
) -> StepProgram:
    """The program of a validated parallel graph. Its mesh is that of one stage.

    Its batch is one microbatch of the execution's, which may be cut further along the mesh's axis of time.

    Args:
        graph: typed; validated.
        cluster: with devices for all stages; the first stage has the first of them.
        execution: how it is run; without a `split`, the slowest stage is as fast as possible.
        repeats: module path of a block ("model.layers.0") -> how often the block really occurs.

    Raises:
        PlanError: more devices than the cluster has, `repeats` or a split that do not fit the graph, or offload from a
        CPU.
    """
    return Programs(graph, cluster, repeats).program(execution)


class Programs:
    """Programs of one graph, run in many ways: what they have in common is built and simulated once."""

    def __init__(self, graph: Graph, cluster: Cluster, repeats: Mapping[str, int] | None = None) -> None:
        self.graph, self.cluster, self.repeats = graph, cluster, repeats or {}
        self._steps: dict[Execution, Steps] = {}
        self._makers: dict[Execution, list[_Maker]] = {}
        self._simulated: dict[tuple[object, ...], SegmentTimeline] = {}

    def program(self, execution: Execution = DEFAULT) -> StepProgram:
        """As the function of this name."""
        graph, cluster = self.graph, self.cluster
        many = execution.num_microbatches * graph.mesh.num_microbatches
        if execution.schedule == "interleaved" and many % execution.num_stages:
            problem = f"expected a multiple of the {execution.num_stages} stages, got {many}"
            raise PlanError(f"microbatches: {problem}; interleaving needs it")
        execution = replace(execution, num_microbatches=many)
        per_stage, stages = graph.mesh.num_devices, execution.num_stages
        if per_stage * stages > cluster.num_devices:
            what = f"{stages} stages of mesh {graph.mesh} need" if stages > 1 else f"mesh {graph.mesh} needs"
            problem = f"{what} {per_stage * stages} devices, cluster {cluster.name!r} has {cluster.num_devices}"
            raise PlanError(f"{problem}; choose {'fewer stages or ' if stages > 1 else ''}a larger cluster")
        if execution.offload and cluster.device.kind == "cpu":
            raise PlanError("offload: a CPU's memory is the host's; run without offload")
        makers = self._stage_makers(execution)
        cut, num_chunks = makers[0].cut, execution.num_virtual_stages
        shares = [everything(cut)]
        if num_chunks > 1:
            execution = replace(execution, split=execution.split or tuple(makers[0].balanced(num_chunks)))
            shares = spread(cut, execution.split)
        connections = stages_bytes(cluster, stages, per_stage)
        own = [[shares[c * stages + stage] for c in range(execution.chunks_per_stage)] for stage in range(stages)]
        makers = [makers[stage % len(makers)] for stage in range(stages)]
        pieces = [maker.pieces(each, execution) for maker, each in zip(makers, own, strict=True)]
        sums_s = [0.0] * stages
        if stages > 1:
            held = [makers[0].shared & {leaf for piece in each for leaf in piece.leaves} for each in pieces]
            sums_s = _sums_s(held, makers[0].steps, cluster)
        hops_s, sent = _hops(shares, cut, makers[0].steps, cluster, stages)
        found = tuple(
            maker.stage(each, execution, connections, sum_s, posted)
            for maker, each, sum_s, posted in zip(makers, pieces, sums_s, _posted(sent, stages), strict=True)
        )
        return StepProgram(execution, found, hops_s, sent, self._simulated)

    def steps(self, execution: Execution) -> Steps:
        """The graph's operations, with what they cost on the whole cluster's devices."""
        alike = self._alike(execution)
        if alike not in self._steps:
            self._steps[alike] = Steps(self.graph, self.cluster, alike)
        return self._steps[alike]

    def _stage_makers(self, execution: Execution) -> list[_Maker]:
        """One for all stages, or, where their devices differ, one for each."""
        alike = self._alike(execution)
        if alike not in self._makers:
            if self.cluster.parts:
                self._makers[alike] = _own_makers(self.graph, self.cluster, alike, self.repeats)
            else:
                self._makers[alike] = [_Maker(self.steps(alike), self.repeats)]
        return self._makers[alike]

    def _alike(self, execution: Execution) -> Execution:
        """The execution without what operations and pieces of stages do not depend on."""
        stages = execution.num_stages
        return replace(
            execution, num_microbatches=1, chunks_per_stage=1, schedule="1f1b", split=(),
            num_stages=stages if self.cluster.parts else min(stages, 2),
        )  # fmt: skip


def _own_makers(graph: Graph, cluster: Cluster, execution: Execution, repeats: Mapping[str, int]) -> list[_Maker]:
    """One for each stage, as their devices differ; equal devices share theirs."""
    size, known = graph.mesh.num_devices, list[tuple[Cluster, _Maker]]()
    makers: list[_Maker] = []
    for stage in range(execution.num_stages):
        own = cluster.part(range(stage * size, (stage + 1) * size))
        maker = next((m for c, m in known if replace(c, name=own.name) == own), None)
        if maker is None:
            known.append((own, maker := _Maker(Steps(graph, own, execution), repeats)))
        makers.append(maker)
    return makers


def _hops(
    shares: Sequence[Share], cut: Sequence[Section], steps: Steps, cluster: Cluster, num_stages: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds and bytes between neighbours in `shares`. Equal hops are costed once."""
    known, hops, sent = dict[tuple[object, ...], float](), list[float](), list[float]()
    num_ranks = steps.graph.mesh.num_devices
    for number, (share, after) in enumerate(pairwise(shares)):
        last = share[-1][0]
        names = tuple(sorted(crossing(cut, last, inside=after[0][0] == last)))
        pair = number % num_stages, (number + 1) % num_stages
        ends = min(pair) * num_ranks, (max(pair) + 1) * num_ranks - 1
        key = names, pair if cluster.parts or pair[0] == pair[1] else between(*ends, cluster.levels)
        if key not in known:
            known[key] = _hop_s(names, pair, steps, cluster) if pair[0] != pair[1] else 0.0
        hops.append(known[key])
        sent.append(sum(steps.num_bytes[name] for name in names) if pair[0] != pair[1] else 0.0)
    return tuple(hops), tuple(sent)


def _posted(sent: Sequence[float], num_stages: int) -> list[float]:
    """Bytes of messages that each stage holds beside its values: the next one that comes, and a gradient that goes."""
    found = [[0.0] * num_stages for _ in range(3)]
    for number, num_bytes in enumerate(sent):
        here, there = number % num_stages, (number + 1) % num_stages
        for kind, stage in enumerate((there, here, there)):
            found[kind][stage] = max(found[kind][stage], num_bytes)
    return [sum(kinds) for kinds in zip(*found, strict=True)]


def _hop_s(names: Iterable[str], pair: tuple[int, int], steps: Steps, cluster: Cluster) -> float:
    """Values go on in their own layouts, one after the other, their gradients come back in theirs: the slower way."""

    def way_s(*ends: int, back: bool) -> float:
        total = 0.0
        for name in names:
            kind = steps.graph.types[name]
            if kind.grad or not back:
                layouts = tuple(layout.dual if back else layout for layout in kind.layouts)
                total += _between_s(steps, cluster, kind, layouts, steps.num_bytes[name], ends)
        return total

    return max(way_s(*pair, back=False), way_s(*reversed(pair), back=True))


def _between_s(
    steps: Steps, cluster: Cluster, kind: TensorType, layouts: Layouts, num_bytes: float, ends: tuple[int, ...]
) -> float:
    """From one stage to another, in the same layouts on both: that of one microbatch. `num_bytes`: on each device."""
    mesh = steps.graph.mesh
    time = len(mesh) - len(mesh.devices)
    shape, layouts = local_shape(kind.shape, layouts[:time], mesh.sizes[:time]), layouts[time:]
    here, there = (StageLayout(mesh.devices.sizes, layouts, stage * mesh.num_devices) for stage in ends)
    return resharding_s(cluster, shape, num_bytes * here.num_parts, here, there)[0]


def _sums_s(shared: Sequence[Collection[str]], steps: Steps, cluster: Cluster) -> list[float]:
    """By stage, to sum the gradients of parameters that others hold too: in a ring, over the links of the outermost."""
    found = [0.0] * len(shared)
    for leaf, count in Counter(chain.from_iterable(shared)).items():
        parameter, own = steps.parameters[leaf], [stage for stage, held in enumerate(shared) if leaf in held]
        if count > 1 and parameter.grad:
            kind = steps.graph.types[leaf]
            one_s = _between_s(steps, cluster, kind, kind.layouts, parameter.reduced_bytes, (own[0], own[-1]))
            for stage in own:
                found[stage] += 2 * (count - 1) / count * one_s
    return found


def _first_uses_s(steps: Steps) -> float:
    """What the first of each operator takes longer in a step, at most: a pipeline stage may have fewer of them.

    None is what is computed once, has no call of its own forward, or is compiled.
    """
    graph, known = steps.graph, steps.cluster.device.first_uses
    if steps.execution.compiled:
        return 0.0
    nodes = [n for n in graph.nodes if n.op in known and n.name not in steps.once]
    forward = {n.op for n in nodes if written(graph, n) != "fused"}
    backward = {n.op for n in nodes if graph.types[n.name].grad}
    return sum(known[op][0] for op in forward) + sum(known[op][1] for op in backward)


class _Maker:
    """Makes stages on equal devices; equal pieces are built once."""

    def __init__(self, steps: Steps, repeats: Mapping[str, int]) -> None:
        self.steps = steps
        self._constants = kept_constants(steps.graph, steps.once)
        self.cut = sections(steps, repeats, by_block=steps.execution.num_stages > 1)
        self._pieces: dict[tuple[Share, bool, bool], ChunkSegments] = {}
        self._stages: dict[tuple[object, ...], Stage] = {}
        self._axes_bytes = axes_bytes(steps.graph, steps.cluster)
        self._first_uses_s = _first_uses_s(steps)

    @cached_property
    def one(self) -> frozenset[str]:
        """What is computed in one stage."""
        return computed_in_one(self.steps.graph)

    @cached_property
    def shared(self) -> frozenset[str]:
        """Parameters that several sections read."""
        return shared(self.cut, self.one)

    def pieces(self, shares: Sequence[Share], execution: Execution) -> tuple[ChunkSegments, ...]:
        """One for each chunk of a stage."""
        two = "weights" in phases(execution.schedule)
        hold = execution.num_stages == 1 and (execution.num_microbatches == 1 or execution.schedule != "gpipe")
        return tuple(self._piece(share, hold=hold, two=two) for share in shares)

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
        key = (pieces, execution.num_microbatches, between_bytes, sum_s, posted)
        if key not in self._stages:
            held, end = self._held(self.leaves(pieces), sum_s)
            state = defaultdict[str, float](float)
            for (category, _), num_bytes in held.items():
                state[category] += num_bytes
            pool = reduce(joined, (piece.pool for piece in pieces))
            state["buffers"] = self._buffers(execution.num_microbatches // self.steps.graph.mesh.num_microbatches)
            state["context"] = self.steps.cluster.device.context_bytes
            state["communication"] = self._axes_bytes + between_bytes
            state["temporary"] += posted
            if pool:
                state["gathered"] = sum(pool.values())
            self._stages[key] = Stage(pieces, dict(state), end, self.steps.cluster.device, held)
        return self._stages[key]

    def balanced(self, num_chunks: int) -> list[int]:
        """How many sections each virtual stage has, such that the slowest is as fast as possible."""
        costs = self.steps.costs
        seconds = [sum(costs[o.name].total_s for o in section.stretch.operations) for section in self.cut]
        return balanced([seconds[number] for number in units(self.cut)], num_chunks)

    def _piece(self, share: Share, *, hold: bool, two: bool) -> ChunkSegments:
        key = (share, hold, two)
        if key not in self._pieces:
            steps, execution = self.steps, self.steps.execution
            own = [(self.cut[number].stretch, times) for number, times in share]
            if execution.num_stages > 1:
                own = stretches(self.cut, share, self.one)
            chunk = Chunk(own, steps.parameters, execution, steps.num_bytes)
            todo = actions(chunk, hold=hold, late=execution.late_gathers, ahead=execution.overlap, two=two)
            name = " + ".join(f"{n} × {self.cut[s].name}" for s, n in share)
            segments = price_forward(steps, chunk, todo), *price_backward(steps, chunk, todo, two=two)
            self._pieces[key] = ChunkSegments(name, *segments, dict(chunk.leaves()), pool_bytes(steps, chunk, todo))
        return self._pieces[key]

    def _buffers(self, num_microbatches: int) -> float:
        """Of the model, the batch, and what is computed once, which equal blocks share."""
        graph = self.steps.graph
        return sum(
            graph.types[n.name].local_bytes(graph.mesh) * (num_microbatches if n.op == "input" else 1)
            for n in graph.nodes if n.name in self._constants or (n.is_leaf and n.op != "parameter")
        )  # fmt: skip

    def _held(self, leaves: Mapping[str, int], sum_s: float) -> tuple[dict[tuple[str, str], float], Segment]:
        """What parameters keep, by category and leaf, and the end of a step.

        That is the update; then gradients are freed and, under ZeRO-1, weights gathered.

        `sum_s`: before that, to sum gradients with other stages.
        """
        steps, execution, device = self.steps, self.steps.execution, self.steps.cluster.device
        held, updated, freed = dict[tuple[str, str], float](), 0.0, list[tuple[str, float]]()
        gathered = defaultdict[str, float](float)
        overhead_s = device.step_overhead_s + self._first_uses_s
        for leaf, times in leaves.items():
            parameter = steps.parameters[leaf]
            dtype, is_gathered = parameter.dtype, parameter.slices is not None
            stored = Stored(parameter.num_elements, dtype, parameter.grad, is_gathered, steps.dtype(dtype))
            shards = 1
            if execution.shard_optimizer and parameter.grad and not stored.gathered:
                for axis in parameter.sums:
                    shards *= steps.graph.mesh.sizes[steps.graph.mesh.index(axis)]
                    gathered[axis] += times * parameter.used_bytes
            for category, num_bytes in state_bytes(stored, execution, shards).items():
                held[category, leaf] = times * num_bytes
            if parameter.grad:
                overhead_s += times * device.update_overhead_s
                updated += times * update_bytes(stored, execution, shards)
                if is_bucketed(parameter):
                    held["gradients", leaf] = times * parameter.gradient_bytes
                else:
                    freed.append((leaf, times * parameter.gradient_bytes))
        end = Recorder(execution.overlap)
        if sum_s:
            end.launch("gradients of several stages", STAGES, sum_s, blocks=True)
        task = end.compute("optimizer", updated / device.memory_bytes_per_s + overhead_s)
        for axis, num_bytes in gathered.items():
            seconds = steps.collective_s("all_gather", axis, num_bytes)
            end.launch("gather updated weights", axis, seconds, blocks=True)
        for leaf, num_bytes in freed:
            end.take("gradients", num_bytes, None, (task,), name=leaf)
        return held, end.segment()
