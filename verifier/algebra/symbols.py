"""The sizes and attributes of one rule, the facts of its guard, and their consequences.

Equations among sizes are used as substitutions: if a rule needs `i == h*d`, i is written as the two digits h and d. The
remaining conditions (orders, other equations) are facts. `Symbols.nonnegative` first reads signs off a polynomial, as
all sizes are at least 1; if this does not decide, Z3 does.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.expressions import Expression
from shardwright.verifier.algebra.polys import ONE, App, Atom, Poly, app, poly, product
from shardwright.verifier.logic import Formula, Number, z3
from shardwright.verifier.proof import Failure
from shardwright.verifier.solver import is_valid, refute

AT_LEAST_1 = ("extent",)
Fact = tuple[str, Poly]
"""A comparison of p with 0: (">=", p), ("==", p) or ("!=", p)."""


@dataclass
class Symbols:
    """The knowledge about names. Sizes are at least 1; attributes are any integers.

    sizes      the names that are sizes
    solved     names that are written as products of digits, major first
    opaque     permutations and shapes that are equal to another one
    nonempty   splices of at least one dimension
    facts      other conditions of the guard and of the left side
    """

    sizes: set[str] = field(default_factory=set)
    solved: dict[str, tuple[Poly, ...]] = field(default_factory=dict)
    opaque: dict[str, Poly] = field(default_factory=dict)
    nonempty: set[str] = field(default_factory=set)
    facts: list[Fact] = field(default_factory=list)
    _decided: dict[tuple[str, Poly, int], bool] = field(default_factory=dict)

    # ---- names and expressions ----

    def digits(self, name: str) -> tuple[Poly, ...]:
        """Return the digits of a size."""
        return self.solved.get(name, (poly(name),))

    def number(self, tree: ast.expr) -> Poly:
        """Return an integer expression over sizes and attributes as a polynomial."""
        match tree:
            case ast.Constant(value=bool()):
                raise RuleError(f"{ast.unparse(tree)} is not a number")
            case ast.Constant(value=int(value)):
                return poly(value)
            case ast.Name(id=name):
                return product(self.digits(name))
            case ast.UnaryOp(operand=operand):
                return self.number(operand) * -1
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.number(left), self.number(right))
            case _:
                raise RuleError(f"{ast.unparse(tree)}: only integers, names, + - * // % are understood in proofs")

    def entry(self, tree: ast.expr) -> tuple[Poly, ...]:
        """Return one extent of a shape as digits, in the order in which a product is written; none for 1."""
        match tree:
            case ast.Constant(value=1):
                return ()
            case ast.Name(id=name):
                return self.digits(name)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return (*self.entry(left), *self.entry(right))
            case _:
                return (self.number(tree),)

    def attribute(self, tree: ast.expr) -> Poly:
        """Return a permutation or shape as a polynomial."""
        match tree:
            case ast.Name(id=name):
                return self.opaque.get(name, poly(name))
            case ast.Call(func=ast.Name(id="compose"), args=[p, q]):
                return app("compose", self.attribute(p), self.attribute(q))
            case ast.Call(func=ast.Name(id="iota")):
                return poly("iota")
            case _:
                raise RuleError(f"{ast.unparse(tree)}: not a permutation or shape that proofs understand")

    # ---- guards ----

    def assume(self, guard: Expression) -> None:
        """Assume a condition of the rule."""
        match guard.tree:
            case ast.Compare(
                left=ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=splice)]),
                ops=[ast.Gt()],
                comparators=[ast.Constant(value=0)],
            ):
                self.nonempty.add(splice)
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[ast.Call() as right]):
                self.opaque[name] = self.attribute(right)
            case ast.Compare(
                left=ast.BinOp(left=ast.Name(id=name), op=ast.Mod(), right=right),
                ops=[ast.Eq()],
                comparators=[ast.Constant(value=0)],
            ) if name in self.sizes and name not in self.solved:
                self._divides(name, self.number(right))
            case ast.Compare(left=left, ops=ops, comparators=rest):
                for op, a, b in zip(ops, (left, *rest), rest, strict=False):
                    self._compared(op, a, b)
            case _:
                raise RuleError(f"guard {guard} is not a comparison")

    def _divides(self, name: str, divisor: Poly) -> None:
        """Assume that the divisor divides a size: write it as divisor · quotient."""
        atoms, coefficient = divisor.terms[0] if len(divisor.terms) == 1 else ((), 0)
        if name in divisor.names or coefficient < 1 or not all(map(self.is_positive, atoms)):
            self.facts.append(("==", app("mod", poly(name), divisor)))
            return
        quotient = f"{name}//{divisor}"
        self.sizes.add(quotient)
        parts = map(poly, atoms) if coefficient == 1 else (divisor,)
        self._solve(name, (*parts, poly(quotient)))

    def _compared(self, op: ast.cmpop, left: ast.expr, right: ast.expr) -> None:
        a, b = self.number(left), self.number(right)
        match op:
            case ast.Eq():
                tree = right if a.name else left
                self.equal(a, b, self.entry(tree) if isinstance(tree, ast.BinOp) else None)
            case ast.NotEq():
                self.facts.append(("!=", a - b))
            case _:
                self.facts.append((">=", _AT_LEAST_0[type(op)](a, b)))

    def equal(self, a: Poly, b: Poly, digits: tuple[Poly, ...] | None = None) -> None:
        """Assume that both are equal: if one side is a name, it is replaced by the other side."""
        if a == b:
            return
        for one, other in ((a, b), (b, a)):
            name = one.name
            if name is not None and name not in other.names and name not in self.solved:
                split = digits if digits and product(digits) == other else (other,)
                self._solve(name, split)
                return
        self.facts.append(("==", a - b))

    def _solve(self, name: str, digits: tuple[Poly, ...]) -> None:
        swap = {name: product(digits)}
        if name in self.sizes:
            self.facts.append((">=", swap[name] - 1))
        self.solved = {n: tuple(p.put(swap) for p in ps) for n, ps in self.solved.items()} | {name: digits}
        self.facts = [(kind, p.put(swap)) for kind, p in self.facts]

    # ---- decisions ----

    @property
    def positive(self) -> set[Atom]:
        """The names that are known to be at least 1."""
        return {name for name in self.sizes if name not in self.solved}

    def is_positive(self, atom: Atom) -> bool:
        if isinstance(atom, App):
            return atom.name in AT_LEAST_1
        return atom in self.sizes and atom not in self.solved

    def learn(self, value: Poly) -> None:
        """Assume that a number is at least 0."""
        if not self._signs_tell(value) and (">=", value) not in self.facts:
            self.facts.append((">=", value))

    def nonnegative(self, value: Poly) -> bool:
        """Return whether a number is at least 0 for all sizes that satisfy the guard; False also for unknown."""
        return (
            self._signs_tell(value)
            or any(kind == ">=" and self._signs_tell(value - p) for kind, p in self.facts)
            or self._decides(">=", value)
        )

    def equals(self, a: Poly, b: Poly) -> bool:
        return a == b or self._decides("==", a - b)

    def _signs_tell(self, value: Poly) -> bool:
        """Return whether every coefficient is at least 0 once every size n is written 1 + n'."""
        known = {atom for atoms, _ in value.terms for atom in atoms if self.is_positive(atom)}
        bounded = {atom for atoms, _ in value.terms for atom in atoms if isinstance(atom, App) and atom.name == "max0"}
        if any(atom not in known | bounded for atoms, _ in value.terms for atom in atoms):
            return False
        shifted = poly(0)
        for atoms, coefficient in value.terms:
            shifted = shifted + product(poly(a) + (1 if a in known else 0) for a in atoms) * coefficient
        return all(coefficient >= 0 for _, coefficient in shifted.terms)

    def _decides(self, kind: str, value: Poly) -> bool:
        number = value.constant
        if number is not None:
            return number >= 0 if kind == ">=" else number == 0
        key = (kind, value, len(self.facts))
        if key not in self._decided:
            self._decided[key] = self._follows(kind, value)
        return self._decided[key]

    def _follows(self, kind: str, value: Poly) -> bool:
        polys = (value, *(p for _, p in self.facts))
        if not all(map(_linear, polys)) or any(
            isinstance(a, App) and a.name == "max0" for p in polys for a in _atoms(p)
        ):
            return is_valid(formula(kind, value), self.given([value]))
        if not self._rational(value) or (kind == "==" and not self._rational(value * -1)):
            return False
        return is_valid(formula(kind, value), self.given([value]))

    def _rational(self, value: Poly) -> bool:
        """Return whether linear facts imply value >= 0 over the rationals. If they do not, Z3 seldom helps."""
        atoms = {a for p in (value, *(p for _, p in self.facts)) for a in _atoms(p)}
        known = [poly(a) - 1 for a in atoms if self.is_positive(a)]
        known += [p for kind, p in self.facts if kind in (">=", "==")]
        known += [p * -1 for kind, p in self.facts if kind == "=="]
        return not feasible([*known, value * -1 - 1])

    def given(self, about: list[Poly]) -> list[Formula]:
        """Return the assumptions for Z3: every size is at least 1, and the facts."""
        atoms = {a for p in (*about, *(p for _, p in self.facts)) for a in _atoms(p)}
        least = [translated(poly(a)) >= 1 for a in sorted(atoms, key=str) if self.is_positive(a)]
        return [*least, *(formula(kind, p) for kind, p in self.facts)]

    def failure(self, claim: str, kind: str, value: Poly) -> Failure:
        """Return the failure of a comparison of a number with 0, with sizes for which it does not hold."""
        return refute(claim, formula(kind, value), self.given([value]), [])


