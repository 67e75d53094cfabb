"""What a step takes at least: no plan's timeline lies below its own bound, nor below the reported one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.curve import CostLine, Curve, CurvePiece
from shardwright.cost.collectives.moves import MoveCosts, TensorClass
from shardwright.cost.timeline.clock import SHARING, Sharing
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import simulate
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import C, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.moves import Move
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS, Zero, with_lifetimes
from shardwright.pcg.step.time import check_time
from shardwright.search.choices.interning import Interned, Interner
from shardwright.search.choices.problem import Prices, Problem, Solution
from shardwright.search.exact.eliminate import Eliminator
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.least import least_s, seconds
from shardwright.search.exact.materialize import materialize
from shardwright.search.exact.solving import Solver, different, over_time
from shardwright.search.request.restrict import FREE, ZERO
from shardwright.search.request.spaces import LONGEST_FIRST
from tests.search.graphs import blocks, cluster, every_choice, mixture, mlp


def mixed(batch: int = 16, width: int = 32, layers: int = 2) -> Graph:
    """An MLP with branches in 16 bits, whose weights are cast before they are read; they are gathered as such."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (batch, width), "float32", "x")
    weights = [
        b.leaf(f"w{i}", "parameter", (width, width), "float32", f"layers.{i}.w", grad=True) for i in range(layers)
    ]
    h = b.op("cast", x, dtype="bfloat16")
    for weight in weights:
        y = b.op("linear", h, b.op("cast", weight, dtype="bfloat16"))
        h = b.op("add", b.op("relu", y), b.op("mul", y, h))
    h = b.op("cast", h, dtype="float32")
    return b.graph([("loss", b.op("sum", b.op("mul", h, h), dims=(0, 1), keepdim=False))])


def gpus(link_bytes_per_s: float, latency_s: float = 1e-6) -> Cluster:
    """Four slow devices that compute beside their collectives."""
    found = cluster(4, link_bytes_per_s=link_bytes_per_s, latency_s=latency_s)
    device = replace(found.device, kind="cuda", name="H100", step_overhead_s=1e-6)
    return replace(found, device=device, backend="nccl")


def rates(found: Cluster) -> Cluster:
    rate = {"fp32": 1e11, "bf16": 1e11}
    return replace(found, device=replace(found.device, flops_per_s=rate))


GRAPHS = {
    "mlp": mlp(16, 16, 64, layers=2, residual=True), "blocks": blocks(16, 64, layers=1, seq=16), "experts": mixture(),
    "mixed": mixed(),
}  # fmt: skip
CLUSTERS = [rates(c) for c in (cluster(4, link_bytes_per_s=1e8), gpus(1e8), gpus(1e10, 1e-7))]
RUNS = [(Mesh.of(x=4), 1, "none"), (Mesh.of(x=2, y=2), 1, "none"), (Mesh.of(x=2), 2, "none"), (Mesh.of(x=4), 1, "full")]


def longest(mesh: Mesh) -> Zero:
    return different(LONGEST_FIRST, mesh)[0]


def least_of(problem: Problem, choices: Sequence[int], beside: float) -> float:
    """The sum of a plan by the relaxed problem, with the hubs where it is least."""
    hubs = {v: problem.time_s[v].value.copy() for (kind, _), v in problem.index.items() if kind == "hub"}
    total = sum(float(t.value[choices[v]]) for v, t in enumerate(problem.time_s) if v not in hubs)
    for (i, j), table in problem.edges.items():
        priced = table.value * (beside if (i, j) in problem.overlapped else 1.0)
        if i in hubs:
            hubs[i] += priced[:, choices[j]]
        elif j in hubs:
            hubs[j] += priced[choices[i]]
        else:
            total += float(priced[choices[i], choices[j]])
    return total + sum(float(own.min()) for own in hubs.values())


def drawn(problem: Problem, solver: Solver, mesh: Mesh, draw: random.Random) -> Solution:
    """Layouts by chance: the best if own times were those, and moves cost what they do."""
    most = 10 ** draw.uniform(-6, 0)
    noise = [Interned(np.array([most * draw.random() for _ in own.value])) for own in problem.time_s]
    return solver.builder(mesh)[1].solve(replace(problem, time_s=noise, solved={}))


