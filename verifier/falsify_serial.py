"""The falsifier of serial rules: small tensors, exact arithmetic where there is any.

Both sides run as graphs: the left side is built at random small sizes that satisfy the guard, the rule is applied to
it, and both graphs are interpreted: on integers, where sums and products are exact, or, where a row rounds, on small
decimals. Results are compared wherever the left side has a value. Placement rules run device by device
(`falsify_placement`).
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
from shardwright.pcg.interpret import run_serial
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import PARALLEL_OPS
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.match import Match, replacement
from shardwright.substitutions.terms import INDEX_OPERANDS, Apply, Term, Variable, subterms
from shardwright.verifier.falsify_placement import falsify_placement
from shardwright.verifier.mismatch import ERRORS, Mismatch, largest_of, same

Array = np.ndarray[Any, np.dtype[Any]]
SIZES = (2, 3, 4, 5, 6, 7)


def falsify_equation(rule: Equation, trials: int = 6, seed: int = 0) -> Mismatch | None:
    """A counterexample to a serial rule or to a placement rule among random small instances, if one is found.

    Raises `RuleError` where no sizes can be found that satisfy the left side and the guard.
    """
    if rule.axes:
        return falsify_placement(rule, seed=seed)
    rng, found, empty = random.Random(seed), 0, 0
    for _ in range(ATTEMPTS):
        instance = _instance(rule, rng)
        if instance is None:
            continue
        if _is_empty(*instance):  # says little: a few of these are enough
            empty += 1
            if empty > max(1, trials // 4):
                continue
        try:
            mismatch = _compare(rule, *instance, seed=found, positive=found % 2 == 1)
        except ERRORS:  # the left side has no value at these sizes
            continue
        found += not _is_empty(*instance)
        if mismatch is not None:
            return mismatch
        if found == trials:
            return None
    if not found and not empty:
        raise RuleError(f"rule {rule.name!r}: no small sizes satisfy its left side and guard")
    return None


def instances(rule: Equation, rng: random.Random, count: int) -> Iterator[tuple[Graph, Match]]:
    """A few instances of the left side at random small sizes, with the match of its roots."""
    found = (instance for _ in range(ATTEMPTS) if (instance := _instance(rule, rng)) is not None)
    yield from islice(found, count)


ATTEMPTS, MAX_ELEMENTS = 4000, 200_000
_PARTIAL = frozenset({"log", "sqrt", "rsqrt", "reciprocal", "div", "pow", "layer_norm", "rms_norm", "log1p"})
"""Rows that do not exist for all numbers."""
_ROUGH = frozenset({*_PARTIAL, "exp", "tanh", "sigmoid", "silu", "gelu", "softmax", "log_softmax", "sdpa", "sin", "cos",
                    "erf", "softplus", "cross_entropy_sum"})  # fmt: skip
"""Rows that round: their operands are small decimals, others are integers, which sums and products keep exact."""
SAMPLES: Mapping[str, Any] = {
    "padding_idx": None, "eps": 1e-5, "scale": 0.5, "ignore_index": -100, "label_smoothing": 0.25, "value": 2.0,
    "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "keepdim": True, "causal": False,
}  # fmt: skip
"""Values of attributes that a rule leaves free."""
IGNORED_SHARE = 0.25
"""How many of the targets of a loss are ignored."""


def _instance(rule: Equation, rng: random.Random) -> tuple[Graph, Match] | None:
    """The left side as a graph at random sizes, with the match of its roots; None where the sizes do not fit."""
    sizes: dict[str, Any] = {}
    for _, dims in rule.variables:
        for name in dims.names:
            splice = name.startswith("*")
            lead = tuple(rng.sample(SIZES[:3], rng.randint(0, 3)))
            sizes.setdefault(name.lstrip("*"), lead if splice else rng.choice(SIZES))
    for name in sorted(rule.sizes):
        sizes.setdefault(name, rng.choice(SIZES))
    for term in (t for root in rule.left for t in subterms(root) if isinstance(t, Apply)):
        for key, value in term.attrs:
            if value.name is not None and value.name not in sizes:
                sizes[value.name] = _attribute(key, sizes, rng)
    try:
        _solve(rule, sizes)
        if not all(g.evaluate(sizes) is True for g in rule.guard):
            return None
        return _left_graph(rule, sizes)
    except (RuleError, *ERRORS):
        return None


def _is_empty(graph: Graph, match: Match) -> bool:
    """Whether a result has no elements, as a slice that ends before it starts."""
    return any(0 in graph.types[root].shape for root in match.roots)


def _solve(rule: Equation, sizes: dict[str, Any]) -> None:
    """Make equations of the guard hold where one side is a name, and sizes multiples where it asks for that."""
    for condition in rule.guard:
        match condition.tree:
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[right]):
                sizes[name] = Expression(ast.unparse(right)).evaluate(sizes)
            case ast.Compare(
                left=ast.BinOp(left=ast.Name(id=name), op=ast.Mod(), right=divisor), ops=[ast.Eq()], comparators=[_]
            ) if isinstance(sizes.get(name), int):
                by = Expression(ast.unparse(divisor)).evaluate(sizes)
                sizes[name] = by * (1 + sizes[name] % 3)
            case _:
                pass


def _attribute(key: str, sizes: Mapping[str, Any], rng: random.Random) -> object:
    """A value for a free attribute: a permutation or factorization of the splice, or a small number."""
    lead = next((value for value in sizes.values() if isinstance(value, tuple)), ())
    if key == "dims":
        return tuple(rng.sample(range(len(lead)), len(lead)))
    if key == "shape":
        flat = rng.sample(lead, len(lead))
        return tuple(flat) if len(flat) < 2 or rng.random() < 0.5 else (prod(flat[:2]), *flat[2:])
    return SAMPLES[key] if key in SAMPLES else rng.randint(0, 8)


def index_ranges(rule: Equation) -> dict[str, list[tuple[Term, int]]]:
    """The variables that hold indices, each with the terms that it indexes into and their dimensions."""
    found: dict[str, list[tuple[Term, int]]] = {}
    for term in (t for root in (*rule.left, *rule.right) for t in subterms(root) if isinstance(t, Apply)):
        for operand, (into, dim) in INDEX_OPERANDS.get(term.op, {}).items():
            if operand < len(term.operands) and into < len(term.operands):
                at = _constant(dict(term.attrs)["dim"]) if dim < 0 and "dim" in dict(term.attrs) else dim
                for inner in subterms(term.operands[operand]):
                    if isinstance(inner, Variable):
                        found.setdefault(inner.name, []).append((term.operands[into], at))
    return found


def _constant(value: Expression | None) -> int:
    """The dimension that an attribute names where that does not depend on ranks."""
    if value is None or value.names:
        raise RuleError(f"a dimension {value} that depends on ranks")
    number = value.evaluate({})
    if not isinstance(number, int):
        raise RuleError(f"a dimension {value} that is no number")
    return number


def _left_graph(rule: Equation, sizes: Mapping[str, Any]) -> tuple[Graph, Match]:
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


def _may_be_empty(rule: Equation) -> bool:
    """Whether every row of the rule has a value for empty tensors."""
    applied = (t for root in (*rule.left, *rule.right) for t in subterms(root) if isinstance(t, Apply))
    return all(
        t.op not in ("amax", "amin", "softmax", "log_softmax", "layer_norm", "rms_norm", "sdpa") for t in applied
    )


def drawn(
    rule: Equation, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, Any], seed: int, positive: bool
) -> dict[str, Array]:
    """Values of the variables: integers where all rows are exact, else decimals, with `positive` greater than 0."""
    rng = np.random.default_rng(seed)
    ops = {t.op for root in (*rule.left, *rule.right) for t in subterms(root) if isinstance(t, Apply)}
    indices, found = index_ranges(rule), dict[str, Array]()
    for name, shape in shapes.items():
        if name in indices:
            found[name] = rng.integers(0, max(_limit(indices[name], shapes, sizes), 1), shape)
            if "cross_entropy_sum" in ops:
                found[name] = np.where(rng.random(shape) < IGNORED_SHARE, SAMPLES["ignore_index"], found[name])
        elif not ops & _ROUGH:
            found[name] = rng.integers(-4, 5, shape).astype(float)
        elif positive:
            found[name] = rng.uniform(0.5, 2.0, shape)
        else:
            found[name] = rng.integers(-8, 9, shape) / 4.0
    return found


def _limit(uses: Sequence[tuple[Term, int]], shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, Any]) -> int:
    """The least size that a variable indexes into. Logits without a batch have their classes in dimension 0."""
    into = [(_shape_of(term, shapes, sizes), dim) for term, dim in uses]
    return min(shape[min(dim, len(shape) - 1)] for shape, dim in into)


def _shape_of(term: Term, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a term over variables of these shapes."""
    if isinstance(term, Variable):
        return shapes[term.name]
    operands = [_shape_of(t, shapes, sizes) for t in term.operands]
    if term.op in PARALLEL_OPS:
        return operands[0]
    attrs = {key: value.evaluate(sizes) for key, value in term.attrs}
    return ROWS[term.op].signature(operands, attrs).result_shape


