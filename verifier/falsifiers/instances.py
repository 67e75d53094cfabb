"""Instances of equations: the sizes, attributes and numbers that a rule leaves open.

Sizes satisfy the guard; attributes are drawn by their types (`substitutions/rules/attributes.py`), optional ones with
and without a value.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any

import numpy as np

from shardwright.pcg.errors import RuleError
from shardwright.pcg.graph import Graph, Node, leaf
from shardwright.pcg.interpret import Array
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import PARALLEL_OPS
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.match import Match, replacement
from shardwright.substitutions.rules.attributes import values
from shardwright.substitutions.terms import Term, Variable, applied, subterms
from shardwright.verifier.falsifiers.mismatch import ERRORS

SIZES = (2, 3, 4, 5, 6, 7)
ONES_SHARE = 0.2
"""The share of instances that may have sizes of 1, which broadcast."""
RANKS = (0, 1, 2, 3)
DEGREES = (1, 2, 3)
ATTEMPTS, MAX_ELEMENTS = 4000, 200_000
IGNORED_SHARE = 0.25
"""The share of a loss's targets that are ignored."""


def instances(rule: Equation, rng: random.Random, count: int) -> Iterator[tuple[Graph, Match]]:
    """Yield a few instances of the left side at random small sizes, with the match of its roots."""
    matched = (made for _ in range(ATTEMPTS) if (made := instance(rule, rng)) is not None)
    yield from islice(matched, count)


def instance(rule: Equation, rng: random.Random) -> tuple[Graph, Match] | None:
    """Return the left side as a graph at random sizes, with the match of its roots; None if the sizes do not fit."""
    try:
        sizes = drawn_sizes(rule, rng, SIZES if rng.random() > ONES_SHARE else (1, *SIZES))
        return left_graph(rule, sizes) if satisfies(rule, sizes) else None
    except (RuleError, *ERRORS):
        return None


# ---- sizes and attributes ----


def drawn_sizes(
    rule: Equation,
    rng: random.Random,
    pool: Sequence[int] = SIZES,
    ranks: Sequence[int] = RANKS,
    distinct: bool = False,
    solve: bool = True,
) -> dict[str, Any]:
    """Draw random sizes, degrees and attributes.

    With `distinct`, dims with different names have different sizes if the pool is large enough. With `solve`, sizes are
    changed to satisfy simple conditions of the guard. Raises `RuleError` if a condition has no value.
    """
    names = list(dict.fromkeys(name for _, dims in rule.variables for name in dims.names))
    plain = [name for name in names if not name.startswith("*")]
    some = rng.sample(pool, len(plain)) if distinct and len(plain) <= len(pool) else rng.choices(pool, k=len(plain))
    sizes: dict[str, Any] = dict(zip(plain, some, strict=True))
    sizes |= {name[1:]: _lead(rng, pool, rng.choice(ranks)) for name in names if name.startswith("*")}
    for name in sorted(rule.sizes):
        sizes.setdefault(name, rng.choice(pool))
    for term in applied(rule.left):
        for key, value in term.attrs:
            if value.name is not None and value.name not in sizes and value.name not in rule.axes:
                sizes[value.name] = _attribute(term.op, key, sizes, rng)
    for axis in rule.axes:
        sizes.setdefault(axis, rng.choice(DEGREES))
    if solve:
        _solve(rule, sizes)
    return sizes


def satisfies(rule: Equation, sizes: Mapping[str, Any]) -> bool:
    """Return whether these are sizes, at least 1, that satisfy the guard."""
    if not all(type(sizes[name]) is int and sizes[name] > 0 for name in rule.sizes if name in sizes):
        return False
    return all(condition.evaluate(sizes) is True for condition in rule.guard)


def _lead(rng: random.Random, pool: Sequence[int], rank: int) -> tuple[int, ...]:
    """Draw small dimensions, all different if there are enough."""
    small = pool[:3]
    return tuple(rng.sample(small, rank) if rank <= len(small) else rng.choices(small, k=rank))


def _solve(rule: Equation, sizes: dict[str, Any]) -> None:
    """Change sizes so that the guard's equations `name == …` and `name % divisor == …` hold."""
    for condition in rule.guard:
        match condition.tree:
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[right]):
                sizes[name] = Expression(ast.unparse(right)).evaluate(sizes)
            case ast.Compare(
                left=ast.BinOp(left=ast.Name(id=name), op=ast.Mod(), right=divisor), ops=[ast.Eq()], comparators=[rest]
            ) if isinstance(sizes.get(name), int):
                by, more = (Expression(ast.unparse(tree)).evaluate(sizes) for tree in (divisor, rest))
                sizes[name] = by * (1 + sizes[name] % 3) + more
            case _:
                pass


def _attribute(op: str, key: str, sizes: Mapping[str, Any], rng: random.Random) -> object:
    """Draw a free attribute: a permutation or factorization of the splice, or a small value of its type."""
    lead = next((value for value in sizes.values() if isinstance(value, tuple)), ())
    if key == "dims":
        return tuple(rng.sample(range(len(lead)), len(lead)))
    if key == "shape":
        flat = rng.sample(lead, len(lead))
        return tuple(flat) if len(flat) < 2 or rng.random() < 0.5 else (prod(flat[:2]), *flat[2:])
    return rng.choice(values(op, key))


# ---- graphs ----


