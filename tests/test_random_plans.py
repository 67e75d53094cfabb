"""Plans that no search would choose: the best under a random part of the certified choices, on real ranks.

The layouts that optimal plans use are a small corner of what is certified. Here every node may use a random subset of
its choices, so that unusual splits, moves and storage meet; the program must train like one process all the same.
"""

from __future__ import annotations

import pytest

from bench.accuracy import measure, prepare
from bench.plans import RandomSubset, fast_links
from bench.random_plans import Pair
from examples.zoo import ZOO
from shardwright.pcg.mesh import Mesh
from shardwright.search.request.restrict import DATA, FREE
from shardwright.search.tree.planner import Planner
from tests.each import each, some
from tests.models import grid

GRID = Mesh.of(x=2, y=2)
SUBSETS = [(0, 0.2), (1, 0.4), (2, 0.7)]
"""A seed, and the share of the choices that is kept."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "subset"), grid(SUBSETS, each=1, names=some(ZOO, 3)))
def test_any_mixture_of_layouts_trains_like_one_process(name: str, subset: tuple[int, float]) -> None:
    prepared = prepare(name)
    planner = Planner(fast_links(4), RandomSubset(*subset))
    found = planner.solve(prepared.captured.graph, GRID, (FREE, FREE), "random")
    errors = measure(prepared, found.graph)
    assert errors.within_tolerance, errors


def test_masks_do_not_depend_on_how_a_rank_stores_its_part() -> None:
    """Gathering leaves some tensors permuted in memory; dropout once drew in that order (gpt, seed 3, four ranks)."""
    prepared = prepare("gpt")
    mesh = Mesh.of(x=4)
    found = Planner(fast_links(4), RandomSubset(3, 0.2)).solve(prepared.captured.graph, mesh, (FREE,), "random")
    errors = measure(prepared, found.graph)
    assert errors.within_tolerance, errors


def test_a_role_whose_factor_is_not_certified_leaves_the_operator_whole() -> None:
    graph = prepare("mlp").captured.graph
    found = Planner(fast_links(2), RandomSubset(0, 0.0)).solve(graph, Mesh.of(dp=2), (DATA,), "data")
    assert {choice for node in found.graph.nodes for choice in node.split} == {"R"}


@each("number", some([2003, 1001], 1))
def test_random_lifetimes_and_recomputation_train_like_one_process(number: int) -> None:
    errors = Pair.drawn(number, ("mlp", "gpt")).run()
    assert errors.within_double, errors
