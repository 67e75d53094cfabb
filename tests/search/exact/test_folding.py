"""Repeated blocks: what is folded, and that a folded problem has the optimum of the whole one."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.choice import Split
from shardwright.pcg.graph import Graph, Source
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.again import made_again
from shardwright.pcg.step.execution import Execution
from shardwright.search.check import check_plan
from shardwright.search.exact.folding import Folded, fold
from shardwright.search.exact.solving import Solver, different, over_time, restriction
from shardwright.search.tree import ways
from shardwright.search.tree.planner import Planner
from tests.each import each
from tests.search.graphs import blocks, cluster, every_choice, mlp


def test_a_run_of_equal_blocks_is_its_first_one() -> None:
    graph = blocks(layers=6)
    folded = fold(graph)
    assert folded.repeats == {"layers.0": 6}
    assert len(folded.graph.validate().nodes) < len(graph.nodes) / 3
    assert {folded.times(n.name) for n in folded.graph.leaves("parameter")} == {1, 6}


def test_few_blocks_and_graphs_without_modules_stay() -> None:
    for graph in (blocks(layers=2), mlp(layers=6)):
        assert fold(graph).graph is graph
        assert fold(graph).repeats == {}


class Lists(nn.Module):
    """Lists of so many blocks, each list with a width of its own."""

    def __init__(self, *many: int) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        for width, number in enumerate(many, 2):
            own = (nn.Sequential(nn.Linear(8, 8 * width), nn.Linear(8 * width, 8)) for _ in range(number))
            self.add_module(f"of{width}", nn.ModuleList(own))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (block for own in list(self.children())[1:] for block in own):  # type: ignore[attr-defined]
            x = block(x)
        return x.square().mean()


def test_three_blocks_are_folded_beside_a_longer_run() -> None:
    """Alone, equal blocks of a few would be all that memory is decided by."""
    for many, expected in (((3, 5), [3, 5]), ((3, 3), []), ((3,), []), ((2, 5), [5])):
        assert list(fold(capture(Lists(*many), {"x": torch.randn(4, 8)}).graph).repeats.values()) == expected


def sharing(layers: int, *, trained: bool = True) -> Graph:
    """Blocks that add a constant; capture leaves it, and what it is made of, in the one that reads it first."""
    b = GraphBuilder()
    x, shift = b.leaf("x", "input", (8, 16), "float32", "x"), ""
    if trained:
        b.at("s", Source("stem", "model.py:0"))
        x = b.op("linear", x, b.leaf("first", "parameter", (16, 16), "float32", "stem.weight", grad=True))
    for i in range(layers):
        w = b.leaf(f"w{i}", "parameter", (16, 16), "float32", f"layers.{i}.weight", grad=True)
        b.at("y", Source(f"layers.{i}", "model.py:1"))
        x = b.op("relu", b.op("linear", x, w))
        if i == 0:
            scale = b.op("full", dtype="float32", shape=(16,), value=0.5)
            shift = b.op("add", scale, scale)
        x = b.op("add", x, shift)
    b.at("l", Source("", "model.py:2"))
    return b.graph([("loss", b.op("sum", b.op("mul", x, x), dims=(0, 1), keepdim=False))])


def test_a_first_block_whose_input_has_no_gradient_stays() -> None:
    """It makes none for it, which takes less than what the others do."""
    graph = sharing(6, trained=False)
    folded, solver, mesh = fold(graph), Solver(cluster(2, link_bytes_per_s=1e8), every_choice), Mesh.of(x=2)
    assert folded.repeats == {"layers.1": 5}
    whole, few = (solver.solve(f, mesh, ("free",), "test") for f in (Folded(graph), folded))
    assert few.solved[1].objective == pytest.approx(whole.solved[1].objective, rel=1e-9)


def test_constants_that_several_blocks_read_lie_in_none() -> None:
    """So the first block is one of the run."""
    graph = sharing(6)
    folded = fold(graph)
    assert folded.repeats == {"layers.0": 6}
    constants = [n for n in folded.graph.validate().nodes if n.op == "full"]
    assert [(n.source.module, folded.times(n.name)) for n in constants] == [("", 1)]
    solver, mesh = Solver(cluster(2, link_bytes_per_s=1e8), every_choice), Mesh.of(x=2)
    whole, few = (solver.solve(f, mesh, ("free",), "test") for f in (Folded(graph), folded))
    assert few.solved[1].objective == pytest.approx(whole.solved[1].objective, rel=1e-9)
    assert few.prediction.step_s == pytest.approx(whole.prediction.step_s, rel=1e-2)
    again = solver.again_whole(graph, folded, few)
    assert len(list(again.graph.validate().leaves("parameter"))) == 7
    laid_out = solver.again_whole(graph, folded, few, judged=False)
    assert (laid_out.graph, laid_out.prediction) == (again.graph, few.prediction)
    assert not laid_out.folded


def test_blocks_whose_values_others_read_stay() -> None:
    graph = blocks(layers=6)
    middle = next(n.name for n in graph.nodes if n.source.module == "layers.2")
    assert fold(Graph(graph.nodes, (*graph.outputs, ("hidden", middle)))).repeats == {}


@each("roles", [("free",), ("data",), ("zero",), ("tensor",)])
@each("count", [1, 2])
@each("mode", ["none", "full"])
def test_a_folded_problem_has_the_optimum_of_the_whole(roles: tuple[str, ...], count: int, mode: str) -> None:
    graph, solver = blocks(8, layers=6), Solver(cluster(2, link_bytes_per_s=1e8), every_choice)
    mesh, execution = over_time(Mesh.of(x=2), count), Execution(recompute=mode)  # type: ignore[arg-type]
    objectives, steps = list[float](), list[float]()
    for folded in (Folded(graph), fold(graph)):
        problem, eliminator = solver.problem(folded, mesh, roles, execution, "zero-3")
        objectives.append(eliminator.solve(problem).objective)
        found = solver.solve(folded, mesh, roles, "test", execution)
        steps.append(found.prediction.step_s)
    assert objectives[1] == pytest.approx(objectives[0], rel=1e-9)
    assert steps[1] == pytest.approx(steps[0], rel=1e-3 if mode == "none" else 0.1)


@each("count", [1, 2, 4])
@each("mode", ["none", "full"])
@each("zero", ["zero-1", "zero-2", "zero-3"])
def test_the_prediction_of_a_way_to_run_is_the_objective(count: int, mode: str, zero: str) -> None:
    """Microbatches, what is made again, and how often parameters are gathered."""
    graph, solver = blocks(16, layers=2), Solver(cluster(2, link_bytes_per_s=1e8), every_choice)
    mesh, execution = over_time(Mesh.of(x=2), count), Execution(recompute=mode)  # type: ignore[arg-type]
    (own,) = different((zero,), mesh)  # type: ignore[arg-type]
    found = solver.solve(Folded(graph), mesh, ("zero",), "test", execution, (own,), own)
    assert found.prediction.serial_s == pytest.approx(found.bound_s, rel=0.03)
    again = predict(found.graph, solver.cluster, execution)
    assert again == found.prediction


def test_the_memory_of_folded_blocks_is_that_of_the_whole_in_every_category() -> None:
    """What a collective holds while it runs is not counted once more, or less, for every block."""
    graph, mesh = blocks(16, 64, layers=8, seq=16), Mesh.of(x=2)
    solver = Solver(cluster(2), every_choice)
    for role in ("data", "zero", "tensor"):
        few = solver.solve(fold(graph), mesh, (role,), role)
        memory = predict(few.graph, solver.cluster, repeats=fold(graph).repeats).memory
        whole = solver.again_whole(graph, fold(graph), few).prediction.memory
        found, expected = memory.by_category(), whole.by_category()
        for category in {**found, **expected}:
            error = abs(found.get(category, 0) - expected.get(category, 0))
            assert error <= 0.02 * whole.total_bytes, (role, category)
            assert found.get(category, 0) >= 0, (role, category)


def test_what_lies_in_a_block_is_made_again_up_to_what_backward_needs() -> None:
    graph = blocks(layers=2)
    again = made_again(graph, Execution(recompute="full"))
    twice = {graph.by_name[name].op for name in again.twice}
    assert twice == {"rms_norm", "linear", "relu"}
    assert len(again.twice) == 2 * 3  # not the second product, nor the sum
    assert made_again(graph, Execution()).twice == frozenset()


def test_time_may_only_cut_the_batch() -> None:
    graph = mlp()
    assert restriction(graph, ("free",), Mesh.of(x=2)) is None
    allowed = restriction(graph, ("free",), Mesh.of(mb=2, x=2))
    assert allowed is not None
    product = next(n for n in graph.nodes if n.op == "linear")
    assert [allowed(product, axis, Split("o")) for axis in (0, 1)] == [False, True]


def test_runs_that_follow_each_other_are_planned() -> None:
    """What the second one reads first is called as in the folded graph."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (32, 16), "float32", "x")
    for part in ("enc", "dec"):
        for i in range(5):  # the first one gives its input no gradient
            b.source = Source(f"{part}.{i}")
            w = b.leaf(f"{part}{i}", "parameter", (16, 16), "float32", f"{part}.{i}.w", grad=True)
            x = b.op("linear", b.op("tanh" if part == "enc" else "exp", x), w)
    b.source = Source()
    graph = b.graph([("loss", b.op("sum", b.op("mul", x, x), dims=(0, 1), keepdim=False))])
    folded = fold(graph)
    assert len(folded.repeated) == 2
    assert all(tie.before in folded.graph.by_name and tie.after in folded.graph.by_name for tie in folded.ties)
    check_plan(Planner(cluster(2), every_choice).plan(graph, mesh=Mesh.of(x=2)), graph, every_choice)


