"""The request to a search, checked against the model and the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import combinations
from math import inf

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.program import check_offload
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.parameters import blocks_of
from shardwright.pcg.step.recompute import RECOMPUTES
from shardwright.search.request.asked import MEMORY, STAGES, Bound, LayoutPin, RecomputeMode, Stages, parse
from shardwright.search.request.limits import BOUNDED, NO_LIMITS, Limits
from shardwright.search.request.options import SearchOptions
from shardwright.search.request.restrict import FREE, ROLES, check_roles
from shardwright.search.request.spaces import (
    AXES,
    Pipeline,
    Space,
    baselines,
    batch_size,
    degrees,
    free_spaces,
    nested,
    sequence_baselines,
    staged_spaces,
)

_MOST_NAMED = 8


@dataclass(frozen=True)
class Pins:
    """The limits of a search; `None`: free. `mesh` is one of devices.

    Attributes:
        mesh: the only one that is searched.
        microbatches: their number in a step.
        recompute: what backward makes again.
        size: of the batch.
        spaces: what is searched: the given mesh, or all meshes. Where there are limits, also the plans by hand that
            keep to them, as no other plan takes the place of what is found.
        nested: by the sizes of a mesh of two axes, the mesh of three that is cut from it (`spaces.nested`).
        memory_bytes: the most that plans may use on each device, where that is less than there is.
        limits: of layouts, on every mesh.
        staged: the meshes of a stage that are searched, by the number of stages, the fewest first, or by the devices of
            each stage where they are unlike. Where no number is asked for, they are searched only where stages may pay
            (`Search._may_pay`).
        asked: all of this in the user's words.
        guided: whether the user says what to search: then no other plan takes the place of what is found.
    """

    mesh: Mesh | None
    microbatches: int | None
    recompute: RecomputeMode | None
    size: int
    spaces: tuple[Space, ...]
    memory_bytes: int | None = None
    limits: Limits = NO_LIMITS
    asked: SearchOptions = field(default_factory=SearchOptions)
    guided: bool = False
    nested: Mapping[tuple[int, ...], Space] = field(default_factory=dict)
    staged: Mapping[int | tuple[int, ...], Sequence[Space]] = field(default_factory=dict)

    @property
    def by_block(self) -> bool:
        """Return whether equal blocks may be run in different ways."""
        return any(value is not None and not isinstance(value, str) for value in (self.recompute, self.asked.offload))

    @property
    def recomputes(self) -> Sequence[RecomputeMode]:
        """The recomputations to try, the one that takes least time first."""
        return RECOMPUTES if self.recompute is None else (self.recompute,)

    @property
    def by_hand(self) -> Pins:
        """The limits to which plans beside the one that is asked for keep as well, on a cluster of any size."""
        return replace(self, mesh=None, spaces=(), limits=NO_LIMITS, guided=False, nested={}, staged={})

    @classmethod
    def of(cls, graph: Graph, cluster: Cluster, options: SearchOptions, spaces: Sequence[Space] | None = None) -> Pins:
        """Return the checked request. A `PlanError` says what in it contradicts the rest, the cluster or the batch.

        `spaces`: what to search in place of the meshes.
        """
        size = batch_size(graph)
        check_offload(cluster, Execution(offload=options.offload or "none"))
        mesh, microbatches, recompute = options.mesh, options.microbatches, options.recompute
        if mesh is not None and TIME in mesh.names:
            if microbatches not in (None, mesh.num_microbatches):
                raise PlanError(
                    f"microbatches={microbatches} contradicts the axis {TIME!r} of mesh {mesh}; give one of the two"
                )
            microbatches = mesh.num_microbatches
            mesh = Mesh(mesh.names[1:], mesh.sizes[1:]) if len(mesh) > 1 else Mesh(("x",), (1,))
        if mesh is not None:
            _check_mesh(mesh, options.roles, cluster, options.stages)
            check_roles(graph, mesh, options.roles or (FREE,) * len(mesh))
        if microbatches is not None:
            _check_count(microbatches, size)
        limits, bounds = limits_of(graph, mesh, options.pins)
        memory_bytes = bounds[MEMORY].high if MEMORY in bounds else None
        given = mesh is not None or spaces is not None
        stages = _stages(options, graph, cluster, bounds.get(STAGES), given=given)
        if memory_bytes is not None and cluster.parts:  # each stage's limit is its own devices'
            if 1 not in stages:
                raise PlanError(f"pin {bounds[MEMORY].text!r}: not with stages on devices that differ; leave one out")
            stages = [1]
        only = 1 not in stages
        guided = mesh is not None or bool(limits) or spaces is not None or only
        finer = dict[tuple[int, ...], Space]()
        if spaces is None:
            known = free_spaces(cluster.num_devices)
            if limits:
                first, last = (
                    [s._replace(name=f"{s.name}, pinned") for way in ways for s in way]
                    for ways in (baselines(cluster), sequence_baselines(cluster, graph))
                )
                known = [*first, *known, *last]
            if mesh is not None:
                known = [Space(f"search on {mesh}", mesh, tuple(options.roles or (FREE,) * len(mesh)))]
            spaces = [s._replace(limits=limits) for s in known if limits.allow(s.mesh, s.roles)]
            if not guided:
                finer = {s.mesh.sizes: cut for s in spaces if (cut := nested(s, cluster)) is not None}
        on = {p: tuple(_staged(p, options, mesh, limits, cluster)) for p in stages if p != 1}
        staged = {p: pipelines for p, pipelines in on.items() if pipelines}
        return cls(
            mesh, microbatches, recompute, size, () if only else tuple(spaces), memory_bytes, limits, options, guided,
            finer, staged,
        )  # fmt: skip


def _stages(
    options: SearchOptions, graph: Graph, cluster: Cluster, bound: Bound | None, *, given: bool
) -> list[int | tuple[int, ...]]:
    """Return the numbers of pipeline stages that plans may have, 1 for none; for unlike stages, the devices of each.

    `bound`: of the numbers that the search chooses from. `given`: the user says where to search, on meshes of all
    devices.
    """
    n, most, stages = cluster.num_devices, max(1, len(blocks_of(graph))), options.stages
    if isinstance(stages, (int, tuple)):
        stages_text, count = (f"{list(stages)}", len(stages)) if isinstance(stages, tuple) else (f"{stages}", stages)
        if bound is not None:
            raise PlanError(
                f"pin {bound.text!r}: it bounds what is chosen, but stages={stages_text} is given; leave one out"
            )
        if isinstance(stages, tuple) and sum(stages) != n:
            raise PlanError(f"stages={stages_text} have {sum(stages)} devices, cluster {cluster.name} has {n}")
        if n % count and not isinstance(stages, tuple):
            raise PlanError(f"stages={stages_text} does not divide the {n} devices of cluster {cluster.name}")
        if count > most:
            blocks = len(blocks_of(graph))
            raise PlanError(f"stages={stages_text}: the model has {blocks} blocks to put on them; choose fewer")
        return [count if isinstance(stages, tuple) and len(set(stages)) == 1 else stages]
    known: list[int | tuple[int, ...]] = [1]
    if not given or stages is not None:
        parts = tuple(part.num_devices for part in cluster.parts)
        unlike = (
            [parts]
            if len(set(parts)) > 1 and len(parts) <= most and all(max(parts) % size == 0 for size in parts)
            else []
        )
        known += [*(p for p in degrees(n) if p <= most), *unlike]
    if bound is None:
        return known
    bounded = [p for p in known if bound.low <= _count(p) <= (bound.high or _count(p))]
    if not bounded:
        raise PlanError(f"pin {bound.text!r}: of the numbers of stages that are possible, {known}, it leaves none")
    return bounded


def _count(stages: int | tuple[int, ...]) -> int:
    return len(stages) if isinstance(stages, tuple) else stages


def _staged(
    stages: int | tuple[int, ...], options: SearchOptions, mesh: Mesh | None, limits: Limits, cluster: Cluster
) -> Iterator[Space]:
    """Yield the spaces of a stage: every mesh, or the given one."""
    chunks = 2 if options.schedule == "interleaved" else 1
    devices = stages if isinstance(stages, tuple) else ()
    pipeline = Pipeline(_count(stages), options.schedule or "1f1b", chunks, devices)
    if mesh is not None:
        pipeline.sizes_on(mesh)
        roles = tuple(options.roles or (FREE,) * len(mesh))
        spaces = [Space(f"{pipeline} x search on {mesh}", mesh, roles, pipeline=pipeline)]
    else:
        spaces = staged_spaces(cluster.num_devices, pipeline)
        if not spaces and devices and options.stages == devices:
            raise PlanError(
                f"stages={list(devices)}: no mesh of {max(devices)} devices has a first axis that can be cut to all of "
                "these numbers; choose such that the numbers of devices divide the largest"
            )
    yield from (s._replace(limits=limits) for s in spaces if limits.allow(s.mesh, s.roles))


def _check_mesh(mesh: Mesh, roles: Sequence[str] | None, cluster: Cluster, stages_asked: Stages | None) -> None:
    if not mesh.names:
        raise PlanError("mesh: it has no axes; give one, of size 1 for a single device: mesh={'dp': 1}")
    stages = stages_asked if isinstance(stages_asked, int) else 1
    if isinstance(stages_asked, tuple):
        stages = len(stages_asked) if len(set(stages_asked)) == 1 else 0  # 0: the stages' meshes differ
    if stages > 1 and mesh.num_devices * stages != cluster.num_devices:
        raise PlanError(
            f"{stages} stages of mesh {mesh} have {mesh.num_devices * stages} devices, cluster {cluster.name} has "
            f"{cluster.num_devices}"
        )
    if stages == 1 and mesh.num_devices != cluster.num_devices:
        raise PlanError(f"mesh {mesh} has {mesh.num_devices} devices, cluster {cluster.name} has {cluster.num_devices}")
    if roles is not None and len(roles) != len(mesh):
        raise PlanError(f"{len(roles)} axis roles for mesh {mesh}; give one role per axis of devices")
    unknown = [role for role in roles or () if role not in ROLES]
    if unknown:
        raise PlanError(f"unknown axis role {unknown[0]!r}; choose one of {list(ROLES)}")


def limits_of(graph: Graph, mesh: Mesh | None, pins: Sequence[str]) -> tuple[Limits, Mapping[str, Bound]]:
    """Return the limits of layouts that pins state, and the bounds of memory and stages."""
    parsed = [pin for text in pins for pin in parse(text)]
    layouts = tuple(pin for pin in parsed if isinstance(pin, LayoutPin))
    bounds = [pin for pin in parsed if isinstance(pin, Bound)]
    targets = [str(leaf.attr("target")) for leaf in graph.leaves("parameter")]
    axes = AXES[:2] if mesh is None else mesh.names
    for pin in layouts:
        _check_layout(pin, targets, axes, mesh)
    for bound in bounds:
        if bound.what not in (*BOUNDED, MEMORY, STAGES, *axes):
            where = "the meshes that are searched have axes" if mesh is None else f"mesh {mesh} has axes"
            raise PlanError(
                f"pin {bound.text!r}: {bound.what!r} is none of {', '.join(BOUNDED)} and no axis; {where} "
                f"{' and '.join(axes)}"
            )
    for one, other in combinations(layouts, 2):
        both = [t for t in targets if one.names(t) and other.names(t)]
        if both and one.text != other.text and one.contradicts(other):
            raise PlanError(f"pins {one.text!r} and {other.text!r} contradict each other for {both[0]}; leave one out")
    by_what = {what: [b for b in bounds if b.what == what] for what in (b.what for b in bounds)}
    merged = tuple(_merged(what, bounds_of) for what, bounds_of in by_what.items())
    other = {b.what: b for b in merged if b.what in (MEMORY, STAGES)}
    return Limits(layouts, tuple(b for b in merged if b.what not in other)), other


def _check_layout(pin: LayoutPin, targets: Sequence[str], axes: Sequence[str], mesh: Mesh | None) -> None:
    if not any(map(pin.names, targets)):
        modules = [t.rpartition(".")[0] for t in targets]
        near = get_close_matches(pin.pattern, dict.fromkeys([*targets, *modules]), 3) or targets[:3]
        raise PlanError(f"pin {pin.text!r}: no parameter or module is called so; there is {', '.join(near)}")
    if pin.axis and pin.axis not in axes:
        advice = "leave the axis out, or give a mesh that has it" if mesh is None else "name one of them"
        where = "that are searched have" if mesh is None else f"{mesh} has"
        raise PlanError(
            f"pin {pin.text!r}: axis {pin.axis!r} is unknown, the mesh{'es' * (mesh is None)} {where} "
            f"{' and '.join(axes)}; {advice}"
        )


def _merged(what: str, bounds: Sequence[Bound]) -> Bound:
    """Return all bounds of one role, axis or memory as one. Raises `PlanError` where they contradict each other."""
    least = max(bounds, key=lambda b: b.low)
    most = min(bounds, key=lambda b: inf if b.high is None else b.high)
    if most.high is not None and least.low > most.high:
        raise PlanError(f"pins {least.text!r} and {most.text!r} contradict each other; leave one out")
    return Bound("; ".join(dict.fromkeys(b.text for b in (least, most))), what, least.low, most.high)


def _check_count(count: int, size: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise PlanError(f"microbatches={count!r}: expected a positive number of microbatches in a step")
    if count > 1 and size == 0:
        raise PlanError(f"microbatches={count}: no input has examples, so there is no batch to cut; leave it out")
    if size % count:
        good = [1, *(degrees(size) if size > 1 else ())]
        shown = ", ".join(map(str, good[:_MOST_NAMED])) + (", …" if len(good) > _MOST_NAMED else "")
        raise PlanError(f"microbatches={count} does not divide the batch of {size}; choose one of {shown}")
