"""A typed parallel graph as a program: the work of each pipeline stage, and the messages between stages.

A program is a list of distinct chunks (segments of one microbatch forward and backward), and stages that refer to them.
Equal stages share their chunks, so neither building nor simulating a program grows with depth or with the number of
stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from math import inf

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.buffers import stages_bytes
from shardwright.cost.collectives.groups import between
from shardwright.cost.collectives.resharding import StageMesh, resharding_s
from shardwright.cost.collectives.together import group_of_stages
from shardwright.cost.timeline.chain import Place, chained
from shardwright.cost.timeline.maker import KnownPieces, Maker
from shardwright.cost.timeline.segments import SimulatedSegments, StepProgram
from shardwright.cost.timeline.steps import KnownCosts, Steps
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.pieces import Tensor
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.meshes import first_ranks, in_words, stage_meshes
from shardwright.pcg.step.optimizers import OPTIMIZERS
from shardwright.pcg.step.pipelining import Schedule
from shardwright.pcg.step.recompute import OFFLOAD, Recompute
from shardwright.pcg.step.schedules import ends, in_two, most_in_flight, phases
from shardwright.pcg.step.sections import (
    Section,
    Share,
    crossing,
    everything,
    spread,
)
from shardwright.pcg.types import TensorType

_Way = tuple[Execution, Cluster, Mesh]
"""An execution of a stage's operations, with its cluster and mesh."""


def program(
    graph: Graph,
    cluster: Cluster,
    execution: Execution = DEFAULT,
    repeats: Mapping[str, int] | None = None,
    place: Sequence[int] | None = None,
) -> StepProgram:
    """Return the program of a validated parallel graph, whose mesh is that of one stage, the largest.

    The graph's batch is one microbatch of the execution's, which may be cut further along the mesh's axis of time.

    Args:
        graph: typed; validated.
        cluster: with devices for all stages; the first stage has the first of them.
        execution: the way to run it; without a `split`, `Programs.spread` chooses one.
        repeats: module path of a block ("model.layers.0") -> how often the block really occurs.
        place: of the device of a stage whose messages the tasks list; None: each lists those of its busiest device.

    Raises:
        PlanError: more devices than the cluster has, `repeats` or a split that do not fit the graph, or offload from a
        CPU.
    """
    return Programs(graph, cluster, repeats, place=place).program(execution)


def may_offload(cluster: Cluster, execution: Execution) -> bool:
    """Return whether a plan that is run in this way may have values wait on the host."""
    return bool(cluster.device.host_bytes_per_s) and "weights" not in phases(execution.schedule.name)


def check_offload(cluster: Cluster, execution: Execution) -> None:
    """Raise a `PlanError` if anything is to wait on a host to which the cluster's devices have no link."""
    optimizer = execution.assumed.optimizer
    on_host = {"offload": execution.asks(OFFLOAD), f"optimizer {optimizer!r}": OPTIMIZERS[optimizer].on_host}
    for what, is_asked in on_host.items():
        if is_asked and not (device := cluster.device).host_bytes_per_s:
            problem = f"device {device.name!r} has no host_bytes_per_s, the rate of a link to a host's memory"
            instead = "leave offload out" if what == "offload" else f"take {optimizer.removesuffix('@host')!r}"
            raise PlanError(f"{what}: {problem} (a CPU's memory is the host's); give it, or {instead}")


