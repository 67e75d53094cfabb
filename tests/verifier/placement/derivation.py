"""A third proof of the named rules: from serial axioms, as uninterpreted functions.

Every operator application is a function symbol of an uninterpreted sort, named by its operator, by how its operands'
dims line up, and by the dimension it works on: adding a bias and adding equal shapes are different symbols, so that an
axiom can only be used where its dims fit. Sizes that an axiom speaks about are functions of tensors. Axioms are the
rules of `AXIOMS`, each proven by index semantics; they are instantiated by two-sided triggers, without MBQI.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.rules.decompositions import DECOMPOSITIONS, MAXIMUM
from shardwright.substitutions.terms import Apply, Term, Variable, subterms
from shardwright.verifier.algebra.elements import Dim, Evaluator, extent, spliced
from shardwright.verifier.algebra.polys import App, Poly
from shardwright.verifier.algebra.shapes import evaluator, known
from shardwright.verifier.algebra.symbols import formula, translated
from shardwright.verifier.logic import Formula, Number, Solver, z3
from shardwright.verifier.solver import is_valid, new_solver

BASIC = (
    "linear_of_sum", "linear_by_sum", "linear_of_scaled", "linear_by_scaled", "linear_of_neg", "linear_of_linear",
    "sum_of_linear", "matmul_associates", "matmul_of_scaled", "matmul_by_scaled", "slice_of_linear",
    "concat_of_linears", "linear_of_concat", "first_slice_of_concat", "last_slice_of_concat", "first_rows_of_concat",
    "last_rows_of_concat", "rows_of_concat", "rows_of_last_concat", "rows_of_three", "concat_of_slices",
    "slice_of_slice", "slice_of_sum", "slice_of_biased", "scale_of_sum", "scale_of_scaled", "sub_as_add", "neg_of_neg",
    "relu_of_relu", "reshape_of_reshape", "permute_of_permute", "permute_of_none", "permute_of_neg", "permute_of_relu",
    "permute_of_silu", "permute_of_sum", "reshape_of_neg", "reshape_of_relu", "reshape_of_silu", "reshape_of_sum",
)  # fmt: skip
ARITHMETIC = ("add_commutes", "add_associates", "bias_last", "mul_commutes", "mul_associates", "mul_of_sum")
AXIOMS = (*BASIC, *ARITHMETIC)
INDEX_ONLY = ("linear_as_matmul", *(rule.name for rule in (*DECOMPOSITIONS, *MAXIMUM)))
"""Proven by index semantics alone: a condition on ranks, which the symbols here do not carry, and what operators like
softmax are made of, which no smaller rule says."""


@dataclass
class Translation:
    """A rule's terms as expressions of the sort `Tensor`.

    With `flat`, sums among the attributes become names of their own (`named`), so that terms can be triggers.
    """

    rule: Equation
    sort: Number
    prefix: str
    flat: bool = False
    evaluator: Evaluator = field(init=False)
    named: list[Formula] = field(default_factory=list)
    conditions: list[Formula] = field(init=False)
    made: dict[Term, Number] = field(default_factory=dict)

    def __post_init__(self) -> None:
        symbols = known(self.rule)
        self.evaluator = evaluator(self.rule, symbols)
        self.conditions = [formula(kind, value) for kind, value in symbols.facts]
        symbols.facts.clear()

    def term(self, term: Term) -> Number:
        """The expression of a term."""
        if term not in self.made:
            self.made[term] = self._made(term)
        return self.made[term]

    def _made(self, term: Term) -> Number:
        if isinstance(term, Variable):
            return z3.Const(f"{self.prefix}{term.name}", self.sort)
        self.evaluator.tensor(term)
        operands = [self.term(operand) for operand in term.operands]
        numbers = [self._flattened(self._renamed(number)) for number in self._numbers(term)]
        sorts = [x.sort() for x in (*operands, *numbers)]
        return z3.Function(self._symbol(term), *sorts, self.sort)(*operands, *numbers)

    def sizes(self, terms: Iterable[Term]) -> list[Formula]:
        """The sizes of these terms' plain dims, counted from the end."""
        facts: list[Formula] = []
        for term in terms:
            for at, dim in enumerate(reversed(self.evaluator.tensor(term).dims)):
                if spliced(dim):
                    break
                size = z3.Function(f"size{at}", self.sort, z3.IntSort())
                facts.append(size(self.term(term)) == self._renamed(translated(extent(dim))))
        return facts

    def needs(self) -> list[Formula]:
        """What the operators translated so far need to be well-formed; asked for once."""
        run = self.evaluator
        equal = [translated(extent(a)) == translated(extent(b)) for a, b in run.equations]
        needed = [*equal, *(formula(kind, value) for kind, value in run.symbols.facts)]
        run.equations.clear()
        run.symbols.facts.clear()
        return [self._renamed(f) for f in needed]

    def positive(self) -> list[Formula]:
        """Every size is at least 1."""
        return [self._renamed(z3.Int(name)) >= 1 for name in sorted(self.evaluator.symbols.positive, key=str)]

    def guard(self) -> list[Formula]:
        """The rule's conditions on sizes."""
        return [self._renamed(condition) for condition in self.conditions]

    def _numbers(self, term: Apply) -> Iterator[Number]:
        """The attributes that are numbers, permutations or shapes."""
        symbols = self.evaluator.symbols
        for key, value in term.attrs:
            if key in ("start", "stop"):
                yield translated(symbols.number(value.tree))
            elif key == "shape" or (key == "dims" and value.names):
                yield _attribute(symbols.attribute(value.tree))

    def _flattened(self, number: Number) -> Number:
        if not self.flat or number.num_args() == 0 or not z3.is_int(number):
            return number
        name = z3.Int(f"{self.prefix}number{len(self.named)}")
        self.named.append(name == number)
        return name

    def _symbol(self, term: Apply) -> str:
        """The operator with everything that decides which axioms may speak about it."""
        dims = [self.evaluator.tensor(operand).dims for operand in term.operands]
        constants = [f"{k}={v}" for k, v in term.attrs if k not in ("dim", "start", "stop", "shape") and not v.names]
        along = [self.evaluator.position(dims[0], v) - len(dims[0]) for k, v in term.attrs if k == "dim"]
        return " ".join([term.op, _alignment(dims), *map(str, along), *constants])

    def _renamed(self, number: Number) -> Number:
        """Names of sizes and attributes are this rule's own."""
        swap = [(c, z3.Const(f"{self.prefix}{c}", c.sort())) for c in _free(number) if str(c) != "iota"]
        return z3.substitute(number, *swap) if swap else number

    def quantified(self, sides: Iterable[Number]) -> list[Number]:
        """The rule's own constants in these expressions."""
        found = {str(c): c for side in sides for c in _free(side)}
        return [c for name, c in found.items() if name.startswith(self.prefix)]


