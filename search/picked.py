"""The schedules that a plan runs: for each collective of its step the one that is picked, beside the library's choice.

A plan's cluster holds the schedules that its collectives run by, and no others. So prices, reports and ranks decide
alike, from the plan's file alone: whatever is picked among few is what was picked among many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.schedules import Schedules
from shardwright.cost.collectives.communication import SCHEDULED, Communication
from shardwright.cost.predict import details, predict
from shardwright.cost.timeline.program import Programs, StepProgram, stage_clusters
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.collectives.schedule import BySize, Schedule
from shardwright.pcg.mesh import TIME
from shardwright.pcg.step.meshes import stage_meshes
from shardwright.pcg.step.messages import Message
from shardwright.search.plan import Plan


class Use(NamedTuple):
    """A collective of a step on a device of one stage: how often it runs, by what, and what the library would do.

    `schedule`: None where the library's own algorithm runs. Seconds are of one run.
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

    @property
    def saved_s(self) -> float:
        """The seconds by which all runs of a step are shorter."""
        return self.times * (self.library_s - self.seconds)


ByAxis = Mapping[str, Mapping[str, BySize]]
"""By mesh axis and collective, what is picked; without those that the library runs at every size."""


def with_its_schedules(plan: Plan) -> Plan:
    """Return the plan on a cluster that has the schedules which the plan runs; without a choice of them, as it is."""
    if plan.cluster.schedules is None:
        return plan
    own = dict.fromkeys(use.schedule for use in uses(plan) if use.schedule is not None)
    cluster = replace(plan.cluster, schedules=Schedules(tuple(own)))
    return replace(plan, cluster=cluster, prediction=predict(plan.graph, cluster, plan.execution))


def by_library(plan: Plan) -> float:
    """Return the seconds of the plan's step where the library runs all collectives."""
    return predict(plan.graph, replace(plan.cluster, schedules=None), plan.execution).step_s


def uses(plan: Plan) -> list[Use]:
    """Return the collectives of a step that schedules may carry out, the largest saving first."""
    made = details(programs := Programs(plan.graph, plan.cluster), plan.execution).program
    apart = set(_sent_in_rows(programs.steps(plan.execution)))
    found = [use for stage in range(len(made.stages)) for use in _of_stage(plan, made, stage, apart)]
    return sorted(found, key=lambda use: -use.saved_s)


def by_stage(plan: Plan) -> list[ByAxis]:
    """Return what each stage's ranks run by schedules; nothing where the plan has none."""
    if plan.cluster.schedules is None or not plan.cluster.schedules.own:
        return []
    return [
        {axis: _by_size(communication, number) for number, axis in enumerate(names)}
        for names, communication in _communications(plan)
    ]


def _by_size(communication: Communication, axis: int) -> Mapping[str, BySize]:
    picks = {name: communication.picks(name, axis) for name in SCHEDULED}
    return {
        name: list(zip(own.starts, own.schedules, strict=True)) for name, own in picks.items() if any(own.schedules)
    }


def _communications(plan: Plan) -> Iterator[tuple[list[str], Communication]]:
    """Yield for each stage the names of its mesh's axes of devices or of time, and what they send."""
    meshes = stage_meshes(plan.mesh, plan.execution)
    clusters: list[Cluster] = stage_clusters(plan.cluster, plan.execution, meshes)
    for cluster, mesh in zip(clusters, meshes, strict=True):
        yield list(mesh.names), Communication(cluster, mesh.device_sizes)


def _of_stage(plan: Plan, made: StepProgram, stage: int, apart: set[Message]) -> Iterator[Use]:
    names, communication = list(_communications(plan))[stage]
    sent: Counter[Message] = made.messages(stage)
    for message, count in sent.items():
        name, axis, num_bytes, _ = message
        if name not in SCHEDULED or axis not in names or axis == TIME or message in apart:
            continue
        number = names.index(axis)
        picks, library = communication.picks(name, number), communication.library(name, number)
        yield Use(
            stage, axis, name, num_bytes, count, picks.at(num_bytes), picks.curve.time_s(num_bytes),
            library.at(num_bytes).name, library.time_s(num_bytes),
        )  # fmt: skip


def _sent_in_rows(steps: Steps) -> Iterator[Message]:
    """Yield the messages of dispatched rows, whose sizes a step decides: the library sends them."""
    for operator in steps.operators.values():
        for ways in (operator.cost.ways, operator.cost.ways_back):
            for way in ways.listed:
                yield from way.messages