def towers(layers: int = 6) -> Graph:
    """Two runs of blocks that read the same."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (32, 16), "float32", "x")
    first = b.leaf("first", "parameter", (16, 16), "float32", "stem.weight", grad=True)
    b.at("s", Source("stem", "m.py:1"))
    stem, ends = b.op("linear", x, first), list[str]()
    for tower in ("a", "b"):
        y = stem
        for i in range(layers):
            w = b.leaf(f"{tower}{i}", "parameter", (16, 16), "float32", f"{tower}.{i}.weight", grad=True)
            b.at("n", Source(f"{tower}.{i}", "m.py:2"))
            y = b.op("add", y, b.op("relu", b.op("linear", y, w)))
        ends.append(y)
    b.at("l", Source("", "m.py:3"))
    return b.graph([("loss", b.op("sum", b.op("add", *ends), dims=(0, 1), keepdim=False))])


@each("role", ["free", "zero", "tensor"])
def test_runs_that_read_the_same_have_about_the_optimum_of_the_whole(role: str) -> None:
    """Both are laid out as what they read is: a little is lost where each could have it otherwise."""
    graph, solver = towers(), Solver(cluster(2, link_bytes_per_s=1e8), every_choice)
    assert fold(graph).repeats == {"a.0": 6, "b.0": 6}
    objectives = list[float]()
    for folded in (Folded(graph), fold(graph)):
        problem, eliminator = solver.problem(folded, Mesh.of(x=2), (role,), Execution(), "zero-3")
        objectives.append(eliminator.solve(problem).objective)
    assert objectives[0] * (1 - 1e-9) <= objectives[1] <= 1.05 * objectives[0]
    plan = Planner(solver.cluster, every_choice).plan(graph)
    check_plan(plan, graph, every_choice)


def test_what_does_not_fit_unfolded_is_solved_whole_if_that_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, solver = blocks(16, 64, layers=8, seq=16), Solver(cluster(2), every_choice)
    few = solver.solve(fold(graph), Mesh.of(x=2), ("free",), "test")
    whole = solver.again_whole(graph, fold(graph), few)
    small, asked = solver.within(whole.prediction.memory.total_bytes - 1), list[Folded]()

    def solve(folded: Folded, *rest: object, **options: object) -> object:
        asked.append(folded)
        return whole

    monkeypatch.setattr(small, "solve", solve)
    for most, number in ((len(graph.nodes), 1), (len(graph.nodes) - 1, 0)):
        monkeypatch.setattr("shardwright.search.exact.solving._MOST_NODES", most)
        asked.clear()
        assert small.again_whole(graph, fold(graph), few).graph == whole.graph
        assert len(asked) == number


@each("roles", [("free",), ("tensor",), ("free", "tensor"), ("tensor", "data")])
@each("width, seq", [(64, 8), (1024, 8), (1024, 64)])
def test_the_estimate_of_a_folded_graph_is_what_the_whole_one_takes(
    roles: tuple[str, ...], width: int, seq: int
) -> None:
    """What blocks hand on is moved for each of them, also where the first one reads another value, laid out alike."""
    graph, solver = blocks(8, width, layers=12, seq=seq), Solver(Cluster.preset("dgx-a100", 1), every_choice)
    mesh = Mesh.of(x=8) if len(roles) == 1 else Mesh.of(x=2, y=4)
    folded = fold(graph)
    few = solver.solve(folded, mesh, roles, "test")
    whole = solver.again_whole(graph, folded, few).prediction
    assert few.prediction.step_s == pytest.approx(whole.step_s, rel=5e-3)
    assert few.prediction.communication_bytes == pytest.approx(whole.communication_bytes)


# ---- kinds of blocks ----


WIDTHS = {"a": 32, "b": 16, "c": 48}
"""The hidden widths of kinds of blocks."""


def kinds(pattern: str, *, two: str = "") -> Graph:
    """Blocks of these kinds, one behind the other; those of `two` hand on a second value."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (32, 16), "float32", "x")
    b.at("s", Source("stem", "model.py:0"))
    x = y = b.op("linear", x, b.leaf("first", "parameter", (16, 16), "float32", "stem.weight", grad=True))
    for i, kind in enumerate(pattern):
        sizes = ((WIDTHS[kind], 16), (16, WIDTHS[kind]))
        up, down = (
            b.leaf(f"{side}{i}", "parameter", size, "float32", f"layers.{i}.{side}", grad=True)
            for side, size in zip(("up", "down"), sizes, strict=True)
        )
        b.at("y", Source(f"layers.{i}", "model.py:1"))
        x = b.op("add", x, b.op("linear", b.op("relu", b.op("linear", b.op("tanh", x), up)), down))
        if two:
            x, y = (x, b.op("add", x, y)) if kind in two else (b.op("mul", x, y), x)
    b.at("l", Source("", "model.py:2"))
    return b.graph([("loss", b.op("sum", b.op("mul", x, y), dims=(0, 1), keepdim=False))])