def _alignment(dims: list[tuple[Dim, ...]]) -> str:
    """How the ranks of the operands compare: "=" for equal, "+" where the other is longer."""
    ranks = [(sum(not spliced(d) for d in x), sum(bool(spliced(d)) for d in x)) for x in dims]
    return "".join("=" if rank == ranks[0] else "+" for rank in ranks[1:]) + str(len(dims))


def _free(number: Number) -> list[Number]:
    if z3.is_const(number):
        return [] if z3.is_int_value(number) or z3.is_true(number) or z3.is_false(number) else [number]
    return [c for child in number.children() for c in _free(child)]


def _attribute(value: Poly) -> Number:
    """A permutation or shape."""
    sort = z3.DeclareSort("Attribute")
    (atom,) = value.terms[0][0]
    if isinstance(atom, App):
        args = [_attribute(arg) for arg in atom.args]
        return z3.Function(atom.name, *(sort for _ in range(len(args) + 1)))(*args)
    return z3.Const(atom, sort)


@lru_cache(maxsize=1)
def _tensor() -> Number:
    return z3.DeclareSort("Tensor")


@lru_cache(maxsize=256)
def axiom(rule: Equation, sort: Number) -> list[Formula]:
    """The rule as quantified equations, one per root, each with the sides that hold all its variables as triggers."""
    formulas: list[Formula] = []
    for number, (left, right) in enumerate(zip(rule.left, rule.right, strict=True)):
        translation = Translation(rule, sort, f"{rule.name}.{number}.", flat=True)
        sides = [translation.term(left), translation.term(right)]
        sizes = translation.sizes(Variable(name) for name, _ in rule.variables)
        made = translation.sizes(t for side in (left, right) for t in subterms(side) if isinstance(t, Apply))
        premises = (*sizes, *translation.guard(), *translation.named, *translation.needs())
        body = z3.Implies(z3.And(premises), z3.And(sides[0] == sides[1], *made))
        body = _eliminated(body, sizes, sides)
        variables = translation.quantified([body])
        needed = {str(v) for v in variables}
        triggers = [s for s in sides if {str(c) for c in _free(s)} >= needed and s.num_args()]
        formulas += [z3.ForAll(variables, body, patterns=[s]) for s in triggers]
    return formulas


def _eliminated(body: Formula, sizes: list[Formula], sides: list[Number]) -> Formula:
    """Sizes that neither side names are replaced by the functions of tensors that they equal."""
    named = {str(c) for side in sides for c in _free(side)}
    swap: dict[str, tuple[Number, Number]] = {}
    for fact in sizes:
        function, size = fact.children()
        if z3.is_const(size) and str(size) not in named:
            swap.setdefault(str(size), (size, function))
    return z3.substitute(body, *swap.values()) if swap else body


def derives(rule: Equation, axioms: Mapping[str, Equation] = CATALOGUE, names: Iterable[str] = AXIOMS) -> bool:
    """Whether the rule follows from the named axioms, itself and its converse left out. False also for unknown."""
    goal = Translation(rule, _tensor(), "")
    try:
        equal = [goal.term(root) for root in rule.left]
        well_formed = goal.needs()  # of the graph that is matched
        equal = [a == goal.term(b) for a, b in zip(equal, rule.right, strict=True)]
        terms = {t for root in (*rule.left, *rule.right) for t in subterms(root)}
        facts = goal.sizes(sorted(terms, key=str))
    except RuleError:
        return False
    given = [*well_formed, *goal.guard(), *goal.positive()]
    used = tuple(axioms[name] for name in names if axioms[name].hash != rule.hash)
    return is_valid(z3.And(goal.needs()), given) and _follows(z3.And(equal), [*facts, *given], used)


def _follows(goal: Formula, given: Iterable[Formula], axioms: tuple[Equation, ...]) -> bool:
    solver = _with_axioms(axioms)
    solver.push()
    try:
        solver.add(*given, z3.Not(goal))
        return solver.check() == z3.unsat
    finally:
        solver.pop()


@lru_cache(maxsize=64)
def _with_axioms(axioms: tuple[Equation, ...]) -> Solver:
    """A solver that knows these axioms: they are translated and asserted once."""
    solver = new_solver()
    solver.add(*(z3.simplify(f, som=True) for rule in axioms for f in axiom(rule, _tensor())))
    return solver
