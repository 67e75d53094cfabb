"""What is kept, value by value: the sums are those of the list of actions, and no choice has a smaller one."""

from __future__ import annotations

from functools import cache
from itertools import product
from math import inf

import numpy as np
import pytest

from bench.accuracy import prepare
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.actions import actions
from shardwright.pcg.step.chunk import whole_chunk
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS, lifetimes
from shardwright.pcg.step.places import places
from shardwright.search.exact.folding import Folded, fold
from shardwright.search.exact.keeping import Keeping, KeepingProblem, Solved, expanded
from shardwright.search.exact.solving import Solver, over_time
from shardwright.search.request.restrict import CONTEXT, TENSOR, ZERO
from tests.each import each
from tests.search.graphs import blocks, every_choice

CLUSTER = Cluster.preset("dgx-h100", nodes=1)
PRICES = (0.0, 1e-9, 1e-8, 1e-6)


@cache
def graph(name: str, role: str, microbatches: int = 1) -> Graph:
    """A model of the zoo on eight devices, or three blocks of a feed-forward net, laid out by the search."""
    serial = blocks(batch=16, width=32) if name == "blocks" else prepare(name).captured.graph
    mesh = over_time(Mesh.of(x=2), microbatches)
    return Solver(Cluster.preset("dgx-h100", nodes=1), every_choice).solve(Folded(serial), mesh, (role,), "test").graph


def problem(laid_out: Graph, *, values: bool = True, exposed: float = 1.0) -> KeepingProblem:
    return KeepingProblem(Steps(laid_out, CLUSTER, Execution()), {}, exposed, ZEROS, values=values)


def run(steps: Steps, keeping: Keeping) -> tuple[float, float, float]:
    """By the list of actions: seconds of what runs again, of views that a region ends before, bytes of what stays."""
    chunk = whole_chunk(Steps(steps.graph, CLUSTER, Execution(recompute=keeping.recompute)))  # type: ignore[arg-type]
    again, many = set(actions(chunk).of("again")), steps.graph.mesh.num_microbatches
    seen_from = places(steps.graph, {o.operation.name: o.operation.block for o in chunk.occurrences})
    where = [(o.operation.block, seen_from[o.operation.name]) for o in chunk.occurrences]
    of_again = {where[number] for number in again}
    # copies of a constant have one place and so one fate; the sum has those of them alone that backward needs
    left_out = [o for o, place in zip(chunk.occurrences, where, strict=True)
                if o.rerun is not None and o.number not in again and place not in of_again]  # fmt: skip
    assert all(o.result in o.reads for o in left_out)
    seconds = (sum(steps.costs[chunk.occurrences[n].operation.name].forward_s for n in again),
               sum(steps.costs[o.operation.name].forward_s for o in left_out))  # fmt: skip
    made = {memory for o in chunk.occurrences for memory in (o.result, *o.keeps)}
    stored = sum(m.num_bytes for m in chunk.allocations if m.fate.is_stored and m in made)
    return many * seconds[0], many * seconds[1], stored


@pytest.mark.slow
@each(
    ("name", "role", "microbatches"),
    [("blocks", ZERO, 1), ("gpt", ZERO, 2), ("gpt", CONTEXT, 1), ("t5", TENSOR, 1), ("resnext", ZERO, 1)],
)  # fmt: skip
def test_sums_are_those_of_the_list_of_actions(name: str, role: str, microbatches: int) -> None:
    """Of what the elimination says is made again, neither more nor less runs again, at any price of a byte."""
    found = problem(graph(name, role, microbatches))
    weights = KeepingProblem(found.steps, {}, 1.0, ZEROS, values=False)
    before = (-1.0, inf)
    for price in PRICES:
        kept, own = found.solve(price), weights.solve(price)
        seconds, num_bytes = kept.seconds - own.seconds, kept.num_bytes - own.num_bytes
        again_s, views_s, stays = run(found.steps, kept.keeping)
        assert (again_s + views_s, stays) == pytest.approx((seconds, num_bytes), rel=1e-9, abs=1e-12)
        assert seconds >= before[0] - 1e-12
        assert num_bytes <= before[1] + 1e-6
        before = seconds, num_bytes
    assert before[0] > 0  # at the highest price something is made again


def test_no_choice_has_a_smaller_sum() -> None:
    """Against every choice of one block, by brute force."""
    found = problem(Solver(CLUSTER, every_choice).solve(
        Folded(blocks(batch=16, width=32, layers=1)), Mesh.of(x=2), (ZERO,), "test").graph)  # fmt: skip
    p = found.problem
    able = (np.flatnonzero(np.isfinite(own.value)) for own in p.time_s)
    choices = np.array(list(product(*able))).T
    tables = [own.value[choices[v]] for v, own in enumerate(p.time_s)]
    tables += [table.value[choices[i], choices[j]] for (i, j), table in p.edges.items()]
    seconds = np.sum(tables, axis=0)
    num_bytes = np.sum([own.value[choices[v]] for v, own in enumerate(p.kept_bytes)], axis=0)
    for price in PRICES:
        best = float((seconds + price * num_bytes).min())
        kept = found.solve(price)
        assert kept.seconds + price * kept.num_bytes == pytest.approx(best, rel=1e-9)


