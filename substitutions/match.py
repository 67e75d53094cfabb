"""The search for places where an algebraic rule applies in a serial graph.

A match maps the pattern's operators to nodes and its variables to the nodes whose results they stand for. It is only
returned if the rule can really be applied there: no result that disappears is read from outside the match, sizes and
guards hold, and every replaced result keeps its type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

from shardwright.pcg.errors import GraphError, RuleError
from shardwright.pcg.graph import Graph, Node, infer
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import PARTITION
from shardwright.pcg.types import TensorType, is_float
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.terms import Apply, Term, Variable, subterms

_ONE = Expression("1")


@dataclass(frozen=True)
class Match:
    """A place where a rule applies.

    roots      the nodes that the left roots match, in the rule's order
    nodes      all matched operator nodes
    variables  variable -> node
    sizes      the value of every name of the rule
    """

    roots: tuple[str, ...]
    nodes: frozenset[str]
    variables: Mapping[str, str]
    sizes: Mapping[str, Any]


@dataclass
class PartialMatch:
    """A match in the making: operators match by structure, equal terms are one node.

    `axes` gives the mesh axis of each axis of a placement rule. Where it is empty, the graph is serial, and neither
    layouts nor degrees are looked at.
    """

    graph: Graph
    rule: Equation
    axes: Mapping[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    placed: dict[Term, str] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    attrs: list[tuple[Expression, Any]] = field(default_factory=list)

    def copy(self) -> PartialMatch:
        """Return a copy, to be extended independently."""
        return replace(
            self, variables={**self.variables}, placed={**self.placed}, sizes={**self.sizes}, attrs=[*self.attrs]
        )

    def take(self, term: Term, name: str) -> bool:
        """Match `term` against the node `name`; return False, with the match spoiled, where it does not fit."""
        if isinstance(term, Variable):
            return self._take_variable(term.name, name)
        if term in self.placed:
            return self.placed[term] == name
        node = self.graph.by_name[name]
        if node.op != term.op or len(node.inputs) != len(term.operands) or name in self.placed.values():
            return False
        if not self._take_attributes(term, node):
            return False
        self.placed[term] = name
        return all(self.take(operand, i) for operand, i in zip(term.operands, node.inputs, strict=True))

    def _take_attributes(self, term: Apply, node: Node) -> bool:
        want, have = dict(term.attrs), dict(node.attrs)
        if node.is_parallel:
            if self.axes.get(str(want.pop("axis"))) != have.pop("axis"):
                return False
            if node.op == PARTITION:
                want.setdefault("blocks", _ONE)
        if want.keys() != have.keys():
            return False
        self.attrs += [(value, have[key]) for key, value in want.items()]
        return True

    def _take_variable(self, variable: str, name: str) -> bool:
        if variable in self.variables:
            return self.variables[variable] == name
        kind = self.graph.types[name]
        if kind.dtype == "bool" and not self.rule.any_kind:  # other rules are about numbers
            return False
        sizes = self.rule.dims[variable].bind(kind.shape)
        if sizes is None or any(self.sizes.get(key, value) != value for key, value in sizes.items()):
            return False
        self.variables[variable] = name
        self.sizes.update(sizes)
        return not self.axes or self._take_layouts(variable, name)

    def _take_layouts(self, variable: str, name: str) -> bool:
        """Match the layouts of a variable; their numbers of blocks are checked at the end, as attributes are."""
        layouts = dict(zip(self.graph.mesh.names, self.graph.types[name].layouts, strict=True))
        for axis, place in zip(self.rule.axes, dict(self.rule.layouts)[variable], strict=True):
            have = layouts[self.axes[axis]]
            if (have.kind, have.dim) != (place.kind, place.dim):
                return False
            self.attrs.append((Expression(" * ".join(place.blocks) or "1"), have.blocks))
        return True

    def _bound(self) -> bool:
        """Bind names in attributes (alone or in a tuple), then factors of products that follow; False: no fit."""
        for want, have in self.attrs:
            self.sizes = {**want.read(have), **self.sizes}
        shapes = [(self.rule.dims[v], self.graph.types[name].shape) for v, name in self.variables.items()]
        for _ in shapes:  # a factor found in one product may be missing in another
            for dims, shape in shapes:
                if (sizes := dims.factored(shape, self.sizes)) is None:
                    return False
                self.sizes.update(sizes)
        return all(self.sizes.get(name, 1) >= 1 for name in self.rule.sizes)

    def solved(self) -> bool:
        """Return whether sizes, attributes and guards hold, after binding the names in attributes."""
        degrees = {axis: self.graph.mesh.sizes[self.graph.mesh.index(name)] for axis, name in self.axes.items()}
        guard = [g for g in self.rule.guard if self.axes or g.names.isdisjoint(self.rule.axes)]
        try:
            if not self._bound():
                return False
            return all(want.evaluate(self.sizes) == have for want, have in self.attrs) and all(
                condition.evaluate({**self.sizes, **degrees}) is True for condition in guard
            )
        except (RuleError, TypeError):  # a name bound to a tuple where a size is needed
            return False


def _each_match(rule: Equation, graph: Graph, parameters: Mapping[str, int]) -> Iterator[Match]:
    if len(graph.mesh):
        raise RuleError(f"rule {rule.name!r} applies to serial graphs; this one is on the mesh {graph.mesh}")
    seen = set[tuple[tuple[str, ...], tuple[tuple[str, str], ...]]]()
    for state in extended(PartialMatch(graph, rule, sizes=dict(parameters)), rule.left):
        match = _finish(state)
        if match is not None and (key := (match.roots, tuple(match.variables.items()))) not in seen:
            seen.add(key)
            yield match


def each_place(rule: Equation, graph: Graph, degrees: Sequence[int] = ()) -> Iterator[Match]:
    """Yield every place in a serial graph where the rule applies, in graph order; parameters take each of `degrees`.

    Raises `RuleError` for a parallel graph: algebraic rules are used before layouts are chosen.
    """
    for values in product(degrees, repeat=len(rule.parameters)):
        yield from _each_match(rule, graph, dict(zip(rule.parameters, values, strict=True)))


def places(rule: Equation, graph: Graph, degrees: Sequence[int] = ()) -> list[Match]:
    """Return the places that `each_place` yields, as a list."""
    return list(each_place(rule, graph, degrees))


def extended(state: PartialMatch, roots: Sequence[Term]) -> Iterator[PartialMatch]:
    """Yield the match extended by each way to match further roots."""
    if not roots:
        yield state
        return
    root = roots[0]
    for name in _candidates(state, root):
        attempt = state.copy()
        if attempt.take(root, name):
            yield from extended(attempt, roots[1:])


def _candidates(state: PartialMatch, root: Term) -> Sequence[str]:
    """Return the nodes that may match a root: users of an operand that is matched already, where there is one."""
    assert isinstance(root, Apply)
    graph = state.graph
    for operand in root.operands:
        known = state.variables.get(operand.name) if isinstance(operand, Variable) else state.placed.get(operand)
        if known is not None:
            return tuple(dict.fromkeys(graph.users[known]))
    return [node.name for node in graph.nodes if node.op == root.op]


def _finish(state: PartialMatch) -> Match | None:
    graph, rule = state.graph, state.rule
    if not state.solved():
        return None
    roots = tuple(state.placed[root] for root in rule.left)
    nodes = frozenset(state.placed.values())
    results = {name for _, name in graph.outputs}
    for name in nodes.difference(roots):
        if name in results or not nodes.issuperset(graph.users[name]):
            return None
    variables = set(state.variables.values())
    if nodes & variables or not _in_order(graph, rule, roots) or _reaches(graph, roots, variables):
        return None
    match = Match(roots, nodes, dict(state.variables), dict(state.sizes))
    return match if _keeps_types(graph, rule, match) else None


def _in_order(graph: Graph, rule: Equation, roots: tuple[str, ...]) -> bool:
    """Return whether roots without attributes are in graph order: one place is one match if they are interchangeable.

    A rule whose roots are not interchangeable then matches only where they stand in its order.
    """
    if len(roots) == 1 or any(isinstance(root, Apply) and root.attrs for root in rule.left):
        return True
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    return all(position[a] < position[b] for a, b in pairwise(roots))


def _reaches(graph: Graph, roots: tuple[str, ...], variables: set[str]) -> bool:
    """Return whether a variable depends on a root, so that replacing the roots together would close a cycle."""
    if len(roots) == 1:
        return False
    pending, seen = list(roots), set(roots)
    while pending:
        for user in graph.users[pending.pop()]:
            if user in variables:
                return True
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return False


def replacement(graph: Graph, rule: Equation, match: Match) -> tuple[list[Node], dict[str, str]]:
    """Return the nodes that replace a match, and for every root the node that now gives its result.

    A root keeps its name where it is still computed. A new node carries the source of the root that it serves. Real
    numbers that a rule makes are in float64 where a result is.
    """
    made: dict[Term, str] = {}
    dtypes = {graph.types[name].dtype for name in match.roots}
    numbers = _real_numbers(rule) if "float64" in dtypes else frozenset[Term]()
    nodes: list[Node] = []
    taken = set(graph.by_name) - match.nodes

    def build(term: Term, root: Node, wanted: str | None) -> str:
        if isinstance(term, Variable):
            return match.variables[term.name]
        if term not in made:
            inputs = tuple(build(operand, root, None) for operand in term.operands)
            attrs = tuple((key, value.evaluate(match.sizes)) for key, value in term.attrs)
            if term in numbers:
                attrs = tuple((key, "float64" if key == "dtype" else value) for key, value in attrs)
            name = _fresh(wanted or f"{root.name}_{term.op}", taken | set(match.roots) - {wanted})
            made[term] = name
            taken.add(name)
            nodes.append(Node(name, term.op, inputs, attrs, (), root.source))
        return made[term]

    results: dict[str, str] = {}
    for name, term in zip(match.roots, rule.right, strict=True):
        results[name] = build(term, graph.by_name[name], name)
    return nodes, results


@lru_cache
def _real_numbers(rule: Equation) -> frozenset[Term]:
    """Return the right side's constants that are real, or integers that only functions with real results read."""
    right = [term for side in rule.right for term in subterms(side) if isinstance(term, Apply)]
    constants = [term for term in right if term.op == "full"]
    terms = set[Term]()
    for term in constants:
        dtype = dict(term.attrs)["dtype"]
        readers = [reader for reader in right if term in reader.operands]
        if dtype.text == "'float32'" or (dtype.text == "'int64'" and all(map(_makes_real, readers))):
            terms.add(term)
    return frozenset(terms)


def _makes_real(term: Apply) -> bool:
    """Return whether a function of one number gives a real one for an integer."""
    row = ROWS.get(term.op)
    return row is not None and len(term.operands) == 1 and is_float(row.result_dtype(["int64"], {}))


def _fresh(hint: str, taken: set[str] | frozenset[str]) -> str:
    name, count = hint, 1
    while name in taken:
        name, count = f"{hint}_{count}", count + 1
    return name


def _keeps_types(graph: Graph, rule: Equation, match: Match) -> bool:
    """Return whether every replaced result has the shape, dtype and gradient that it had."""
    try:
        nodes, results = replacement(graph, rule, match)
        types: dict[str, TensorType] = {}
        for node in nodes:
            operands = [types.get(i) or graph.types[i] for i in node.inputs]
            types[node.name] = infer(node, operands, graph.mesh)
    except (GraphError, RuleError):
        return False
    return all((types.get(new) or graph.types[new]) == graph.types[old] for old, new in results.items())
