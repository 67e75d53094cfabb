"""A typed parallel graph as a program: what each pipeline stage does, and what passes between stages.

A program is a list of distinct chunks (segments of one microbatch forward and backward), and stages that refer to them.
Stages that are equal share their chunks, so neither building nor simulating a program grows with depth or with the
number of stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.buffers import stages_bytes
from shardwright.cost.collectives.groups import between
from shardwright.cost.collectives.resharding import StageLayout, resharding_s
from shardwright.cost.timeline.maker import Maker
from shardwright.cost.timeline.segments import StepProgram
from shardwright.cost.timeline.steps import Steps
from shardwright.cost.timeline.streams import SegmentTimeline
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts, local_shape
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.sections import (
    Section,
    Share,
    crossing,
    everything,
    spread,
)
from shardwright.pcg.types import TensorType


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
        self._makers: dict[Execution, list[Maker]] = {}
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

    def _stage_makers(self, execution: Execution) -> list[Maker]:
        """One for all stages, or, where their devices differ, one for each."""
        alike = self._alike(execution)
        if alike not in self._makers:
            if self.cluster.parts:
                self._makers[alike] = _own_makers(self.graph, self.cluster, alike, self.repeats)
            else:
                self._makers[alike] = [Maker(self.steps(alike), self.repeats)]
        return self._makers[alike]

    def _alike(self, execution: Execution) -> Execution:
        """The execution without what operations and pieces of stages do not depend on."""
        stages = execution.num_stages
        return replace(
            execution, num_microbatches=1, chunks_per_stage=1, schedule="1f1b", split=(),
            num_stages=stages if self.cluster.parts else min(stages, 2),
        )  # fmt: skip


def _own_makers(graph: Graph, cluster: Cluster, execution: Execution, repeats: Mapping[str, int]) -> list[Maker]:
    """One for each stage, as their devices differ; equal devices share theirs."""
    size, known = graph.mesh.num_devices, list[tuple[Cluster, Maker]]()
    makers: list[Maker] = []
    for stage in range(execution.num_stages):
        own = cluster.part(range(stage * size, (stage + 1) * size))
        maker = next((m for c, m in known if replace(c, name=own.name) == own), None)
        if maker is None:
            known.append((own, maker := Maker(Steps(graph, own, execution), repeats)))
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
