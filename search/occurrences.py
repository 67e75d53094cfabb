"""Where the terms of a placement rule occur in a graph, parallel operators and layouts included.

Rewriting uses serial rules and `substitutions.match`; placement rules are not applied one by one, because certified
row rules, steps and serial rules imply them all. Their occurrences say which of them a plan makes use of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.parallel import PARALLEL_OPS
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.terms import Apply, Term, Variable, erase, subterms


class Occurrences:
    """Counts the places where rules occur in one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._by_op: dict[str, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            self._by_op[node.op].append(node)

    def of(self, rule: Equation) -> int:
        """Places in a parallel graph that hold a side of the rule with parallel operators, in the rule's layouts."""
        sides = [side for side in (rule.left, rule.right) if any(_is_parallel(root) for root in side)]
        names = self.graph.mesh.names
        axes = [dict(zip(rule.axes, chosen, strict=True)) for chosen in permutations(names, len(rule.axes))]
        return sum(self._count(rule, side, mapping) for side in sides for mapping in axes)

    def erased(self, rule: Equation) -> int:
        """Places in a serial graph that hold the left side without its parallel operators."""
        roots = tuple(map(erase, rule.left))
        return 0 if any(isinstance(root, Variable) for root in roots) else self._count(rule, roots, None)

    def _count(self, rule: Equation, roots: Sequence[Term], axes: Mapping[str, str] | None) -> int:
        first = roots[0]
        if not isinstance(first, Apply):
            return 0
        found = 0
        for node in self._by_op.get(first.op, ()):
            state = _State(self.graph, rule, axes)
            found += state.take(first, node.name) and self._others(state, roots[1:]) and state.holds()
        return found

    def _others(self, state: _State, roots: Sequence[Term]) -> bool:
        """Whether further roots fit next to what is matched, each at the first node that has not been taken."""
        for root in roots:
            candidates = self._by_op.get(root.op, ()) if isinstance(root, Apply) else ()
            fits = (copy for node in candidates if (copy := state.copy()).take(root, node.name))
            taken = next(fits, None)
            if taken is None:
                return False
            state.variables, state.placed, state.sizes, state.attrs = (
                taken.variables, taken.placed, taken.sizes, taken.attrs,
            )  # fmt: skip
        return True


def _is_parallel(term: Term) -> bool:
    return any(isinstance(t, Apply) and t.op in PARALLEL_OPS for t in subterms(term))


@dataclass
class _State:
    """A partial match; `axes` says which mesh axis each of the rule's stands for, None in a serial graph."""

    graph: Graph
    rule: Equation
    axes: Mapping[str, str] | None
    variables: dict[str, str] = field(default_factory=dict)
    placed: dict[Term, str] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    attrs: list[tuple[Expression, Any]] = field(default_factory=list)

    def copy(self) -> _State:
        return _State(
            self.graph, self.rule, self.axes, {**self.variables}, {**self.placed}, {**self.sizes}, [*self.attrs]
        )

    def take(self, term: Term, name: str) -> bool:
        """Match a term with a node; False, with the state spoiled, where it does not fit."""
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
        have, want = dict(node.attrs), dict(term.attrs)
        if term.op in PARALLEL_OPS:
            if self.axes is None or have.pop("axis") != self.axes[str(want.pop("axis"))]:
                return False
            if have.pop("blocks", 1) != 1 and "blocks" not in want:
                return False
        if not want.keys() <= have.keys() | {"blocks"} or have.keys() - want.keys():
            return False
        self.attrs += [(value, have.get(key, 1)) for key, value in want.items()]
        return True

    def _take_variable(self, variable: str, name: str) -> bool:
        if variable in self.variables:
            return self.variables[variable] == name
        found = self.rule.dims[variable].bind(self.graph.types[name].shape)
        if found is None or any(self.sizes.get(key, value) != value for key, value in found.items()):
            return False
        self.variables[variable] = name
        self.sizes.update(found)
        return True

    def holds(self) -> bool:
        """Whether attributes, guards and layouts hold."""
        for want, have in self.attrs:
            if want.name is not None:
                self.sizes.setdefault(want.name, have)
        try:
            return (
                all(want.evaluate(self.sizes) == have for want, have in self.attrs)
                and all(condition.evaluate(self.sizes) is True for condition in self.rule.guard)
                and all(self._placed(name, places) for name, places in self.rule.layouts)
            )
        except RuleError:
            return False

    def _placed(self, variable: str, places: Sequence[Placement]) -> bool:
        """Whether a variable has its layouts; one that occurs on the other side only may have any."""
        if self.axes is None or variable not in self.variables:
            return True
        layouts = dict(zip(self.graph.mesh.names, self.graph.types[self.variables[variable]].layouts, strict=True))
        for axis, place in zip(self.rule.axes, places, strict=True):
            have = layouts[self.axes[axis]]
            if (have.kind, have.dim) != (place.kind, place.dim) or (have.blocks > 1 and not place.blocks):
                return False
        return True