def test_no_plan_takes_less_than_its_own_least() -> None:
    """Of 500 plans and more: layouts, lifetimes and microbatches by chance, on processors and on GPUs."""
    ratios, num_plans, draw = dict[tuple[str, float], list[float]](), Counter[str](), random.Random(0)
    for found, (name, graph), (devices, many, again) in product(CLUSTERS, GRAPHS.items(), RUNS):
        if again == "full" and name != "blocks":
            continue
        solver, sharing = Solver(found, every_choice), SHARING[found.device.kind]
        mesh, execution = over_time(devices, many), Execution(recompute=again)  # pyright: ignore[reportArgumentType]
        roles = tuple(draw.choice([FREE, FREE, ZERO]) for _ in devices.names)
        asked = Folded(graph), mesh, roles, execution
        problem, _ = solver.problem(*asked, "zero-3")
        relaxed, _ = solver.problem(*asked, longest(mesh), relaxed=True)
        for _ in range(18):
            choices = drawn(problem, solver, mesh, draw)
            try:
                plan = materialize(problem, choices, every_choice)
                check_time(plan)
            except PlanError:  # nothing leads from one to the other
                continue
            zeros: dict[str, Zero] = {leaf.name: draw.choice(ZEROS) for leaf in plan.leaves("parameter")}
            step_s = simulate(program(with_lifetimes(plan, zeros), found, execution)).step_s
            num_plans[found.device.kind] += 1
            for beside in (sharing.least, 1.0, 8.0):
                own_s = least_of(relaxed, choices.choices, beside) / sharing.pace(beside) + found.device.step_overhead_s
                assert own_s <= step_s * (1 + 1e-9), (found.device.kind, name, mesh, roles, again, beside)
                ratios.setdefault((found.device.kind, beside), []).append(own_s / step_s)
    assert min(num_plans.values()) > 100
    assert num_plans.total() > 500
    assert max(ratios["cpu", 1.0]) > 0.999  # what waits counts whole, and so does compute
    assert max(ratios["cuda", SHARING["cuda"].least]) > 0.99
    assert max(ratios["cuda", 8.0]) > 0.6  # where compute is too short to run beside all of it


def shares(graph: Graph, found: Cluster, role: str, many: int) -> float:
    """What the best own bound of a plan is of its step."""
    solver, sharing, mesh = Solver(found, every_choice), SHARING["cuda"], over_time(Mesh.of(x=4), many)
    asked = Folded(graph), mesh, (role,), Execution()
    relaxed, _ = solver.problem(*asked, longest(mesh), relaxed=True)
    plan = solver.solve(*asked[:3], "", Execution(), (longest(mesh),), longest(mesh))
    sums = (least_of(relaxed, plan.solved[1].choices, b) / sharing.pace(b) for b in np.geomspace(0.16, 9, 20))
    return max(sums) / plan.prediction.step_s


def test_what_blocks_counts_whole_and_what_is_hidden_what_it_adds() -> None:
    """The bound of a plan with many blocks is near its step, whether activations are sent or parameters."""
    long = blocks(256, 64, layers=6, seq=16)
    for link, role, many in product((1e9, 1e10), ("data", "zero", "tensor"), (1, 2)):
        share = shares(long, rates(gpus(link)), role, many)
        assert 0.95 < share <= 1 + 1e-9, (link, role, many, share)
    for many in (1, 2):  # hardly anything but updates and casts of weights: those of slices are part of gathering
        share = shares(mixed(16, 1024), rates(gpus(1e12, 0.0)), "zero", many)
        assert 0.95 < share <= 1 + 1e-9, (many, share)
    for many in (1, 2):  # gathered in 16 bits, beside the blocks before
        share = shares(mixed(1024, 512, layers=8), rates(gpus(5e8)), "zero", many)
        assert 0.95 < share <= 1 + 1e-9, (many, share)