def left_graph(rule: Equation, sizes: Mapping[str, Any]) -> tuple[Graph, Match]:
    """Return the left side at these sizes as a graph; raise if it is ill-shaped or large."""
    nodes: list[Node] = []
    variables = {name: f"v_{name}" for name, _ in rule.variables}
    indices = index_ranges(rule)
    for name, dims in rule.variables:
        shape = dims.shape(sizes)
        if prod(shape) > MAX_ELEMENTS:
            raise RuleError(f"{name} has shape {list(shape)}")
        dtype = "int64" if name in indices else "float64"
        nodes.append(leaf(variables[name], "input", shape, dtype, name, grad=name not in indices))
    placed: dict[Term, str] = {}

    def build(term: Term) -> str:
        if isinstance(term, Variable):
            return variables[term.name]
        if term not in placed:
            inputs = tuple(build(operand) for operand in term.operands)
            attrs = tuple((key, value.evaluate(sizes)) for key, value in term.attrs)
            placed[term] = f"t{len(placed)}"
            nodes.append(Node(placed[term], term.op, inputs, attrs))
        return placed[term]

    roots = tuple(build(root) for root in rule.left)
    graph = Graph(tuple(nodes), tuple((f"out{i}", root) for i, root in enumerate(roots))).validate()
    if any(0 in kind.shape for kind in graph.types.values()) and not _may_be_empty(rule):
        raise RuleError("an empty tensor")
    if any(kind.num_elements > MAX_ELEMENTS for kind in graph.types.values()):
        raise RuleError("a large tensor")
    return graph, Match(roots, frozenset(placed.values()), variables, dict(sizes))


def right_graph(rule: Equation, graph: Graph, match: Match) -> tuple[Graph, dict[str, str]]:
    """Return the right side over the same leaves, and for every root the node that computes it there."""
    nodes, results = replacement(graph, rule, match)
    leaves = tuple(node for node in graph.nodes if node.is_leaf)
    outputs = tuple((key, results[name]) for key, name in graph.outputs)
    return Graph((*leaves, *nodes), outputs).validate(), results


def _may_be_empty(rule: Equation) -> bool:
    """Return whether every row of the rule has a value for empty tensors."""
    return all(
        t.op not in ("amax", "amin", "softmax", "log_softmax", "layer_norm", "rms_norm", "sdpa") for t in rule.operators
    )


# ---- values of variables ----


def index_ranges(rule: Equation) -> dict[str, list[tuple[Term, int]]]:
    """Return the variables that hold indices, each with the terms and dimensions that it indexes."""
    ranges: dict[str, list[tuple[Term, int]]] = {}
    for term in rule.operators:
        for operand, (into, dim) in term.indexes.items():
            if operand < len(term.operands) and into < len(term.operands):
                at = _constant(dict(term.attrs)["dim"]) if dim < 0 and "dim" in dict(term.attrs) else dim
                for inner in subterms(term.operands[operand]):
                    if isinstance(inner, Variable):
                        ranges.setdefault(inner.name, []).append((term.operands[into], at))
    return ranges


def _constant(value: Expression | None) -> int:
    """Return the dimension that an attribute names; raise if it depends on ranks."""
    if value is None or value.names:
        raise RuleError(f"a dimension {value} that depends on ranks")
    number = value.evaluate({})
    if not isinstance(number, int):
        raise RuleError(f"a dimension {value} that is no number")
    return number


def drawn(
    rule: Equation, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, Any], seed: int, positive: bool
) -> dict[str, Array]:
    """Draw the variables: integers if all rows are exact, else decimals; with `positive`, greater than 0."""
    rng = np.random.default_rng(seed)
    rows = [ROWS[t.op] for t in rule.operators if t.op in ROWS]
    indices, tensors, ignored = index_ranges(rule), dict[str, Array](), _ignored(rule, sizes)
    for name, shape in shapes.items():
        if name in indices:
            tensors[name] = rng.integers(0, max(index_limit(indices[name], shapes, sizes), 1), shape)
            for value in ignored:
                tensors[name] = np.where(rng.random(shape) < IGNORED_SHARE, value, tensors[name])
        elif not any(row.rounds for row in rows):
            tensors[name] = rng.integers(-4, 5, shape).astype(float)
        elif positive:
            tensors[name] = rng.uniform(0.5, 2.0, shape)
        else:
            tensors[name] = rng.integers(-8, 9, shape) / 4.0
    return tensors


def _ignored(rule: Equation, sizes: Mapping[str, Any]) -> list[int]:
    """Return the ignored targets of the left side's losses."""
    attrs = (dict(term.attrs) for term in applied(rule.left) if term.op == "cross_entropy_sum")
    return [values["ignore_index"].evaluate(sizes) for values in attrs]


def index_limit(
    uses: Sequence[tuple[Term, int]], shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, Any]
) -> int:
    """Return the least size that a variable indexes. Logits without a batch have their classes in dimension 0."""
    into = [(shape_of(term, shapes, sizes), dim) for term, dim in uses]
    return min(shape[min(dim, len(shape) - 1)] for shape, dim in into)


def shape_of(term: Term, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a term over variables of these shapes."""
    if isinstance(term, Variable):
        return shapes[term.name]
    operands = [shape_of(t, shapes, sizes) for t in term.operands]
    if term.op in PARALLEL_OPS:
        return operands[0]
    return term.shape(operands, sizes)
