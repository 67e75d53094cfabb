"""Algebraic rules: named equations between serial terms, as data.

    [slice_of_linear]
    slice(linear(x, w), dim=len(b), start=s, stop=t, step=1) = linear(x, slice(w, dim=0, start=s, stop=t, step=1))
        for x: *b i, w: o i

A rule is used from left to right; its converse is another rule where it is useful. Several roots (separated by `;`)
are replaced together. Sizes are symbolic; `where` conditions must hold besides. What a rule says is proven in
`verifier/equations.py`; the catalogue is in `substitutions/catalogue.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.expressions import Expression, expression
from shardwright.substitutions.terms import Apply, Dims, Term, Variable, parse_term, subterms


@dataclass(frozen=True)
class Equation:
    """left = right, for all tensors of these dims and all sizes that satisfy the guard.

    name        the rule's name
    variables   the dims of every variable
    left        the roots of the pattern
    right       what each root is replaced by
    guard       conditions on sizes and attributes
    moves       only data moves: both sides are equal bit for bit, not just over the reals
    """

    name: str
    variables: tuple[tuple[str, Dims], ...]
    left: tuple[Term, ...]
    right: tuple[Term, ...]
    guard: tuple[Expression, ...] = ()
    moves: bool = False

    def __post_init__(self) -> None:
        where = f"rule {self.name!r}"
        if len(self.left) != len(self.right) or not self.left:
            raise RuleError(
                f"{where}: {len(self.left)} roots on the left, {len(self.right)} on the right; give as many"
            )
        if any(isinstance(root, Variable) for root in self.left):
            raise RuleError(f"{where}: a root on the left is a bare variable, which would match anything")
        declared = {name for name, _ in self.variables}
        for side, terms in (("left", self.left), ("right", self.right)):
            used = {t.name for root in terms for t in subterms(root) if isinstance(t, Variable)}
            if used - declared:
                raise RuleError(f"{where}: variable {min(used - declared)!r} on the {side} has no dims")
            if side == "left" and declared - used:
                raise RuleError(f"{where}: variable {min(declared - used)!r} does not occur on the left")
        free = self._names(self.right) | {name for g in self.guard for name in g.names}
        unbound = free - self.bound
        if unbound:
            raise RuleError(f"{where}: {min(unbound)!r} is not bound by the left side")

    @staticmethod
    def _names(roots: tuple[Term, ...]) -> set[str]:
        applied = [t for root in roots for t in subterms(root) if isinstance(t, Apply)]
        return {name for term in applied for _, value in term.attrs for name in value.names}

    @property
    def bound(self) -> frozenset[str]:
        """The sizes and attributes that a match binds."""
        sizes = {name.removeprefix("*") for _, dims in self.variables for name in dims.names}
        applied = [t for root in self.left for t in subterms(root) if isinstance(t, Apply)]
        return frozenset(sizes | {value.name for t in applied for _, value in t.attrs if value.name is not None})

    @cached_property
    def dims(self) -> Mapping[str, Dims]:
        return dict(self.variables)

    @property
    def equation(self) -> str:
        """The rule as one line."""
        left, right = ("; ".join(map(str, roots)) for roots in (self.left, self.right))
        where = f" where {', '.join(map(str, self.guard))}" if self.guard else ""
        return f"{left} = {right} for {', '.join(f'{n}: {d}' for n, d in self.variables)}{where}"

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form (docs/proofs.md)."""
        return {
            "form": "equation",
            "name": self.name,
            "variables": {name: str(dims) for name, dims in self.variables},
            "left": [str(root) for root in self.left],
            "right": [str(root) for root in self.right],
            "guard": [str(condition) for condition in self.guard],
            "moves": self.moves,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Equation:
        """Read the JSON form; a `RuleError` names the rule and what is wrong."""
        name = str(data.get("name", "?"))
        missing = [key for key in ("name", "variables", "left", "right") if key not in data]
        if missing:
            raise RuleError(f"rule {name!r}: field {missing[0]!r} is missing")
        return equation(
            name, data["variables"], ";".join(data["left"]), ";".join(data["right"]),
            guard=tuple(data.get("guard", ())), moves=bool(data.get("moves", False)),
        )  # fmt: skip

    @property
    def hash(self) -> str:
        """Names the rule: SHA-256 over its JSON form without its name."""
        data = {key: value for key, value in self.to_json().items() if key != "name"}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def converse(self, name: str) -> Equation:
        """The rule from right to left."""
        return Equation(name, self.variables, self.right, self.left, self.guard, self.moves)


def equation(
    name: str, variables: Mapping[str, str], left: str, right: str, guard: tuple[str, ...] = (), moves: bool = False
) -> Equation:
    """A rule from its text; roots are separated by `;`."""
    try:
        return Equation(
            name,
            tuple((v, Dims.parse(dims)) for v, dims in variables.items()),
            tuple(parse_term(root.strip()) for root in left.split(";")),
            tuple(parse_term(root.strip()) for root in right.split(";")),
            tuple(map(expression, guard)),
            moves,
        )
    except RuleError as error:
        text = str(error)
        raise RuleError(text if text.startswith(f"rule {name!r}") else f"rule {name!r}: {text}") from None