def _linear(value: Poly) -> bool:
    return all(len(atoms) < 2 for atoms, _ in value.terms)


MAX_ROWS = 400


def feasible(rows: list[Poly]) -> bool:
    """Return whether linear forms can all be ≥ 0 over the rationals (Fourier and Motzkin); True if too many arise."""
    rows = list(dict.fromkeys(rows))
    while True:
        if any(p.constant is not None and p.constant < 0 for p in rows):
            return False
        rows = [p for p in rows if p.constant is None]
        if not rows or len(rows) > MAX_ROWS:
            return True
        atom = rows[0].terms[-1][0][0]
        by_sign: dict[int, list[tuple[Poly, int]]] = {-1: [], 0: [], 1: []}
        for p in rows:
            c = next((c for atoms, c in p.terms if atoms == (atom,)), 0)
            by_sign[(c > 0) - (c < 0)].append((p, abs(c)))
        merged = [p * d + q * c for p, c in by_sign[1] for q, d in by_sign[-1]]
        rows = list(dict.fromkeys([*(p for p, _ in by_sign[0]), *merged]))


def _div(a: Poly, b: Poly) -> Poly:
    """Return a / b, exact if b is a factor of a, else as an application."""
    if b == ONE:
        return a
    return app("div", a, b) if (exact := a.over(b)) is None else exact