class Programs:
    """Programs of one graph, run in many ways; their common parts are built and simulated once."""

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        repeats: Mapping[str, int] | None = None,
        costs: KnownCosts | None = None,
        place: Sequence[int] | None = None,
    ) -> None:
        """Prepare a graph's programs. `costs`: known from other graphs; `place`: as in `program`."""
        self.graph, self.cluster, self.repeats, self._place = graph, cluster, repeats or {}, place
        self._costs: KnownCosts = {} if costs is None else costs
        self._graphs: dict[Mesh, Graph] = {graph.mesh: graph}
        self._steps: dict[_Way, Steps] = {}
        self._first: dict[_Way, Steps] = {}
        self._makers: dict[_Way, Maker] = {}
        self._pieces: dict[_Way, KnownPieces] = {}
        self._simulated: SimulatedSegments = {}

    def program(self, execution: Execution = DEFAULT) -> StepProgram:
        """Return the program of the graph, as the function of this name does."""
        graph, cluster = self.graph, self.cluster
        many = execution.assumed.num_microbatches * graph.mesh.num_microbatches
        execution = execution.assuming(num_microbatches=many)
        meshes, stages = stage_meshes(graph.mesh, execution), execution.schedule.num_stages
        if (needed := first_ranks(meshes)[-1]) > cluster.num_devices:
            what = f"{in_words(meshes)} need" if stages > 1 else f"mesh {graph.mesh} needs"
            problem = f"{what} {needed} devices, cluster {cluster.name!r} has {cluster.num_devices}"
            raise PlanError(f"{problem}; choose {'fewer stages or ' if stages > 1 else ''}a larger cluster")
        check_offload(cluster, execution)
        makers = self._makers_of(execution)
        cut, num_chunks = makers[0].cut, execution.schedule.num_virtual_stages
        shares = [everything(cut)]
        if num_chunks > 1:
            execution = execution if execution.schedule.split else self.spread(execution)
            shares = spread(cut, execution.schedule.split)
        connections = stages_bytes(cluster, stages, min(mesh.num_devices for mesh in meshes))
        crossed = [_crossing(cut, *pair) for pair in pairwise(shares)]
        received = ([graph.types[name] for name in names] for names in ((), *crossed))
        ways = [(share, in_two(execution.schedule.name, kinds)) for share, kinds in zip(shares, received, strict=True)]
        pieces = [maker.pieces(ways[stage::stages], execution) for stage, maker in enumerate(makers)]
        sums_s = [0.0] * stages
        if stages > 1:
            held = [makers[0].shared & {leaf for piece in each for leaf in piece.leaves} for each in pieces]
            sums_s = _sums_s(held, [maker.steps for maker in makers], cluster)
        hops_s, sent, arrived = _hops(crossed, [maker.steps for maker in makers], cluster)
        stage_programs = tuple(
            maker.stage(each, execution, connections, sum_s, posted)
            for maker, each, sum_s, posted in zip(makers, pieces, sums_s, _posted(sent, arrived, stages), strict=True)
        )
        return StepProgram(execution, stage_programs, hops_s, sent, self._simulated)

    def steps(self, execution: Execution) -> Steps:
        """Return the graph's operations, with their costs on the whole cluster's devices."""
        return self._steps_of((self._alike(execution), self.cluster, self.graph.mesh))

    def _steps_of(self, way: _Way) -> Steps:
        """Return the operations of a way; ways that differ in recomputation and pieces only share what they can."""
        if way not in self._steps:
            alike, part, mesh = way
            shared = _of_operations(way)
            if (first := self._first.get(shared)) is not None:
                self._steps[way] = first.run_as(alike)
            else:
                graph = self._graphs.setdefault(mesh, replace(self.graph, mesh=mesh))
                self._steps[way] = self._first[shared] = Steps(graph, part, alike, self._costs, self._place)
        return self._steps[way]

    def spread(
        self, execution: Execution, free_bytes: Sequence[float] = (), modes: Sequence[Recompute] = ()
    ) -> Execution:
        """Return the execution with the fastest split, and with the fastest of `modes` for each stage.

        Fastest is meant by the sections' times alone (`chain`); the timeline then judges the result.

        Args:
            execution: with several stages.
            free_bytes: of each stage, for its sections; (): no limit. Stages of several chunks are spread by time only.
            modes: of recomputation that stages may be run in; (): the execution's.

        Raises:
            PlanError: fewer sections than virtual stages, or no split fits.
        """
        many = execution.assumed.num_microbatches * self.graph.mesh.num_microbatches
        places = self._places(execution.assuming(num_microbatches=many), free_bytes, modes)
        chain = chained(places, many)
        if chain is None:
            raise PlanError(f"{execution.schedule.num_stages} stages: no spread of the model's sections over them fits")
        spread = execution.scheduled(split=chain.sizes)
        if not modes:
            return spread
        by_stage = tuple(modes[way] for way in chain.ways)
        if len(set(by_stage)) == 1:
            return replace(spread.scheduled(recompute_by_stage=()), recompute=by_stage[0])
        return spread.scheduled(recompute_by_stage=by_stage)

    def sections_bytes(self, execution: Execution) -> list[float]:
        """Return the bytes that `spread` assumes for the sections of each stage, with one chunk a stage."""
        many = execution.assumed.num_microbatches * self.graph.mesh.num_microbatches
        places = self._places(execution.assuming(num_microbatches=many), (), ())
        split = execution.schedule.split
        ends_of_places = zip(places, accumulate(split), split, strict=True)
        return [place.num_bytes(0, end - size, end) for place, end, size in ends_of_places]

    def _places(self, execution: Execution, free_bytes: Sequence[float], modes: Sequence[Recompute]) -> list[Place]:
        """Return the virtual stages, each with its sections in all modes."""
        schedule = execution.schedule
        chunks, stages = schedule.chunks_per_stage, schedule.num_stages
        ways = [replace(execution.scheduled(recompute_by_stage=()), recompute=mode) for mode in modes] or [execution]
        makers = list(zip(*map(self._makers_of, ways), strict=True))
        known = {row: tuple(maker.units(execution) for maker in row) for row in dict.fromkeys(makers)}
        if chunks > 1:
            return [Place(known[row]) for row in makers] * chunks
        many = execution.assumed.num_microbatches
        return [
            Place(known[row], most_in_flight(schedule, many, stage), free_bytes[stage] if free_bytes else inf)
            for stage, row in zip(range(stages), makers, strict=True)
        ]

    def _makers_of(self, execution: Execution) -> list[Maker]:
        """Return the makers of all stages. Stages that are run alike on equally many equal devices share one."""
        stages, meshes = execution.schedule.num_stages, stage_meshes(self.graph.mesh, execution)
        modes = execution.schedule.recompute_by_stage or (execution.recompute,) * stages
        parts = stage_clusters(self.cluster, execution, meshes)
        alike = {mode: self._alike(replace(execution, recompute=mode)) for mode in dict.fromkeys(modes)}
        ways = zip(modes, parts, meshes, strict=True)
        return [self._maker((alike[mode], part, mesh)) for mode, part, mesh in ways]

    def _maker(self, way: _Way) -> Maker:
        if way not in self._makers:
            pieces = self._pieces.setdefault(_but_for_again(way), {})
            self._makers[way] = Maker(self._steps_of(way), self.repeats, pieces, self._simulated)
        return self._makers[way]

    def _alike(self, execution: Execution) -> Execution:
        """Return the execution without the fields that operations and pieces of stages do not depend on."""
        schedule = Schedule(num_stages=min(execution.schedule.num_stages, 2))
        return replace(execution.assuming(num_microbatches=1), schedule=schedule)


