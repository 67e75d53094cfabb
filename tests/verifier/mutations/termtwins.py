"""Wrong twins of rules made of terms: every mutation differs from the rule in one place.

    serial      another operator, swapped or repeated operands, an operator dropped, an attribute changed, another
                variable, roots swapped, a guard dropped, weakened, or said of another size
    placement   besides: a parallel operator dropped, moved past its neighbour or onto a sibling, replaced, turned to
                another axis, dimension or number of blocks; a variable in another layout

Some mutations are true rules too (`add(y, x)`; a variable in another layout that both sides take alike). A prover that
certifies one that is false is broken.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardwright.pcg.errors import RuleError
from shardwright.pcg.parallel import ADJOINT, PARALLEL_OPS, PARTITION
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression, expression
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.terms import Apply, Dims, Term, Variable

EquationTwin = tuple[str, Equation]
_Twin = tuple[str, Term]

_OTHER_OP = {
    "add": ("sub", "mul"), "sub": ("add",), "mul": ("add", "div"), "div": ("mul",), "maximum": ("minimum",),
    "minimum": ("maximum",), "neg": ("relu", "abs"), "relu": ("silu", "abs"), "silu": ("relu",), "gelu": ("relu",),
    "exp": ("tanh",), "log": ("exp",), "tanh": ("sigmoid",), "sigmoid": ("tanh",), "sqrt": ("rsqrt",),
    "rsqrt": ("sqrt",), "reciprocal": ("neg",), "abs": ("relu",), "softmax": ("log_softmax",),
    "log_softmax": ("softmax",), "amax": ("amin", "sum"), "amin": ("amax",), "sum": ("amax",),
    "layer_norm": ("rms_norm",), "rms_norm": ("layer_norm",),
}  # fmt: skip


def equation_twins(rule: Equation) -> Iterator[EquationTwin]:
    """Mutations of the right side and of the guard of an equation."""
    yield from _changed(rule, "right", lambda term: _mutations(term, rule))
    if len(rule.right) > 1:
        yield "roots swapped", replace(rule, right=rule.right[::-1])
    yield from guard_twins(rule)


def guard_twins(rule: Equation) -> Iterator[EquationTwin]:
    """The rule without a condition, and with others in its place."""
    for condition in rule.guard:
        rest = tuple(g for g in rule.guard if g != condition)
        yield f"without guard {condition}", replace(rule, guard=rest)
        for wrong in map(expression, _wrong_conditions(condition, rule)):
            if wrong not in rule.guard:
                yield f"guard {condition} → {wrong}", replace(rule, guard=(*rest, wrong))


def _wrong_conditions(condition: Expression, rule: Equation) -> Iterator[str]:
    """Divisibility of another size or the other way round, and orders that let one more number in, or are reversed."""
    match condition.tree:
        case ast.Compare(left=ast.BinOp(left=left, op=ast.Mod(), right=right), ops=[ast.Eq()]):
            dividend, divisor = ast.unparse(left), ast.unparse(right)
            others = sorted(rule.sizes - {dividend, divisor, *rule.parameters})[:_MOST_SIZES]
            yield from (f"{other} % {divisor} == 0" for other in others)
            yield f"{divisor} % ({dividend}) == 0"
            yield f"({dividend}) % {divisor} == 1"
            yield f"({dividend} * 2) % {divisor} == 0"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _WEAKER and _numbers(left, right):
            a, b = ast.unparse(left), ast.unparse(right)
            yield f"{a} {_WEAKER[type(op)]} ({b}) + {int(isinstance(op, ast.LtE | ast.Eq))}"
            yield f"{b} {_WEAKER[type(op)]} {a}"
        case _:
            return


def _numbers(*trees: ast.expr) -> bool:
    """Whether these are no permutations, which have no order."""
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return all(isinstance(call.func, ast.Name) and call.func.id == "len" for call in calls)


_MOST_SIZES = 3
_WEAKER: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<=", ast.Eq: "<="}


def placement_twins(rule: Equation) -> Iterator[EquationTwin]:
    """Mutations of a placement rule: of its terms, of its parallel operators on both sides, of its layouts.

    Every axis divides every size of these twins, so that each is judged for what it says, not for what it forgot to
    ask; what only a guard makes true is left without it as well.
    """
    yield from guard_twins(rule)
    yield from _placement_twins(_divided(rule))


def _divided(rule: Equation) -> Equation:
    """The rule with guards that every axis divides every size."""
    names = dict.fromkeys(n for _, dims in rule.variables for n in dims.names if not n.startswith("*"))
    wanted = [expression(f"{name} % {axis} == 0") for name in names for axis in rule.axes]
    return replace(rule, guard=(*rule.guard, *(g for g in wanted if g not in rule.guard)))


def _placement_twins(rule: Equation) -> Iterator[EquationTwin]:
    yield from ((what, twin) for what, twin in equation_twins(rule) if twin.guard == rule.guard)
    for side in ("left", "right"):
        yield from _changed(rule, side, lambda term: _parallel_mutations(term, rule))
    for at, (name, places) in enumerate(rule.layouts):
        for axis, place in enumerate(places):
            for wrong in _wrong_layouts(place, rule.dims[name]):
                changed = (name, (*places[:axis], wrong, *places[axis + 1 :]))
                layouts = (*rule.layouts[:at], changed, *rule.layouts[at + 1 :])
                yield f"{name} in {wrong} instead of {place}", replace(rule, layouts=layouts)
    if len(rule.axes) > 1:
        swapped = tuple((name, places[::-1]) for name, places in rule.layouts)
        yield "axes swapped in the layouts", replace(rule, layouts=swapped)


def term_twins(rule: Equation) -> Iterator[EquationTwin]:
    """The twins of an equation of either form; mutations that are no well-formed rule are left out."""
    return placement_twins(rule) if rule.axes else equation_twins(rule)


def _changed(rule: Equation, side: str, mutate: Callable[[Term], Iterator[_Twin]]) -> Iterator[EquationTwin]:
    roots: tuple[Term, ...] = getattr(rule, side)
    for at, root in enumerate(roots):
        for what, wrong in mutate(root):
            try:
                yield f"{side}: {what}", replace(rule, **{side: (*roots[:at], wrong, *roots[at + 1 :])})
            except RuleError:  # a bare variable on the left, a size that nothing binds
                continue


def _everywhere(term: Term, here: Callable[[Term], Iterator[_Twin]]) -> Iterator[_Twin]:
    """Mutations of this term and of everything inside it."""
    yield from here(term)
    if isinstance(term, Apply):
        for at, operand in enumerate(term.operands):
            for what, wrong in _everywhere(operand, here):
                yield what, replace(term, operands=(*term.operands[:at], wrong, *term.operands[at + 1 :]))


# ---- compute operators ----


def _mutations(term: Term, rule: Equation) -> Iterator[_Twin]:
    """Every term that differs from this one in one place, parallel operators aside."""
    return _everywhere(term, lambda t: _other_variable(t, rule) if isinstance(t, Variable) else _other_term(t, rule))


def _other_variable(term: Variable, rule: Equation) -> Iterator[_Twin]:
    for other, dims in rule.variables:
        if other != term.name and dims == rule.dims[term.name]:
            yield f"{term} → {other}", Variable(other)


def _other_term(term: Apply, rule: Equation) -> Iterator[_Twin]:
    if term.op in PARALLEL_OPS:
        return
    for op in _OTHER_OP.get(term.op, ()):
        if {"layer_norm", "rms_norm"} & {op} and len(term.operands) > 1 + (op == "layer_norm"):
            continue
        yield f"{term.op} → {op}", replace(term, op=op)
    for at in range(len(term.operands) - 1):
        a, b = term.operands[at : at + 2]
        if a != b:
            yield (
                f"{term.op} of swapped operands",
                replace(term, operands=(*term.operands[:at], b, a, *term.operands[at + 2 :])),
            )
            yield (
                f"{term.op} of the operand {a} twice",
                replace(term, operands=(*term.operands[:at], a, a, *term.operands[at + 2 :])),
            )
    if term.operands:
        yield f"{term.op} dropped", term.operands[0]
    for at, (key, value) in enumerate(term.attrs):
        for wrong in _wrong_attribute(key, value, rule):
            attrs = (*term.attrs[:at], (key, wrong), *term.attrs[at + 1 :])
            yield f"{key}={value} → {wrong}", replace(term, attrs=attrs)


def _wrong_attribute(key: str, value: Expression, rule: Equation) -> Iterator[Expression]:
    if key in ("start", "stop"):
        yield expression(f"{value} + 1")
        yield expression(f"{value} - 1")
    elif key == "dim":
        yield expression("1" if str(value) == "0" else "0")
    elif key == "dims" and str(value).startswith("compose"):
        p, q = sorted(value.names)
        yield expression(f"compose({q}, {p})")
        yield expression(p)
    elif key == "shape" and value.name is not None:
        yield from (expression(name) for name in sorted({"s", "t"} & rule.bound) if name != str(value))
    else:
        yield from _wrong_value(value)


def _wrong_value(value: Expression) -> Iterator[Expression]:
    """Other constants: a flag flipped, neighbours of a tuple swapped, a dimension moved by one, a number grown."""
    match value.tree:
        case ast.Constant(value=bool(flag)):
            yield expression(str(not flag))
        case ast.Constant(value=int(number)):
            yield expression(str(number + 1))
        case ast.Tuple(elts=[ast.Constant(value=int(number))]):
            yield expression(f"({number + 1},)")
            if number:
                yield expression(f"({number - 1},)")
        case ast.Tuple(elts=items):
            texts = [ast.unparse(item) for item in items]
            for at in range(len(texts) - 1):
                swapped = [*texts[:at], texts[at + 1], texts[at], *texts[at + 2 :]]
                if swapped != texts:
                    yield expression(f"({', '.join(swapped)})")
        case _:
            return


# ---- parallel operators ----


def _parallel_mutations(term: Term, rule: Equation) -> Iterator[_Twin]:
    return _everywhere(term, lambda t: _other_step(t, rule) if isinstance(t, Apply) else iter(()))


def _other_step(term: Apply, rule: Equation) -> Iterator[_Twin]:
    yield from _moved(term)
    if term.op not in PARALLEL_OPS:
        return
    (operand,), attrs = term.operands, dict(term.attrs)
    yield f"{term.op} dropped", operand
    for op in PARALLEL_OPS:
        if op != term.op:
            title = f"{term.op} → its adjoint {op}" if op == ADJOINT[term.op] else f"{term.op} → {op}"
            yield title, _step(op, operand, attrs)
    for axis in rule.axes:
        if axis != str(attrs["axis"]):
            yield f"{term.op} along {axis}", _step(term.op, operand, attrs | {"axis": expression(axis)})
    if term.op == PARTITION:
        dim = attrs["dim"]
        yield f"partition of dim {dim} + 1", _step(PARTITION, operand, attrs | {"dim": _next(dim)})
        if str(dim) != "0":
            yield "partition of dim 0", _step(PARTITION, operand, attrs | {"dim": expression("0")})
        if "blocks" in attrs:
            whole = {key: value for key, value in attrs.items() if key != "blocks"}
            yield "partition in one block", _step(PARTITION, operand, whole)
        else:
            yield "partition in 2 blocks", _step(PARTITION, operand, attrs | {"blocks": expression("2")})


def _next(dim: Expression) -> Expression:
    return expression(str(int(dim.text) + 1) if dim.text.isdecimal() else f"{dim} + 1")


def _step(op: str, operand: Term, attrs: dict[str, Expression]) -> Apply:
    wanted = {key: value for key, value in attrs.items() if key == "axis" or op == PARTITION}
    if op == PARTITION:
        wanted.setdefault("dim", expression("0"))
    return Apply(op, (operand,), tuple(sorted(wanted.items())))


def _moved(term: Apply) -> Iterator[_Twin]:
    """A step past its neighbour, f(step(x), y) → step(f(x, y)) and back, or onto another operand: f(x, step(y))."""
    if term.op in PARALLEL_OPS:
        (inner,) = term.operands
        if isinstance(inner, Apply) and inner.op not in PARALLEL_OPS:
            for at, operand in enumerate(inner.operands):
                pushed = replace(term, operands=(operand,))
                moved = (*inner.operands[:at], pushed, *inner.operands[at + 1 :])
                yield f"{term.op} moved to operand {at} of {inner.op}", replace(inner, operands=moved)
        return
    for at, operand in enumerate(term.operands):
        if not isinstance(operand, Apply) or operand.op not in PARALLEL_OPS:
            continue
        bare = (*term.operands[:at], operand.operands[0], *term.operands[at + 1 :])
        yield f"{operand.op} moved behind {term.op}", replace(operand, operands=(replace(term, operands=bare),))
        for other in range(len(term.operands)):
            if other != at:
                taken = replace(operand, operands=(bare[other],))
                moved = (*bare[:other], taken, *bare[other + 1 :])
                yield f"{operand.op} moved from operand {at} to {other}", replace(term, operands=moved)


def _wrong_layouts(place: Placement, dims: Dims) -> Iterator[Placement]:
    yield from (Placement(kind) for kind in "RCP" if kind != place.kind)  # type: ignore[arg-type]
    num_dims = len(dims.names)
    if place.kind == "S":
        yield Placement("S", place.dim + 1 if place.dim + 1 < num_dims else 0)
        if place.blocks:
            yield Placement("S", place.dim)
    elif num_dims:
        yield Placement("S", 0)