def _mod(a: Poly, b: Poly) -> Poly:
    return app("mod", a, b) if a.over(b) is None else poly(0)


_AT_LEAST_0: Mapping[type[ast.cmpop], Callable[[Poly, Poly], Poly]] = {
    ast.Lt: lambda a, b: b - a - 1, ast.LtE: lambda a, b: b - a,
    ast.Gt: lambda a, b: a - b - 1, ast.GtE: lambda a, b: a - b,
}  # fmt: skip
_OPERATORS: Mapping[type[ast.operator], Callable[[Poly, Poly], Poly]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: _div, ast.Mod: _mod,
}  # fmt: skip


def _atoms(value: Poly) -> Iterator[Atom]:
    for atoms, _ in value.terms:
        for atom in atoms:
            yield atom
            if isinstance(atom, App):
                for arg in atom.args:
                    yield from _atoms(arg)


def formula(kind: str, value: Poly) -> Formula:
    """Return a comparison of a number with 0 for Z3."""
    number = translated(value)
    return number >= 0 if kind == ">=" else number == 0 if kind == "==" else number != 0


def translated(value: Poly) -> Number:
    """Return a polynomial for Z3; a bare name remains a name."""
    terms: list[Number] = []
    for atoms, coefficient in value.terms:
        parts = [_translated_atom(atom) for atom in atoms]
        parts = [z3.IntVal(coefficient), *parts] if coefficient != 1 or not parts else parts
        terms.append(z3.Product(parts) if len(parts) > 1 else parts[0])
    return z3.IntVal(0) if not terms else z3.Sum(terms) if len(terms) > 1 else terms[0]


def _translated_atom(atom: Atom) -> Number:
    if isinstance(atom, str):
        return z3.Int(atom)
    args = [translated(arg) for arg in atom.args]
    match atom.name:
        case "max0":
            return z3.If(args[0] > 0, args[0], 0)
        case "div":  # rounded down: Z3 rounds up where the divisor is negative
            return z3.If(args[1] > 0, args[0] / args[1], -args[0] / -args[1])
        case "mod":
            return z3.If(args[1] > 0, args[0] % args[1], -(-args[0] % -args[1]))
        case name:
            return z3.Function(name, *(z3.IntSort() for _ in range(len(args) + 1)))(*args)
