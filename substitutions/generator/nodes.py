"""Terms as enumerations keep them: operators on classes of equal terms, each class known by its first term.

A class is the number of the term that represents it. A `Valuation` gives terms their values on some data, or in some
other reading; every class is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.terms import Apply, Term, Variable


class Applied(Protocol):
    """An operator with its attributes, on operands of certain types."""

    @property
    def op(self) -> str: ...
    @property
    def attrs(self) -> tuple[tuple[str, Expression], ...]: ...


U = TypeVar("U", bound=Applied)
V = TypeVar("V")


class TermNode(NamedTuple, Generic[U]):
    """A term: a variable, or an operator on classes; `number` is its class, if it stands for one."""

    use: U | None
    operands: tuple[int, ...]
    variable: str = ""
    number: int = -1


@dataclass
class Valuation(Generic[U, V]):
    """The values of terms in one reading; None for a term that has no value there. `known`: values of classes."""

    nodes: Sequence[TermNode[U]]
    leaf: Callable[[TermNode[U]], V | None]
    apply: Callable[[U, list[V]], V | None]
    known: dict[int, V | None] = field(default_factory=dict)

    def of(self, root: TermNode[U]) -> V | None:
        """Return the value of a term."""
        if root.number not in self.known:
            value = self._computed(root)
            if root.number < 0:
                return value
            self.known[root.number] = value
        return self.known[root.number]

    def _computed(self, root: TermNode[U]) -> V | None:
        if root.use is None:
            return self.leaf(root)
        operands: list[V] = []
        for number in root.operands:
            if (value := self.of(self.nodes[number])) is None:
                return None
            operands.append(value)
        return self.apply(root.use, operands)


class Classes(Generic[U]):
    """The terms that stand for the classes of one enumeration."""

    def __init__(self) -> None:
        self.nodes: list[TermNode[U]] = []
        self._inside: dict[int, tuple[int, ...]] = {}
        self._leaves = Valuation[U, tuple[int, ...]](
            self.nodes, lambda leaf: (leaf.number,), lambda _, operands: sum(operands, ())
        )
        self._terms = Valuation[U, Term](
            self.nodes,
            lambda leaf: Variable(leaf.variable),
            lambda use, operands: Apply(use.op, tuple(operands), use.attrs),
        )

    def inside(self, number: int) -> tuple[int, ...]:
        """Return the classes of the operators in a class's term, in order; its own is the last."""
        if number not in self._inside:
            node = self.nodes[number]
            self._inside[number] = (*sorted(self.within(node)), number) if node.use else ()
        return self._inside[number]

    def within(self, root: TermNode[U]) -> set[int]:
        """Return the classes of the operators in a term, except its own."""
        return set().union(*map(self.inside, root.operands))

    def leaves(self, root: TermNode[U]) -> tuple[int, ...]:
        """Return the variables of a term in order, shared subterms as often as they are used."""
        return self._leaves.of(root) or ()

    def term(self, root: TermNode[U]) -> Term:
        """Return the term as rules have it."""
        term = self._terms.of(root)
        assert term is not None
        return term