def _compare(rule: Equation, graph: Graph, match: Match, seed: int, positive: bool) -> Mismatch | None:
    names = {variable: name for name, variable in match.variables.items()}
    shapes = {names[n.name]: graph.types[n.name].shape for n in graph.leaves("input")}
    shown = drawn(rule, shapes, match.sizes, seed, positive)
    tensors = {match.variables[name]: array for name, array in shown.items()}
    expected = _run(graph, tensors)
    first = expected[match.roots[0]]
    try:
        nodes, results = replacement(graph, rule, match)
        leaves = tuple(node for node in graph.nodes if node.is_leaf)
        outputs = tuple((key, results[name]) for key, name in graph.outputs)
        right = Graph((*leaves, *nodes), outputs).validate()
        if any(kind.num_elements > MAX_ELEMENTS for kind in right.types.values()):
            return None
        got = _run(right, tensors)
    except (RuleError, *ERRORS) as error:
        return Mismatch(rule.name, match.sizes, shown, first, f"not defined: {error}")
    largest = max((largest_of(value) for value in (*expected.values(), *got.values())), default=1.0)
    for root in match.roots:
        want, have = expected[root], got[results[root]]
        if not same(want, have, largest):
            return Mismatch(rule.name, match.sizes, shown, want, have, _DETACHED if _detaches(rule) else "")
    return None


_DETACHED = "where detach(u) is another tensor than u: if the values are equal, the gradients are not"


def _detaches(rule: Equation) -> bool:
    terms = (term for root in (*rule.left, *rule.right) for term in subterms(root))
    return any(isinstance(term, Apply) and term.op == "detach" for term in terms)


def _run(graph: Graph, tensors: Mapping[str, Array]) -> Mapping[str, Array]:
    """The values of all nodes, with something else in the place of what is detached: it has no gradient.

    A rule that is true whatever the detached values are is true for gradients.
    """
    nodes, tensors = list[Node](), dict(tensors)
    for node in graph.nodes:
        if node.op == "detach":
            shape = graph.types[node.name].shape
            noise = leaf(f"{node.name}_noise", "input", shape, "float64", f"{node.name}_noise")
            tensors[noise.name] = np.random.default_rng(prod(shape)).uniform(-1, 1, shape)
            nodes += [noise, Node(node.name, "add", (*node.inputs, noise.name))]
        else:
            nodes.append(node)
    return run_serial(Graph(tuple(nodes), graph.outputs).validate(), tensors)