@each(
    "pattern, expected, is_mixed",
    [
        ("abababab", {"layers.0": 4, "layers.1": 4}, True),
        ("aaabaaabaaabaaab", {"layers.0": 12, "layers.3": 4}, True),
        ("aaaabbb", {"layers.0": 4, "layers.4": 3}, False),
        ("aabbaabbaabb", {"layers.0": 6, "layers.2": 6}, True),
        ("abababababa", {"layers.0": 5, "layers.1": 5, "layers.10": 1}, True),
        ("ababcb" * 4, {"layers.0": 8, "layers.3": 4, "layers.4": 4, "layers.5": 8}, True),
        ("abcc" * 3 + "ab", {"layers.0": 1, "layers.1": 3, "layers.2": 6, "layers.4": 3, "layers.13": 1}, True),
        ("aaaacaaaa", {"layers.0": 4, "layers.5": 4}, False),
        ("abcabc", {}, False),
        ("bbbbaca", {"layers.0": 4}, False),
    ],
)
def test_blocks_are_folded_by_kind(pattern: str, expected: dict[str, int], is_mixed: bool) -> None:
    graph = kinds(pattern)
    folded = fold(graph)
    assert (folded.repeats, folded.is_mixed) == (expected, is_mixed)
    assert (len(folded.graph.validate().nodes) < len(graph.nodes)) == bool(expected)
    assert {leaf.name for leaf in graph.leaves("parameter")} == {
        *folded.alike, *(leaf.name for leaf in folded.graph.leaves("parameter"))
    }  # fmt: skip


