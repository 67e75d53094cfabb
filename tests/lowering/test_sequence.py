"""Sequence parallelism on ranks, in fp64: heads and sequence exchanged, keys and values gathered, norms on slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from bench.decoders import Decoder, decoder
from bench.plans import CERTIFIED, fast_links
from examples.zoo import ZOO
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.moves import fused_moves
from shardwright.search.check import check_plan
from shardwright.search.tree.planner import Planner
from tests.each import some
from tests.lowering.runs import Batch, Case, Step, assert_same_step, parallel_step, run_all, serial_step

Way = tuple[dict[str, int], tuple[str, ...]]
ULYSSES: Way = {"sp": 2}, ("ulysses",)
CONTEXT: Way = {"cp": 4}, ("context",)
BOTH: Way = {"cp": 2, "sp": 2}, ("context", "ulysses")
RING: Way = {"cp": 4}, ("ring",)
RING_OF_HEADS: Way = {"cp": 2, "sp": 2}, ("ring", "ulysses")
GROUPED = Decoder("llama", 1, 32, 4, 2, 48, 80)
"""Four query heads share two key heads; attention is causal by itself."""


@contextmanager
def in_fp64() -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def case(name: str, batch: int, seq: int) -> Case:
    torch.manual_seed(0)
    with in_fp64():
        model, inputs = grouped(batch, seq) if name == "grouped" else ZOO[name]()
        return Case(model.double(), {k: v[:batch, :seq].contiguous() for k, v in inputs.items()})


def grouped(batch: int, seq: int) -> tuple[nn.Module, Batch]:
    ids = torch.randint(80, (batch, seq))
    return decoder(GROUPED, seq), {"ids": ids, "labels": ids.clone()}


def planned(own: Case, way: Way) -> Graph:
    axes, roles = way
    mesh = Mesh.of(**axes)
    planner = Planner(fast_links(mesh.num_devices), CERTIFIED)
    plan = planner.plan(own.captured.graph, mesh=mesh, roles=roles, recompute="none", microbatches=1, compared=False)
    check_plan(plan, own.captured.graph, CERTIFIED)
    return plan.graph


def splits(graph: Graph) -> set[tuple[str, ...]]:
    """Of attention."""
    return {n.split for n in graph.nodes if n.op in ("sdpa", "softmax")}


CELLS: list[tuple[str, int, int, Way, tuple[str, ...], int]] = [
    ("gpt", 2, 12, BOTH, ("d2", "d1"), 8),  # dropout of probabilities; queries, keys, values, results of 2 blocks
    ("llama", 1, 12, BOTH, ("q", "h"), 8),  # a causal mask, rotary positions, one example
    ("grouped", 2, 12, ULYSSES, ("h",), 4),
    ("grouped", 1, 12, CONTEXT, ("q",), 0),  # each has the keys up to its last query
    ("grouped", 1, 12, BOTH, ("q", "h"), 4),
    ("grouped", 1, 11, ULYSSES, ("r",), 0),  # heads divide, positions do not
    ("grouped", 1, 12, RING, ("q@k/3",), 0),  # keys and values travel; each has every fourth position
    ("grouped", 2, 12, RING_OF_HEADS, ("q@k", "h"), 4),
]
"""A model, its batch and sequence, the way, how attention is split, and how often ranks exchange parts."""


def test_ranks_take_the_step_of_one_process() -> None:
    cells = some(CELLS, 5)
    cases = [case(name, batch, seq) for name, batch, seq, *_ in cells]
    jobs = list[tuple[int, Callable[[], Step]]]()
    for own, cell in zip(cases, cells, strict=True):
        *_, seq, way, attention, exchanges = cell
        graph = planned(own, way)
        kinds = Counter(move.kind.function for _, _, move in fused_moves(graph))
        assert splits(graph) == {attention}, cell
        assert kinds["all_to_all"] == exchanges, cell
        norms = {
            str(graph.types[n.name].layouts[-1]) for n in graph.nodes if n.op in ("layer_norm", "rms_norm", "rsqrt")
        }
        assert norms == ({"S(1,3)" if way == RING else "S(1)"} if seq == 12 else {"R"}), cell
        jobs.append((graph.mesh.num_devices, partial(stepped, own, graph)))
    for own, cell, steps in zip(cases, cells, run_all(jobs), strict=True):
        for step in steps:  # llama's norms are in fp32
            assert_same_step(step, serial_step(own), 1e-5 if cell[0] == "llama" else 1e-11, str(cell))


def stepped(own: Case, graph: Graph) -> Step:
    return parallel_step(own.lower(graph), own.batch)
