"""Moves between layouts on forked ranks: each is what the table says, and costs what was priced.

A path of moves is taken as the search prices it, put into a graph, and written as the lowering writes it. The lines run
on gloo ranks: values and gradients are those of the whole tensors, and the collectives that torch is asked for, with
the bytes that they send, are those of the cost model.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.local import default_cluster
from shardwright.cost.collectives.moves import MoveCosts, TensorClass
from shardwright.cost.predict import node_costs
from shardwright.cost.timeline.steps import Steps
from shardwright.lowering.ranks.launch import connect, run_ranks
from shardwright.lowering.runtime import collectives
from shardwright.lowering.text.expressions import Expressions
from shardwright.lowering.text.pieces import identifiers
from shardwright.pcg.attrs import Attr
from shardwright.pcg.graph import Graph, Node, make_attrs
from shardwright.pcg.interpret import denote, scatter
from shardwright.pcg.layout import C, Layout, Layouts, P, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.moves import MOVES, Move, fused_moves, move_between, steps_of
from shardwright.pcg.offers import parse_choices
from shardwright.pcg.step.execution import DEFAULT
from shardwright.pcg.types import TensorType
from shardwright.search.choices.reshard import Closure, close, valid_states

SHAPE = (16, 288, 8)
FACTORS = {0: "_0", 1: "_1", 2: "o"}
Path = tuple[Layouts, Sequence[Move]]

FREE = [R, C, P, S(0), S(0, 2), S(0, 4), S(0, 8), S(1), S(1, 3), S(1, 6), S(2)]


def graph_of(mesh: Mesh, start: Layouts, moves: Sequence[Move]) -> Graph:
    """x wᵀ in the layouts of `start`, and the parallel operators of the moves."""
    names = [FACTORS.get(x.dim, "") + (f"/{x.blocks}" if x.blocks > 1 else "") for x in start]
    split = tuple({"P": "i", "S": name}.get(x.kind, x.kind) for x, name in zip(start, names, strict=True))
    operands = [
        tuple(S(2) if x == P else x if x.is_shard and x.dim < 2 else R for x in start),
        tuple(S(1) if x == P else S(0, x.blocks) if x.is_shard and x.dim == 2 else R for x in start),
    ]
    nodes: list[Node] = []
    for name, shape, layouts in zip("xw", ((*SHAPE[:2], 32), (SHAPE[2], 32)), operands, strict=True):
        kinds = tuple(map(str, layouts))
        attrs = make_attrs(dtype="float64", grad=True, layouts=kinds, shape=shape, target=name)
        nodes.append(Node(name, "parameter", (), attrs, ()))
        for axis, layout in enumerate(layouts):
            if layout == R and start[axis] != R:
                nodes.append(_step(nodes[-1], "replicate", make_attrs(axis=mesh.names[axis])))
    read = {node.name.partition(".")[0]: node.name for node in nodes}
    nodes.append(Node("y", "linear", (read["x"], read["w"]), (), parse_choices(split)))
    for op, attrs in itertools.chain.from_iterable(steps_of(moves, mesh)):
        nodes.append(_step(nodes[-1], op, attrs))
    graph = Graph(tuple(nodes), (("y", nodes[-1].name),), mesh)
    assert graph.types["y"].layouts == start
    return graph


def _step(before: Node, op: str, attrs: tuple[tuple[str, Attr], ...]) -> Node:
    return Node(f"{before.name}.{op}_{dict(attrs)['axis']}", op, (before.name,), attrs, ())


def moved(graph: Graph) -> list[tuple[Node, Move]]:
    """The moves of y, the first one first."""
    return [(node, move) for node, _, move in fused_moves(graph) if node.name.startswith("y.")][::-1]


def lines(graph: Graph) -> list[tuple[str, str]]:
    """The names and expressions of the lines that move y."""
    code, names = Expressions(graph, {}, (), {}), identifiers([n.name for n in graph.nodes], graph.mesh.names)
    return [(names[n.name], code.of(n, names)) for n in code.written if n.name.startswith("y.")]


# ---- on ranks ----


class Calls:
    """What torch is asked for: the collective, and the bytes that this rank sends by the algorithm on a switch."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.sent_bytes = 0.0

    @contextmanager
    def counted(self) -> Generator[None]:
        shares: dict[str, Callable[[int], float]] = {
            "all_reduce": lambda n: 2 * (n - 1) / n,
            "all_gather_single": lambda n: n - 1,
            "all_to_all_single": lambda n: (n - 1) / n,
        }
        with ExitStack() as stack:
            for name, share in shares.items():
                stack.enter_context(mock.patch.object(dist, name, self._counting(name, share)))
            yield

    def _counting(self, name: str, share: Callable[[int], float]) -> Callable[..., Any]:
        real = getattr(dist, name)

        def call(*tensors: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
            self.made.append(name.removesuffix("_single"))
            self.sent_bytes += share(dist.get_world_size(group)) * tensors[-1].nbytes
            real(*tensors, group=group, async_op=async_op)

        return call


def run_path(mesh: Mesh, rank: int, axes: Sequence[Any], path: Path, seed: int) -> tuple[Any, ...]:
    """The value after the moves, the gradient before them, and the calls of forward and of backward."""
    start, moves = path
    graph = graph_of(mesh, start, moves)
    value, gradient = whole(seed), whole(seed + 1)
    duals = tuple(x.dual for x in graph.types[graph.nodes[-1].name].layouts)
    x = torch.tensor(scatter(value, start, mesh, seed)[rank], requires_grad=True)
    made: dict[str, Any] = {"y": x * 1, **dict(zip(mesh.names, axes, strict=True))}
    forward, backward = Calls(), Calls()
    with forward.counted():
        last = "y"
        for last, text in lines(graph):
            made[last] = eval(text, vars(collectives) | made)
    with backward.counted():
        made[last].backward(torch.tensor(scatter(gradient, duals, mesh, seed)[rank]))
    assert x.grad is not None
    return made[last].detach().numpy(), x.grad.numpy(), forward, backward


def whole(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(SHAPE)


def on_gloo(name: str) -> str:
    """What the runtime makes a collective of."""
    return "all_to_all" if name == "reduce_scatter" else name


def check_paths(mesh: Mesh, paths: Sequence[Path]) -> None:
    """Run all paths on ranks of the mesh; each does what it should, and no more than was priced."""

    def body() -> list[tuple[Any, ...]]:
        axes = connect(mesh, 30).axes
        return [run_path(mesh, dist.get_rank(), axes, path, seed) for seed, path in enumerate(paths)]

    by_rank = run_ranks(body, mesh.num_devices, 30)
    cluster = default_cluster(mesh.num_devices)
    for seed, (path, found) in enumerate(zip(paths, zip(*by_rank, strict=True), strict=True)):
        start, moves = path
        graph, where = graph_of(mesh, start, moves), f"{start} {moves}"
        assert [move for _, move in moved(graph)] == list(moves), where
        assert [re.match(r"\w+", text)[0] for _, text in lines(graph)] == [m.kind.function for m in moves], where  # type: ignore[index]
        values, gradients, forwards, backwards = zip(*found, strict=True)
        end = graph.types[graph.nodes[-1].name]
        before = TensorType(SHAPE, "float64", tuple(x.dual for x in start), False)
        np.testing.assert_allclose(denote(values, end, mesh), whole(seed), atol=1e-12, err_msg=where)
        np.testing.assert_allclose(denote(gradients, before, mesh), whole(seed + 1), atol=1e-12, err_msg=where)
        priced = [node_costs(Steps(graph, cluster, DEFAULT))[node.name] for node, _ in moved(graph)]
        for i, side in enumerate((forwards, backwards)):
            names = [on_gloo(cost.collectives[i]) for cost in priced]
            expected = [name for name in (names, names[::-1])[i] if name not in ("", "slice")]
            assert all(calls.made == expected for calls in side), where
        for forward, backward in zip(forwards, backwards, strict=True):
            sent = sum(cost.communication_bytes for cost in priced)
            assert forward.sent_bytes + backward.sent_bytes == pytest.approx(sent), where


# ---- every move ----


def one_axis_moves(size: int) -> list[Path]:
    """Every move of one axis between some layouts."""
    states = valid_states(SHAPE, [FREE], (size,))
    pairs = [(x, y, move_between(x, y, 0, (size,))) for x, y in itertools.permutations(states, 2)]
    return [(x, [move]) for x, _, move in pairs if move is not None]


@pytest.mark.parametrize("size", [2, 4])
def test_every_move_of_the_table_does_and_sends_what_was_priced(size: int) -> None:
    paths = one_axis_moves(size)
    assert {(x[0].kind, moves[0].after.kind) for x, moves in paths} == set(MOVES)
    check_paths(Mesh.of(a=size), paths)


REBLOCKED = [
    (2, 1, 2),
    (2, 1, 4),
    (2, 2, 4),
    (2, 2, 8),
    (2, 3, 6),
    (3, 1, 3),
    (3, 2, 6),
    (4, 1, 4),
    (4, 1, 8),
    (4, 3, 12),
]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_other_blocks_of_one_dimension_are_one_exchange(size: int) -> None:
    pairs = [(S(1, m), S(1, n)) for k, m, n in REBLOCKED if k == size]
    paths = [((x,), [Move(0, x, y)]) for pair in pairs for x, y in (pair, pair[::-1])]
    assert all(move_between(x, (moves[0].after,), 0, (size,)) == moves[0] for x, moves in paths)
    check_paths(Mesh.of(a=size), paths)


@pytest.mark.parametrize(
    ("outer", "old", "new"), [(S(1), S(1, 2), S(1, 4)), (S(1, 3), S(1, 6), S(1, 12)), (S(0), S(1), S(1, 2))]
)
def test_inside_another_shard_blocks_are_counted_in_what_it_leaves(outer: Layout, old: Layout, new: Layout) -> None:
    paths = [((outer, x), [Move(1, x, y)]) for x, y in ((old, new), (new, old))]
    check_paths(Mesh.of(a=2, b=2), paths)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((S(0),), (S(0, 2),)),  # of 4 ranks: two messages for each rank, and none for the others
        ((S(0, 2),), (S(0, 3),)),
        ((S(0), S(0)), (S(0, 2), S(0))),  # the axis is not the innermost one
        ((C,), (R,)),
        ((R,), (P,)),
    ],
)  # fmt: skip
def test_what_is_no_single_move(before: Layouts, after: Layouts) -> None:
    sizes = (4,) if len(before) == 1 else (2, 2)
    assert move_between(before, after, 0, sizes) is None


