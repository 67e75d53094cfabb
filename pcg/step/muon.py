"""Muon's update as the ranks of a stage share it out: each matrix is orthogonalized whole, on one rank, its owner.

    parts ──all-to-all──▶ whole matrices on their owners ──Newton-Schulz──▶ all-to-all ──▶ parts

Programs and prices choose owners by the same function. Jordan et al., "Muon: an optimizer for hidden layers in neural
networks" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from math import prod
from typing import NamedTuple

from shardwright.pcg.graph import Graph
from shardwright.pcg.moves import source_of

NUM_ITERATIONS = 5
"""The steps of the Newton-Schulz iteration, which is computed in bfloat16, as torch has them by default."""
_TABLES = ("embedding", "embedding_bag")


class Product(NamedTuple):
    """A product [m, k] · [k, n] of an iteration."""

    m: int
    n: int
    k: int


def products(shape: Sequence[int]) -> tuple[Product, ...]:
    """Return the products of one iteration of X, which has fewer rows than columns: A = X Xᵀ, then A A, then A X."""
    rows, columns = sorted(shape)
    return Product(rows, rows, columns), Product(rows, rows, rows), Product(rows, columns, rows)


def owners_of(shapes: Sequence[Sequence[int]], num_ranks: int) -> tuple[int, ...]:
    """Return the owner of each matrix: the largest first, each to the rank with the least work so far."""
    return _owners_of(tuple(map(tuple, shapes)), num_ranks)


@lru_cache(maxsize=256)
def _owners_of(shapes: tuple[tuple[int, ...], ...], num_ranks: int) -> tuple[int, ...]:
    work = [sum(map(prod, products(shape))) for shape in shapes]
    loads, owners = [(0, rank) for rank in range(num_ranks)], [0] * len(shapes)
    heapify(loads)
    for number in sorted(range(len(shapes)), key=lambda number: (-work[number], number)):
        load, owners[number] = loads[0]
        heapreplace(loads, (load + work[number], owners[number]))
    return tuple(owners)


class Exchanged(NamedTuple):
    """The elements that the busiest rank sends to others or receives from them: on the way to owners, and back."""

    gathered: int
    returned: int

    @classmethod
    def among(cls, matrices: Sequence[tuple[int, int, int]], num_ranks: int) -> Exchanged:
        """`matrices`: the elements of each whole one and of a rank's part of it, and its owner.

        On the way there each part comes from one rank, which has it; on the way back every rank gets its part.
        """
        arriving, owned = [0] * num_ranks, [0] * num_ranks
        for whole, part, owner in matrices:
            arriving[owner] += whole - part
            owned[owner] += part
        parts = sum(part for _, part, _ in matrices)
        busiest = max(max(parts - owned_part, (num_ranks - 1) * owned_part) for owned_part in owned)
        return cls(max(arriving), busiest)


@lru_cache(maxsize=256)
def hidden_matrices(graph: Graph) -> frozenset[str]:
    """Return the leaves of the trained matrices that Muon is for: of no table of embeddings, and of no head.

    The head is what makes the logits of a cross entropy.
    """
    kinds = {leaf.name: graph.types[leaf.name] for leaf in graph.leaves("parameter") if not leaf.is_complex}
    matrices = {name for name, kind in kinds.items() if kind.grad and len(kind.shape) == 2}
    tables = {source_of(graph, node.inputs[0]).name for node in graph.nodes if node.op in _TABLES}
    logits = [node.inputs[0] for node in graph.nodes if node.op == "cross_entropy_sum"]
    return frozenset(matrices - tables - _heads(graph, logits))


def _heads(graph: Graph, logits: Sequence[str]) -> set[str]:
    """Return the parameters of the products that values come from, without another product between."""
    heads, seen, todo = set[str](), set[str](), list(logits)
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        node = graph.by_name[name]
        if node.row is not None and node.row.contraction:
            heads.update(source_of(graph, read).name for read in node.inputs)
        else:
            todo.extend(node.inputs)
    return heads