@each("pattern", ["abababab", "aaabaaabaaabaaab", "aabbaabbaabb", "abababababa", "abccabccabccab"])
@each("two", ["", "b"])
@each("roles", [("free",), ("zero",), ("tensor",)])
def test_a_problem_of_kinds_is_the_whole_one_with_blocks_of_a_kind_laid_out_alike(
    pattern: str, two: str, roles: tuple[str, ...]
) -> None:
    """So it has no lower optimum; and its solution, given to all blocks, costs as much on the whole graph."""
    graph, solver, mesh = kinds(pattern, two=two), Solver(cluster(2, link_bytes_per_s=1e8), every_choice), Mesh.of(x=2)
    folded = fold(graph)
    assert folded.repeated
    whole, few = (solver.solve(f, mesh, roles, "test") for f in (Folded(graph), folded))
    assert few.solved[1].objective >= whole.solved[1].objective * (1 - 1e-9)
    assert few.solved[1].objective == pytest.approx(whole.solved[1].objective, rel=1e-2)
    again = solver.again_whole(graph, folded, few)
    assert again.prediction.step_s == pytest.approx(few.prediction.step_s, rel=2e-2)
    assert again.prediction.step_s <= whole.prediction.step_s * 1.01
    check = {leaf.name: leaf for leaf in again.graph.leaves("parameter")}
    for name, stands in folded.alike.items():
        assert check[name].attr("layouts") == check[stands].attr("layouts")


@each("stages", [1, 2])
@each("pattern", ["abababab", "aaabaaabaaab"])
def test_a_plan_of_kinds_is_as_good_as_one_of_all_blocks(pattern: str, stages: int) -> None:
    graph = kinds(pattern)
    planned = list[float]()
    for folding in (fold, Folded):
        with mock.patch.object(ways, "fold", folding):
            plan = Planner(cluster(4, link_bytes_per_s=1e8), every_choice).plan(graph, stages=stages)
            check_plan(plan, graph, every_choice)
            planned.append(plan.prediction.step_s)
    assert planned[0] <= planned[1] * 1.01
