"""The schedules that a plan runs: for each collective of its step the one that is picked, beside the library's choice.

A plan's cluster holds the schedules that its collectives run by, and no others. So prices, reports and ranks decide
alike, from the plan's file alone: whatever is picked among few is what was picked among many.

A step's time takes sums over several axes as the library's. What schedules save of them is not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, cast

from shardwright.cost.clusters.cluster import Collective
from shardwright.cost.clusters.schedules import Schedules
from shardwright.cost.collectives.communication import SCHEDULED
from shardwright.cost.collectives.together import Group, group_of_all, group_of_stages, groups_of_mesh
from shardwright.cost.predict import details, predict
from shardwright.cost.timeline.program import Programs, StepProgram, stage_clusters
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.collectives.schedule import BySize, Schedule
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.stages import ALL_RANKS, STAGES, GroupName, cut, of_stages
from shardwright.pcg.step.meshes import stage_meshes
from shardwright.pcg.step.messages import Message
from shardwright.search.plan import Plan

CLIPPED_BYTES = 8
"""The bytes of the sum over all ranks with which gradients are clipped, where a training loop does so."""


class Use(NamedTuple):
    """A collective of a step on a device of one stage: how often it runs, by what, and what the library would do.

    `axis`: the mesh axis, several as one joined by "_", or "stages". `schedule`: None where the library's own algorithm
    runs. Seconds are of one run. `is_priced`: the step's time has them.
    """

    stage: int
    axis: str
    collective: str
    num_bytes: int
    times: int
    schedule: Schedule | None
    seconds: float
    library: str
    library_s: float
    is_priced: bool = True

    @property
    def saved_s(self) -> float:
        """The seconds by which all runs of a step are shorter."""
        return self.times * (self.library_s - self.seconds)


ByGroup = Mapping[GroupName, Mapping[str, BySize]]
"""By group of ranks and collective, what is picked; without those that the library runs at every size."""


def with_its_schedules(plan: Plan) -> Plan:
    """Return the plan on a cluster that has the schedules which the plan runs; without a choice of them, as it is."""
    if plan.cluster.schedules is None:
        return plan
    run = [*(use.schedule for use in uses(plan)), clipping(plan).schedule]
    cluster = replace(plan.cluster, schedules=Schedules([*dict.fromkeys(one for one in run if one is not None)]))
    return replace(plan, cluster=cluster, prediction=predict(plan.graph, cluster, plan.execution))


def by_library(plan: Plan) -> float:
    """Return the seconds of the plan's step where the library runs all collectives."""
    return predict(plan.graph, replace(plan.cluster, schedules=None), plan.execution).step_s


def uses(plan: Plan) -> list[Use]:
    """Return the collectives of a step that schedules may carry out, the largest saving first."""
    made = details(programs := Programs(plan.graph, plan.cluster), plan.execution).program
    rows = _of_rows(programs.steps(plan.execution))
    by_stage = (_of_stage(stage, groups, made, rows) for stage, groups in enumerate(_groups(plan)))
    return sorted([*chain(*by_stage), *_between_stages(plan)], key=lambda use: -use.saved_s)


def clipping(plan: Plan) -> Use:
    """Return the sum over all ranks with which a training loop may clip gradients; no step's time has it."""
    group = group_of_all(plan.cluster, plan.cluster.num_devices)
    return _use(group, 0, Message("all_reduce", "all ranks", CLIPPED_BYTES), 1, is_priced=False)


def by_stage(plan: Plan) -> list[ByGroup]:
    """Return what each stage's ranks run by schedules; nothing where the plan has none."""
    if plan.cluster.schedules is None or not plan.cluster.schedules.given:
        return []
    everywhere = {ALL_RANKS: group_of_all(plan.cluster, plan.cluster.num_devices), **_groups_of_stages(plan)}
    return [
        {name: by for name, group in {**groups, **everywhere}.items() if (by := _by_size(group))}
        for groups in _groups(plan)
    ]


def _by_size(group: Group) -> Mapping[str, BySize]:
    picks = {name: group.picks(name) for name in SCHEDULED}
    return {
        name: list(zip(pick.starts, pick.schedules, strict=True)) for name, pick in picks.items() if any(pick.schedules)
    }


def _groups(plan: Plan) -> list[Mapping[GroupName, Group]]:
    """Return the groups of each stage's mesh."""
    meshes = stage_meshes(plan.mesh, plan.execution)
    clusters = stage_clusters(plan.cluster, plan.execution, meshes)
    known = dict[Mesh, Mapping[GroupName, Group]]()
    if all(cluster is plan.cluster for cluster in clusters):
        return [known.setdefault(mesh, groups_of_mesh(plan.cluster, mesh)) for mesh in meshes]
    return [groups_of_mesh(*pair) for pair in zip(clusters, meshes, strict=True)]


def _groups_of_stages(plan: Plan) -> Mapping[GroupName, Group]:
    """Return the groups that sum gradients over stages, with equal meshes: others send each other pieces."""
    if plan.execution.schedule.num_stages == 1:
        return {}
    stages = cut(plan.graph, plan.execution)
    every = {
        stage_pair: group_of_stages(plan.cluster, stages.meshes, stage_pair)
        for stage_pair in sorted(set(stages.shared.values()))
    }
    return {of_stages(stage_pair): group for stage_pair, group in every.items() if group is not None}


def _between_stages(plan: Plan) -> Iterator[Use]:
    if not (groups := _groups_of_stages(plan)):
        return
    stages = cut(plan.graph, plan.execution)
    for leaf, holders in stages.shared.items():
        if (group := groups.get(of_stages(holders))) is not None:
            for stage in holders:
                num_bytes = stages.graph.types[leaf].local_bytes(stages.meshes[stage])
                yield _use(group, stage, Message("all_reduce", STAGES, num_bytes), 1)


def _of_stage(
    stage: int, groups: Mapping[GroupName, Group], made: StepProgram, rows: Mapping[Message, float]
) -> Iterator[Use]:
    by_name = {"_".join(name): group for name, group in groups.items()} | {
        name[0]: group for name, group in groups.items() if len(name) == 1
    }
    sent: Counter[Message] = made.messages(stage)
    for message, count in sent.items():
        group, load = by_name.get(message.axis), rows.get(message._replace(kind=""), 1.0)
        if message.collective in SCHEDULED and group is not None and load:
            yield _use(group, stage, message, count, load, is_priced=(message.axis,) in groups)


def _use(group: Group, stage: int, message: Message, times: int, load: float = 1.0, *, is_priced: bool = True) -> Use:
    """Return a use of a group. `load`: of the busiest device, over the mean that the message says."""
    name, axis, num_bytes, _ = message
    kind = cast("Collective", name)
    picks, library, most = group.picks(kind), group.library(kind), load * num_bytes
    return Use(
        stage, axis, name, num_bytes, times, picks.at(most), picks.curve.time_s(most),
        library.at(most).name, library.time_s(most), is_priced,
    )  # fmt: skip


def _of_rows(steps: Steps) -> Mapping[Message, float]:
    """Return the load of the busiest device for each message of dispatched rows; 0 for their counts."""
    loads = dict[Message, float]()
    for operator in steps.operators.values():
        counts = {exchange.counts_bytes for exchange in operator.sent}
        load = max([1.0, *(exchange.imbalance for exchange in operator.sent)])
        for ways in (operator.cost.ways, operator.cost.ways_back):
            messages = (message for way in ways.listed for message in way.messages)
            loads |= {message: 0.0 if message.num_bytes in counts else load for message in messages}
    return loads