def small() -> Graph:
    """One product, a nonlinear function, and a loss."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (8, 16), "float32", "x")
    w = b.leaf("w", "parameter", (16, 16), "float32", "w", grad=True)
    return b.graph([("loss", b.op("sum", b.op("relu", b.op("linear", x, w)), dims=(0, 1), keepdim=False))])


def test_the_best_of_all_plans_takes_no_less_than_the_bound_and_often_no_more() -> None:
    """Every layout of a small graph, by the timeline."""
    for found in (cluster(4), gpus(1e10), gpus(1e7), gpus(1e6)):
        solver, mesh, best_s, num_plans = Solver(found, every_choice), Mesh.of(x=4), inf, 0
        asked = Folded(small()), mesh, (FREE,), Execution()
        problem, _ = solver.problem(*asked, "kept")
        for choices in product(*(range(len(own.value)) for own in problem.time_s)):
            if not all(np.isfinite(t.value[choices[i], choices[j]]) for (i, j), t in problem.edges.items()):
                continue
            with suppress(PlanError):  # nothing leads from one to the other
                plan = materialize(problem, Solution(choices, 0.0, 0.0), every_choice)
                best_s, num_plans = min(best_s, simulate(program(plan, found)).step_s), num_plans + 1
        bound_s = solver.least_s(*asked)
        assert num_plans > 50
        assert 0.7 * best_s < bound_s <= best_s * (1 + 1e-9), (found.name, bound_s, best_s)


def test_readers_that_share_a_way_pay_for_it_once() -> None:
    """Two readers want the shard, two the whole: the sum pays for one of them twice, a plan once."""
    b = GraphBuilder()
    x, w = b.leaf("x", "input", (8, 8), "float32", "x"), b.leaf("w", "parameter", (8, 8), "float32", "w", grad=True)

    def opaque(name: str) -> str:
        return b.op("opaque", name, target="my.op", shape=(8, 8), dtype="float32")

    h = b.op("linear", x, w)
    h = b.op("add", b.op("add", b.op("exp", h), b.op("tanh", h)), b.op("add", opaque(h), opaque(h)))
    graph = b.graph([("loss", b.op("sum", h, dims=(0, 1), keepdim=False))])
    solver, mesh = Solver(cluster(4, link_bytes_per_s=1e6), every_choice), Mesh.of(x=4)
    one = solver.solve(Folded(graph), mesh, ("data",), "")
    assert solver.least_s(Folded(graph), mesh, ("data",), Execution()) <= one.prediction.step_s < one.bound_s


def test_the_price_of_what_overlaps_is_looked_for() -> None:
    """Of plans that compute and send for so many seconds: where some wait, a price in between shows most."""
    sharing = SHARING["cuda"]
    for plans, gains in (
        ([(1.0, 3.0), (1.6, 1.5), (2.5, 0.5)], True), ([(1.0, 3.0), (3.1, 0.1)], True), ([(1.0, 3.0)], True),
        ([(1.0, 0.5), (2.0, 0.1)], False),
    ):  # fmt: skip
        own, sent = (Interned(np.array(each)) for each in zip(*plans, strict=True))
        nothing = Interned(np.zeros(1))
        edges, beside = {(0, 1): Interned(sent.value[:, None])}, {(0, 1)}
        unary = [own, nothing]
        problem = Problem(small(), Mesh(), time_s=unary, kept_bytes=unary, edges=edges, overlapped=beside)
        eliminator = Eliminator(Interner())
        walked = least_s(problem, eliminator, sharing)
        least, *higher = (
            min(a + price * h for a, h in plans) / sharing.pace(price)
            for price in (0.16, *np.geomspace(0.17, 500, 2000))
        )
        assert walked == pytest.approx(max(least, *higher), rel=1e-3), plans
        assert (walked > 1.1 * least) == gains, plans
        found = eliminator.solve(problem, Prices(overlap_weight=sharing.least))
        assert seconds(problem, found) in plans


# ---- the parts ----


def test_no_second_does_more_than_the_pace() -> None:
    """Compute alone, communication alone, or both."""
    for sharing, beside in product((*SHARING.values(), Sharing(0.7, 0.9)), (0.1, 0.5, 1.0, 3.0)):
        both = sharing.compute + beside * sharing.communication
        assert sharing.pace(beside) == max(1.0, beside, both)
        assert sharing.pace(sharing.least) == pytest.approx(1.0)
    assert SHARING["cpu"].most == 1.0
    assert SHARING["cuda"].most == 1e3


def test_what_is_sent_together_takes_no_more_than_alone() -> None:
    """However long a parameter stays, and in whatever order it is copied to microbatches; views do as parameters do."""
    mesh = Mesh.of(mb=4, x=2)
    costs = MoveCosts(cluster(2), mesh)
    for before, after in ((S(0), R), (S(0), C), (R, C), (R, S(0))):
        for each, size in product((R, C), (16, 1 << 12)):
            plain = TensorClass((size, size), "float32", True, stored=True, recomputed=True)
            state, move = (each, before), Move(1, before, after)
            alone = min(costs.move_s(replace(plain, zero=zero), state, move) for zero in ZEROS)
            together_s = costs.move_s(replace(plain, together=1e9), state, move)
            assert 0 < together_s <= alone, (before, after, each, size)
            if before == R:
                view = replace(plain, stored=False, view=True, together=1e9)
                assert costs.move_s(view, state, move) == together_s


def test_what_a_byte_takes_at_least() -> None:
    """In messages between two sizes: at one of these, or where a piece of the curve ends."""
    curve = Curve((CurvePiece(0.0, CostLine(1.0, 0.1)), CurvePiece(100.0, CostLine(8.0, 0.03))))
    for least, most in ((0.0, 1e6), (1.0, 50.0), (10.0, 100.0), (50.0, 150.0), (120.0, 1e3), (70.0, 70.0)):
        sizes = np.linspace(max(least, 1e-3), most, 1000)
        known = curve.least_s_per_byte(least, most)
        among = min(curve.time_s(size) / size for size in sizes)
        assert known <= among * (1 + 1e-12)
        assert known == pytest.approx(among, rel=2e-2)
    assert curve.least_s_per_byte(0.0, 0.0) == 0.0