def test_blocks_that_do_not_divide_evenly_are_gathered_and_sliced() -> None:
    mesh, path = Mesh.of(a=2), [Move(0, S(1), R), Move(0, R, S(1, 3))]
    assert [text.split("(")[0] for _, text in lines(graph_of(mesh, (S(1),), path))] == ["combine", "partition"]
    check_paths(mesh, [((S(1),), path)])


# ---- paths ----


def random_paths(mesh: Mesh, count: int, seed: int, cluster: Cluster) -> Iterator[tuple[Closure, Layouts, Layouts]]:
    rng = random.Random(seed)
    costs = MoveCosts(cluster, mesh)
    while count:
        choices = [rng.sample(FREE, 5) for _ in mesh.names]
        states = valid_states(SHAPE, choices, mesh.sizes)
        closure = close(TensorClass(SHAPE, "float64", True), states, costs)
        for _ in range(4):
            start, end = rng.choice(states), rng.choice(states)
            if start != end and np.isfinite(closure.cost[closure.index[start], closure.index[end]]):
                count -= 1
                yield closure, start, end
            if not count:
                return


def slow_exchanges(num_devices: int) -> Cluster:
    """Where an all-gather and a slice take less than an all-to-all, and so on: what the lowering runs counts."""
    cluster = default_cluster(num_devices)
    lines = tuple(
        type(line)(line.collective, 2, 1e-2, 1e-8) if line.collective in ("all_to_all", "reduce_scatter") else line
        for line in cluster.collectives
    )
    return type(cluster)("slow", cluster.device, cluster.levels, "gloo", "test", lines)


@pytest.mark.parametrize("make", [default_cluster, slow_exchanges])
@pytest.mark.parametrize("sizes", [{"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 4}])
def test_the_path_that_was_priced_is_the_one_that_is_lowered(
    sizes: dict[str, int], make: Callable[[int], Cluster]
) -> None:
    mesh = Mesh.of(**sizes)
    for closure, start, end in random_paths(mesh, 60, 1, cluster := make(mesh.num_devices)):
        path = closure.path(start, end)
        graph = graph_of(mesh, start, path)
        assert [move for _, move in moved(graph)] == path
        table = node_costs(Steps(graph, cluster, DEFAULT))
        priced = closure.cost[closure.index[start], closure.index[end]]
        assert sum(table[node.name].communication_s for node, _ in moved(graph)) == pytest.approx(priced)


@pytest.mark.parametrize("sizes", [{"a": 4}, {"a": 2, "b": 2}])
def test_random_paths_do_and_send_what_was_priced(sizes: dict[str, int]) -> None:
    mesh = Mesh.of(**sizes)
    found = random_paths(mesh, 40, 2, slow_exchanges(mesh.num_devices))
    check_paths(mesh, [(start, closure.path(start, end)) for closure, start, end in found])
