"""Row rules: the ways to run one operator along one mesh axis, derived mechanically from the op table.

A rule reads

    op(x, y, …) = combine/reduce( op(partition/replicate(x), partition/replicate(y), …) )

and says which layout each operand must have and which the result gets. It is generic in all sizes and in the degree k.
Per row and factor pattern there is one rule for every choice that the row offers (`pcg.offers`). `derive` takes the
layouts from the choice, evaluated at sizes that are distinct primes, so that a number of blocks says which factors it
is the product of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from shardwright.pcg.choice import Choice, Choices
from shardwright.pcg.errors import GraphError, RuleError
from shardwright.pcg.factors import Signature
from shardwright.pcg.layout import Layout
from shardwright.pcg.offers import alone, parse_choice, sending
from shardwright.pcg.optable import ROWS, Row, keep_attrs
from shardwright.substitutions import fields
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.pattern import Pattern, pattern_of
from shardwright.substitutions.rules.primes import primes


@dataclass(frozen=True, slots=True)
class RowRule:
    """A way to run an operator along one mesh axis.

    row        the op-table row
    pattern    its factor pattern
    choice     in the pattern's names of factors
    operands   the layout of each operand
    result     the layout of the result
    guard      conditions: "k | a" (the degree divides factor a), "numeric" (the result is not of bools), "additive 0,1"
               (those operands are numbers, and the result does not round them to integers)
    local      what the local operator is told about its device: "attrs" (localized attributes), "offset" (where its
               part of the row's offset factor begins), "shard" (its part of the global random draw)
    """

    row: str
    pattern: str
    choice: Choice
    operands: tuple[Placement, ...]
    result: Placement
    guard: tuple[str, ...] = ()
    local: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.row} [{self.pattern}] by {self.choice}"

    @property
    def factor(self) -> str | None:
        """The factor of the split that the rule has or is composed of; None: of none."""
        return next(iter(self.choice.factors), None)

    @property
    def equation(self) -> str:
        """The rule as one line."""
        operands = ", ".join(f"x{i}:{p}" for i, p in enumerate(self.operands))
        where = f" where {' and '.join(self.guard)}" if self.guard else ""
        return f"{self.row}({operands}) : {self.result}{where}"

    def shapes(self) -> Pattern:
        """Return the parsed pattern."""
        return Pattern.parse(self.pattern, len(self.operands))

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form (docs/rules.md)."""
        return {
            "form": "row", "row": self.row, "pattern": self.pattern, "choice": self.choice,
            "operands": [str(p) for p in self.operands], "result": str(self.result),
            "guard": list(self.guard), "local": list(self.local),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RowRule:
        """Read the JSON form. Raises a `RuleError` that names the rule, the field and the mistake."""
        with fields.located(f"row rule {fields.name_of(data, 'row')!r}"):
            record = fields.record(data, _REQUIRED, _OPTIONAL)
            rule = cls(
                fields.text(record, "row"), fields.text(record, "pattern"), fields.one(record, "choice", parse_choice),
                fields.each(record, "operands", Placement.parse), fields.one(record, "result", Placement.parse),
                fields.texts(record, "guard"), fields.texts(record, "local"),
            )  # fmt: skip
            _check(rule)
        return rule

    @property
    def hash(self) -> str:
        """The digest that names the rule."""
        return fields.digest(self.to_json())


_REQUIRED = ("row", "pattern", "choice", "operands", "result")
_OPTIONAL = ("form", "guard", "local")
_CHOICE = re.compile(r"R|C|P\d+(,\d+)*|[a-z]\d*([>@][a-z]\d*)?")
_GUARD = re.compile(r"k \| [a-z]\d*|numeric|additive \d+(,\d+)*")
_LOCAL = ("attrs", "offset", "shard")


def _check(rule: RowRule) -> None:
    """Raise a `RuleError` unless a row rule that comes from outside is well formed, before anyone tries to prove it."""
    if rule.row not in ROWS:
        raise RuleError(f"field 'row': operator {rule.row!r} has no row in the op table")
    with fields.located("field 'pattern'"):
        pattern = rule.shapes()
    if len(pattern.factors) > len(_PRIMES):
        raise RuleError(f"field 'pattern': {len(pattern.factors)} factors; at most {len(_PRIMES)} are supported")
    check_pattern(rule)
    if not _CHOICE.fullmatch(rule.choice) or not set(pattern.factors).issuperset(rule.choice.factors):
        raise RuleError(
            f"field 'choice': {rule.choice!r} is none of R, C, P with operands (P0 or P0,1), or a factor of "
            f"{rule.pattern!r}, or two for a dispatch (a>b) or a ring (a@b)"
        )
    if (last := max(rule.choice.partial, default=-1)) >= len(rule.operands):
        raise RuleError(f"field 'choice': {rule.choice!r} names operand {last} of {len(rule.operands)}")
    tensors = [*((f"operands[{i}]", p) for i, p in enumerate(rule.operands)), ("result", rule.result)]
    for (key, placement), dims in zip(tensors, pattern.tensors, strict=True):
        if placement.kind == "S" and placement.dim >= len(dims):
            raise RuleError(f"field {key!r}: {placement} shards dimension {placement.dim} of {len(dims)}")
        if odd := [name for name in placement.blocks if name not in pattern.factors]:
            raise RuleError(f"field {key!r}: {placement}: {odd[0]!r} is not a factor of {rule.pattern!r}")
    for key, values, good in (
        ("guard", rule.guard, lambda g: _GUARD.fullmatch(g) is not None),
        ("local", rule.local, lambda x: x in _LOCAL),
    ):
        for i, value in enumerate(values):
            if not good(value):
                wanted = "'k | a', 'numeric' or 'additive 0'" if key == "guard" else "attrs, offset or shard"
                raise RuleError(f"field '{key}[{i}]': {value!r} is none of {wanted}")


def check_pattern(rule: RowRule) -> None:
    """Raise a `RuleError` where the operands' shapes decide the row's factors, and the row never has the pattern."""
    row, pattern, text = ROWS[rule.row], rule.shapes(), rule.pattern
    if not isinstance(row.factors, str):
        return
    sizes = dict(zip(pattern.factors, _PRIMES, strict=False))
    try:
        row_pattern, _ = pattern_of(row.signature(pattern.shapes(sizes)[:-1], {}))
    except GraphError as error:
        raise RuleError(f"field 'pattern': {row.name} never has the pattern {text!r}: {error}") from None
    if not _refines(pattern, row_pattern):
        raise RuleError(
            f"field 'pattern': {row.name} never has the pattern {text!r}; on these operands it is '{row_pattern}'"
        )


def _refines(pattern: Pattern, row_pattern: Pattern) -> bool:
    """Return whether `pattern` is `row_pattern` with some factors as products, and all fixed factors still fixed."""
    parts: dict[str, tuple[str, ...]] = {}
    for mine, dims in zip(pattern.tensors, row_pattern.tensors, strict=True):
        if len(mine) != len(dims):
            return False
        for product, factors in zip(mine, dims, strict=True):
            if (len(factors) > 1 and len(factors) != len(product)) or (not factors and product):
                return False
            split = [product] if len(factors) == 1 else [(name,) for name in product]
            if any(parts.setdefault(factor, part) != part for factor, part in zip(factors, split, strict=True)):
                return False
    names = [name for part in parts.values() for name in part]
    fixed = {name for factor, part in parts.items() if factor in row_pattern.fixed for name in part}
    return len(set(names)) == len(names) and fixed <= pattern.fixed


_PRIMES = tuple(islice(primes(), 512))
"""The sizes that tell factors apart: a concat of n operands has n factors, and those of its other dims."""


@lru_cache(maxsize=65536)
def derive(row_name: str, pattern: Pattern, choice: Choice) -> RowRule:
    """Return the row's rule for one choice, in the pattern's names of factors.

    Raises `LayoutError` where the row does not offer the choice, `RuleError` for a pattern of more factors than primes.
    """
    row, factors = ROWS[row_name], pattern.factors
    if len(factors) > len(_PRIMES):
        raise RuleError(f"{row_name}: a pattern of {len(factors)} factors; at most {len(_PRIMES)} are supported")
    primes, signature = dict(zip(factors, _PRIMES, strict=False)), signature_of(pattern)
    layouts, result = choice.layouts(signature, row)

    def symbolic(layout: Layout) -> Placement:
        blocks = tuple(name for name, prime in primes.items() if layout.blocks % prime == 0)
        return Placement(layout.kind, layout.dim, blocks)

    rule = RowRule(row_name, str(pattern), choice, tuple(map(symbolic, layouts)), symbolic(result))
    guard = tuple(_guard(rule, pattern))
    return RowRule(row_name, rule.pattern, choice, rule.operands, rule.result, guard, tuple(_local(row, rule, pattern)))


def signature_of(pattern: Pattern) -> Signature:
    """Return the factor string of a pattern at sizes that are distinct primes."""
    return pattern.signature(dict(zip(pattern.factors, _PRIMES, strict=False)))


def _guard(rule: RowRule, pattern: Pattern) -> Iterator[str]:
    yield from (f"k | {factor}" for factor in rule.choice.factors)
    if rule.factor in pattern.summed:
        yield "numeric"
    if rule.choice.partial:
        yield additive(rule.choice.partial)


def additive(partial: tuple[int, ...]) -> str:
    """Return the guard that partial operands need."""
    return "additive " + ",".join(map(str, partial))


def _local(row: Row, rule: RowRule, pattern: Pattern) -> Iterator[str]:
    """Yield what the local operator must be told. Only splits change the local problem."""
    if rule.factor is None:
        return
    if row.localize is not keep_attrs:
        yield "attrs"
    if row.offset is not None and rule.factor == offset_factor(row, pattern):
        yield "offset"
    if row.random:
        yield "shard"


def offset_factor(row: Row, pattern: Pattern) -> str | None:
    """Return the pattern's name of the factor along which the row counts positions, read from the row's own string."""
    if row.offset_at is not None:
        operand, dim = row.offset_at
        return next(reversed(pattern.operands[operand][dim]), None)
    if row.offset is None:
        return None
    if not isinstance(row.factors, str):
        pairs = zip(pattern.result, pattern.operands[-1], strict=True)
        return next((factors[0] for factors, other in pairs if factors != other and factors), None)
    sides = row.factors.partition("->")[0].split(",")
    for side, dims in zip(sides, pattern.operands, strict=True):
        tokens = side.split()
        if row.offset in tokens:
            at = tokens.index(row.offset)
            return dims[at - len(tokens) if "..." in tokens[:at] else at][0]
    return None


def choices(row: Row, pattern: Pattern) -> Choices:
    """Return every choice that the row offers for this pattern in which each device works by itself."""
    return alone(row, pattern.splittable)


def sending_choices(row: Row, pattern: Pattern) -> Choices:
    """Return every choice of the row in which devices send each other parts of operators of this pattern."""
    return sending(row, signature_of(pattern)) if row.sends or row.travels else ()