def _but_for_again(way: _Way) -> _Way:
    """Return the way without its recomputation, which does not change the cost of operations.

    In fp8 it does: the first reader of a value casts it.
    """
    alike, part, mesh = way
    return way if _is_fp8(alike) else (replace(alike, recompute="none"), part, mesh)


def _of_operations(way: _Way) -> _Way:
    """Return the way without its pieces too, which do not change the cost of an operation that runs whole."""
    alike, part, mesh = _but_for_again(way)
    return way if _is_fp8(alike) else (replace(alike, pieces=1), part, mesh)


def _is_fp8(execution: Execution) -> bool:
    return execution.rates.get("matmul") == "fp8"


def _crossing(cut: Sequence[Section], share: Share, after: Share) -> tuple[str, ...]:
    """Return the values that a virtual stage sends to the next one."""
    last = share[-1][0]
    return tuple(sorted(crossing(cut, last, inside=after[0][0] == last)))


def _hops(
    crossed: Sequence[tuple[str, ...]], steps: Sequence[Steps], cluster: Cluster
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return the seconds between neighbouring virtual stages, and the bytes per device of sender and receiver.

    `crossed`: the values that each stage sends on; `steps`: of each stage. Equal hops are costed once.
    """
    known, hops, sent, received = dict[tuple[object, ...], float](), list[float](), list[float](), list[float]()
    firsts = first_ranks([stage.graph.mesh for stage in steps])
    for number, names in enumerate(crossed):
        pair = ends(number, len(steps))
        ranks = firsts[min(pair)], firsts[max(pair) + 1] - 1
        kinds = tuple(steps[0].graph.types[name] for name in names)
        sides = tuple((steps[stage].graph.mesh, tuple(steps[stage].num_bytes[n] for n in names)) for stage in pair)
        key = kinds, sides, pair if cluster.parts or pair[0] == pair[1] else between(*ranks, cluster.levels)
        if key not in known:
            known[key] = crossing_s(names, pair, steps, cluster) if pair[0] != pair[1] else 0.0
        hops.append(known[key])
        for (_, num_bytes), totals in zip(sides, (sent, received), strict=True):
            totals.append(sum(num_bytes) if pair[0] != pair[1] else 0.0)
    return tuple(hops), tuple(sent), tuple(received)


def stage_clusters(cluster: Cluster, execution: Execution, meshes: Sequence[Mesh]) -> list[Cluster]:
    """Return the cluster of each stage: the whole one, unless stages differ in their devices or sizes."""
    if len(meshes) == 1 or not (cluster.parts or execution.schedule.stage_sizes):
        return [cluster] * len(meshes)
    parts = (cluster.part(range(*ends)) for ends in pairwise(first_ranks(meshes)))  # anywhere across machines
    return [replace(part, name=cluster.name) for part in parts]


def _posted(sent: Sequence[float], received: Sequence[float], num_stages: int) -> list[float]:
    """Return the message bytes that each stage holds beside its values: the next to arrive, and a gradient to send."""
    posted = [[0.0] * num_stages for _ in range(3)]
    for number, (mine, its) in enumerate(zip(sent, received, strict=True)):
        here, there = ends(number, num_stages)
        for kind, (stage, num_bytes) in enumerate(((there, its), (here, mine), (there, its))):
            posted[kind][stage] = max(posted[kind][stage], num_bytes)
    return [sum(kinds) for kinds in zip(*posted, strict=True)]


def crossing_s(names: Iterable[str], pair: tuple[int, int], steps: Sequence[Steps], cluster: Cluster) -> float:
    """Return the slower of two ways: values sent on in their layouts, one by one, or their gradients sent back."""

    def way_s(*ends: int, back: bool) -> float:
        total, source = 0.0, steps[ends[0]]
        for name in names:
            kind = source.graph.types[name]
            if kind.grad or not back:
                layouts = tuple(layout.dual if back else layout for layout in kind.layouts)
                total += _between_s(steps, cluster, kind, layouts, source.num_bytes[name], ends)
        return total

    return max(way_s(*pair, back=False), way_s(*reversed(pair), back=True))


def _between_s(
    steps: Sequence[Steps],
    cluster: Cluster,
    kind: TensorType,
    layouts: Layouts,
    num_bytes: float,
    ends: tuple[int, ...],
) -> float:
    """Return the seconds of sending one microbatch's value between stages, in the same layouts on both.

    `num_bytes`: on each device of the first stage.
    """
    meshes = [each.graph.mesh for each in steps]
    firsts = first_ranks(meshes)
    here, there = (StageMesh(meshes[stage], firsts[stage]) for stage in ends)
    return resharding_s(cluster, Tensor(kind.shape, layouts), num_bytes, here, there)


def _sums_s(shared: Sequence[Collection[str]], steps: Sequence[Steps], cluster: Cluster) -> list[float]:
    """Return each stage's seconds to sum shared parameters' gradients: as one collective of the stages that hold them.

    Stages that no group joins send each other pieces: priced as a ring over the links of the outermost.
    """
    by_stage, meshes = [0.0] * len(shared), [each.graph.mesh for each in steps]
    for leaf, count in Counter(chain.from_iterable(shared)).items():
        holders = [stage for stage, held in enumerate(shared) if leaf in held]
        parameter = steps[holders[0]].parameters[leaf]
        if count > 1 and parameter.grad:
            kind = steps[holders[0]].graph.types[leaf]
            if (group := group_of_stages(cluster, meshes, holders)) is not None:
                seconds = group.picks("all_reduce").curve.time_s(parameter.reduced_bytes)
            else:
                one_s = _between_s(
                    steps, cluster, kind, kind.layouts, parameter.reduced_bytes, (holders[0], holders[-1])
                )
                seconds = 2 * (count - 1) / count * one_s
            for stage in holders:
                by_stage[stage] += seconds
    return by_stage