def test_weights_stay_for_less_time_as_bytes_cost_more() -> None:
    """By group of parameters; what nobody has to wait for is not worth a byte."""
    found = problem(graph("gpt", ZERO, 2), values=False)
    sums = [found.solve(price) for price in PRICES]
    assert set(sums[0].keeping.lifetimes.values()) == {"zero-1"}
    assert set(sums[-1].keeping.lifetimes.values()) == {"zero-3"}
    assert any(len(set(kept.keeping.lifetimes.values())) > 1 for kept in sums)
    assert sums[0].keeping.lifetimes.keys() == lifetimes(graph("gpt", ZERO, 2)).keys()
    hidden = problem(graph("gpt", ZERO, 2), values=False, exposed=0.0).solve(1e-12)
    assert set(hidden.keeping.lifetimes.values()) == {"zero-3"}


def test_neighbours_of_which_the_same_is_made_again_are_one_pattern() -> None:
    again = {
        "": ("head:linear",),
        "h.0": ("mlp",),
        "h.1": ("mlp",),
        "h.2": ("mlp", "attn"),
        "h.3": ("mlp", "attn"),
        "h.5": ("mlp",),
    }
    assert Keeping(again).recompute == (
        ("", ("head:linear",)), ("h.0-1", ("mlp",)), ("h.2-3", ("mlp", "attn")), ("h.5", ("mlp",)),
    )  # fmt: skip
    assert Keeping({"h.0": ()}).recompute == "none"


def test_a_mixture_takes_some_blocks_from_another() -> None:
    own = Keeping({"": ("a",), "h.0": ("a",), "h.1": ("a",)}, {"p0": "zero-3", "p1": "zero-3"})
    other = Keeping({"h.1": ("b",)}, {"p0": "zero-1", "p1": "zero-1"})
    mixed = own.mixed(other, frozenset({"h.1"}), {"p0": "h.0", "p1": "h.1"})
    assert mixed == Keeping({"": ("a",), "h.0": ("a",), "h.1": ("b",)}, {"p0": "zero-3", "p1": "zero-1"})


def test_what_is_said_of_a_folded_model_is_said_of_all_of_it() -> None:
    folded = fold(blocks(layers=6))
    (run_,) = folded.repeated
    assert run_.blocks == tuple(f"layers.{n}" for n in range(6))
    said = Keeping({"layers.0": ("mlp",)}, {"up0": "kept", "table": "zero-3"})
    found = expanded(said, {run_.block: run_.blocks}, folded.alike)
    assert found.again == {f"layers.{n}": ("mlp",) for n in range(6)}
    assert found.lifetimes == {"table": "zero-3", **{f"up{n}": "kept" for n in range(6)}}


def test_what_leaves_a_block_is_not_made_again() -> None:
    found = problem(graph("gpt", ZERO, 2))
    again, chunk = found.solve(PRICES[-1]).keeping.again, found.chunk
    where = places(found.graph, {o.operation.name: o.operation.block for o in chunk.occurrences})
    home = {o.result: o.operation.block for o in chunk.occurrences}
    left = {memory for o in chunk.occurrences for memory in o.reads if home.get(memory, "") != o.operation.block}
    made = {o.result for o in chunk.occurrences if where[o.operation.name] in again.get(o.operation.block, ())}
    assert made
    assert left
    assert not made & left


@each("microbatches", [1, 2])
def test_a_folded_model_has_the_sums_of_the_whole(microbatches: int) -> None:
    """Values and weights of a block count as often as it occurs."""
    serial, mesh = blocks(batch=16, width=32, layers=6), over_time(Mesh.of(x=2), microbatches)
    folded, solver = fold(serial), Solver(CLUSTER, every_choice)
    one, whole = (
        KeepingProblem(Steps(solver.solve(f, mesh, (ZERO,), "test").graph, CLUSTER, Execution()), f.repeats, 1.0, ZEROS,
                       values=True) for f in (folded, Folded(serial))
    )  # fmt: skip
    for price in PRICES:
        few, all_ = one.solve(price), whole.solve(price)
        assert (few.seconds, few.num_bytes) == pytest.approx((all_.seconds, all_.num_bytes), rel=1e-9)
        said = expanded(few.keeping, {r.block: r.blocks for r in folded.repeated}, folded.alike)
        assert said.recompute == all_.keeping.recompute
        assert said.lifetimes == all_.keeping.lifetimes


def test_a_kept_solution_says_what_it_sums() -> None:
    kept: Solved = problem(graph("blocks", ZERO)).solve(0.0)
    assert kept.keeping.recompute == "none"
    assert kept.seconds > 0


def test_what_waits_on_the_host_is_said_mixed_and_unfolded_as_what_is_made_again_is() -> None:
    own, other = Keeping({"h.0": ("a",)}, {}, {"h.0": ("b",), "h.1": ("b",)}), Keeping({}, {}, {"h.1": ("c",)})
    assert own.offload == (("h.0-1", ("b",)),)
    assert other.recompute == "none"
    mixed = own.mixed(other, frozenset({"h.1"}), {})
    assert mixed == Keeping({"h.0": ("a",)}, {}, {"h.0": ("b",), "h.1": ("c",)})
    assert expanded(own, {"h.0": ("h.0", "h.2")}, {}).away == {"h.0": ("b",), "h.2": ("b",), "h.1": ("b",)}
