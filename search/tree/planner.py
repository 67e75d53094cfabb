"""The search: every mesh, the best layouts on each, memory as a hard limit, baselines on the same terms.

On one mesh, run in one way, the search is exact for two sums of compute and communication: without overlap, and with as
much overlap as can be. The rest is not exact. Ways to run a graph are tried by queues (`search.tree.attempts`), the
likeliest first. The timeline, in which compute and communication overlap, judges all that was found, plans of all
meshes and baselines alike. Its time has a bound (`search.exact.least`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Unpack

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.program import Programs, check_offload
from shardwright.pcg.encodings import Encodings
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.stages import not_run
from shardwright.pcg.step.execution import Execution, ReduceDtype
from shardwright.pcg.step.lifetimes import ZEROS, Zero
from shardwright.pcg.step.optimizers import Optimizer
from shardwright.pcg.step.precisions import PrecisionMode
from shardwright.search.choices.domain import CertifiedSplits
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.collectives.candidates import for_planner
from shardwright.search.collector import collector_paused
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.solving import Candidate, Solver, different
from shardwright.search.plan import Plan
from shardwright.search.request.anytime import Stop
from shardwright.search.request.options import SearchOptions, SearchWords
from shardwright.search.request.pins import Pins
from shardwright.search.request.spaces import Space
from shardwright.search.tree.idle import asked_for, on_a_part, with_idle
from shardwright.search.tree.searching import Search
from shardwright.search.tree.ways import Progress
from shardwright.substitutions.equations import Equation


class Planner:
    """A search for plans of serial graphs on one cluster. Only certified choices and certified `rules` enter.

    `places` counts, by rule, the places that backtracking found, for `reports.coverage`. `precision`: the one that the
    graphs were captured under; `per_microbatch`: modules whose statistics are those of each microbatch; `reduce_dtype`:
    the dtype in which gradients are sent; `optimizer`: whose states are kept; `encodings`: for which layouts
    are chosen, if a request allows them.
    """

    def __init__(
        self,
        cluster: Cluster,
        certified: CertifiedSplits,
        progress: Progress | None = None,
        rules: Mapping[str, Equation] | None = None,
        precision: PrecisionMode | None = None,
        per_microbatch: Sequence[str] = (),
        reduce_dtype: ReduceDtype | None = None,
        optimizer: Optimizer = "adam",
        encodings: Encodings = (),
    ) -> None:
        self.cluster, self.certified, self.rules = for_planner(cluster), certified, rules or {}
        self.execution = Execution.of(
            precision,
            per_microbatch=tuple(per_microbatch),
            reduce_dtype=reduce_dtype,
            optimizer=optimizer,
            encodings=encodings,
        )
        check_offload(self.cluster, self.execution)
        self.progress = progress or (lambda message: None)
        self.solver = Solver(self.cluster, certified)
        self.limit_bytes = self.solver.limit_bytes
        self.places: Counter[str] = Counter()

    def solve(
        self,
        graph: Graph,
        mesh: Mesh,
        roles: Sequence[str],
        name: str,
        cutoff_s: float = inf,
        *,
        execution: Execution | None = None,
        zeros: Sequence[Zero] = ("zero-3",),
    ) -> Candidate:
        """Return the best plan on one mesh whose device axes keep to their roles, within memory if any found fits.

        `zeros`: the lifetimes that gathered parameters may have; the first that fits counts. A plan that provably takes
        `cutoff_s` or longer is not pursued further; the result may then not fit, or not be the best.
        """
        devices = [axis for axis in mesh.names if axis != TIME]
        if len(roles) != len(devices):
            raise PlanError(f"{len(roles)} axis roles for mesh {mesh}; give one role per axis of devices")
        if mesh.num_devices != self.cluster.num_devices:
            raise PlanError(
                f"mesh {mesh} has {mesh.num_devices} devices, cluster {self.cluster.name} has "
                f"{self.cluster.num_devices}"
            )
        run, priced = execution or self.execution, different(zeros, mesh)[-1]
        return self.solver.solve(Folded(graph), mesh, roles, name, run, zeros, priced, cutoff_s)

    @collector_paused()
    def plan(
        self,
        graph: Graph,
        model: str = "model",
        *,
        spaces: Sequence[Space] | None = None,
        by_hand: bool = False,
        compared: bool = True,
        **words: Unpack[SearchWords],
    ) -> Plan:
        """Return the best plan over all meshes, microbatches and recomputation, or over what the arguments leave.

        Where the batch does not divide among all devices, that may be a plan for fewer (`Plan.idle`).

        Args:
            graph: a serial graph.
            model: its name.
            spaces: to search in place of all meshes.
            by_hand: whether these `spaces` are planned as plans by hand are: with the best of their degrees,
                microbatches and kinds of recomputation, but no value recomputed by itself and no rewrites.
            compared: whether plans that people choose by hand are tuned too, to compare with.
            words: the options of the search (`SearchOptions`).

        Raises:
            PlanError: the arguments do not fit the cluster or the model, or contradict each other.
            GraphError: the graph gives no loss.
        """
        options = SearchOptions.of(**words)
        start, stop = time.perf_counter(), Stop(options.time_limit_s)
        graph.check_loss()
        request, mesh = replace(options, time_limit_s=None), options.mesh

        def planned(cluster: Cluster) -> Plan:
            return self._plan(self._solver(cluster), graph, model, request, spaces, compared, stop, by_hand=by_hand)

        given = mesh is not None or spaces is not None or request.stages not in (None, 1, "auto")
        if isinstance(request.stages, tuple) and sum(request.stages) < self.cluster.num_devices:
            part, idle = asked_for(self.cluster, mesh, request.stages)
            return replace(planned(part), idle=idle)
        if mesh is not None and mesh.num_devices < self.cluster.num_devices and request.stages in (None, 1):
            part, idle = asked_for(self.cluster, mesh)
            return replace(planned(part), idle=idle)
        try:
            on_all = planned(self.cluster)
        except NoLayoutsError:
            parts = () if given else on_a_part(self.cluster, graph, self.execution, self.certified, planned)
            if (part_alone := next(iter(parts), None)) is None:
                raise
            return part_alone
        if given:
            return on_all
        *_, best = stop.within(with_idle(on_all, graph, self.execution, self.certified, planned), needed=True)
        seconds = round(time.perf_counter() - start, 3)
        return replace(best, report=replace(best.report, seconds=seconds, stopped=stop.reason))

    def programs_of(self, plan: Plan) -> Programs:
        """Return the programs of a plan's graph: those that the search has costed, if the plan is for its cluster."""
        if plan.cluster == self.cluster:
            return self.solver.programs(plan.graph, {})
        return Programs(plan.graph, plan.cluster)

    def _solver(self, cluster: Cluster) -> Solver:
        """Return a solver for a cluster; that for the planner's own knows what it has solved."""
        return self.solver if cluster == self.cluster else Solver(cluster, self.certified)

    def _pins(self, cluster: Cluster, graph: Graph, options: SearchOptions, spaces: Sequence[Space] | None) -> Pins:
        """Return the checked request, without pipeline stages where the graph does not run in them."""
        pins = Pins.of(graph, cluster, options, spaces)
        if not pins.staged or (problem := not_run(graph, self.execution.base)) is None:
            return pins
        if not pins.spaces:
            raise PlanError(problem)
        return replace(pins, staged={})

    def _plan(
        self, solver: Solver, graph: Graph, model: str, options: SearchOptions, spaces: Sequence[Space] | None,
        compared: bool, stop: Stop, *, by_hand: bool = False,
    ) -> Plan:  # fmt: skip
        """Return the best plan on all devices of the solver's cluster."""
        pins = self._pins(solver.cluster, graph, options, spaces)
        zeros = pins.spaces[0].zeros if spaces is not None and pins.spaces else ZEROS
        run = replace(self.execution, offload=options.offload or "none")
        search = Search(
            solver, graph, run, pins, self.rules, self.progress, stop, zeros=zeros, compared=compared, by_hand=by_hand
        )
        plan = search.plan(model)
        self.places.update(search.rewriter.places)
        return plan
