"""Types of a rule's terms as text, for people: dims by the verifier's index semantics, layouts by its typing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.layout import Layout
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.terms import Term, Variable, erase
from shardwright.verifier.algebra.elements import Dim, Evaluator, extent, spliced
from shardwright.verifier.algebra.shapes import evaluator, known
from shardwright.verifier.limits import Late
from shardwright.verifier.placement.typing import Typing
from shardwright.verifier.proof import BEYOND

T = TypeVar("T")


@dataclass
class TermTypes:
    """A function that returns a term's type as text, such as `[m o] P`; "" if the verifier cannot derive it."""

    rule: Equation
    _evaluator: Evaluator | None = field(init=False)
    _typing: Typing | None = field(init=False)

    def __post_init__(self) -> None:
        rule = self.rule
        self._evaluator = _reached(lambda: evaluator(rule, known(rule)))
        self._typing = _reached(lambda: Typing(rule)) if rule.axes else None

    def __call__(self, term: Term) -> str:
        """Return the dims, and for a placement rule the layouts, one per axis."""
        return f"{self._dims(term)} {self._layouts(term)}".strip()

    def _dims(self, term: Term) -> str:
        if isinstance(term, Variable):
            return f"[{self.rule.dims[term.name]}]"
        run = self._evaluator
        tensor = None if run is None else _reached(lambda: run.tensor(erase(term)))
        return "" if tensor is None else f"[{' '.join(map(_dim, tensor.dims))}]"

    def _layouts(self, term: Term) -> str:
        if (typing := self._typing) is None:
            return " ".join(map(str, dict(self.rule.layouts).get(term.name, ()))) if isinstance(term, Variable) else ""
        kind = _reached(lambda: typing.of(term))
        return "ill-typed" if kind is None else " ".join(map(self._layout, kind.layouts))

    def _layout(self, layout: Layout) -> str:
        """Return a layout as text; the typing's sizes are primes, so the number of blocks is written in names again."""
        assert self._typing is not None
        if layout.blocks == 1:
            return str(layout)
        left, names = layout.blocks, list[str]()
        for name, prime in self._typing.sizes.items():
            while isinstance(prime, int) and prime > 1 and left % prime == 0:
                names, left = [*names, name], left // prime
        return f"S({layout.dim}, {'*'.join([*names, *([str(left)] if left > 1 else [])])})"


def _reached(find: Callable[[], T]) -> T | None:
    """Return the result of `find`, or None if the verifier fails."""
    try:
        return find()
    except (ShardwrightError, Late, *BEYOND):
        return None


def _dim(dim: Dim) -> str:
    return f"*{spliced(dim)}" if spliced(dim) else str(extent(dim)).replace(" ", "")
