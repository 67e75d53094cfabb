"""The formulas, for Z3, of a semantic term in the layouts that a rule claims.

Sizes are symbolic: factor g has size N_g ≥ 1, and the split factor f has size k·c for degree k ≥ 1 and chunk c ≥ 1.
Device p computes with size c; its local digit r stands for the global digit p·c + r. For every tensor, `S(d, n)` means:
dimension d is n blocks; local index l = b·w + rest (rest < w, the local block) is global index b·k·w + p·w + rest.

A term holds in its layouts if, for all digits,

* every local extent agrees with the layout, and blocks are whole;
* the local index of every operand and of the result denotes the operator's global index, so the bodies on both sides
  are applied to equal cells;
* the bodies are applied to equal positions;
* the local sums over all devices (`P`) or on each of them (otherwise) have exactly the terms of the global sum.

The first two claims are about one tensor and its own factors: `holds_alone` decides them once for all terms with such a
tensor. So a `concat` of 58 operands, each with a gradient, is proven by the claims of three tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps

from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.pattern import FactorDims, Pattern, letter
from shardwright.verifier.logic import Formula, Number, z3
from shardwright.verifier.rows.semantics import IndexTerm
from shardwright.verifier.solver import premises

K, CHUNK, DEVICE, LOCAL = z3.Int("k"), z3.Int("c"), z3.Int("p"), z3.Int("r")
Claim = tuple[str, Formula]


def _once(make: Callable[[Encoding, tuple[str, ...], bool], Number]) -> Callable[..., Number]:
    """Cache an expression of an encoding, so that its facts are given once; local only if it has the split factor."""

    @wraps(make)
    def made(self: Encoding, names: tuple[str, ...], local: bool = False) -> Number:
        key = (make.__name__, names, local and self.factor in names)
        if key not in self.made:
            self.made[key] = make(self, names, key[-1])
        return self.made[key]

    return made


class _Met(dict[str, Number]):
    """Numbers by factor; the facts about a factor's numbers are given at its first use."""

    def __init__(self, meet: Callable[[str], None]) -> None:
        super().__init__()
        self.meet = meet

    def __missing__(self, name: str) -> Number:
        self.meet(name)
        return self[name]


@dataclass
class Encoding:
    """The sizes and digits of a pattern, of which `factor` is split if given: global ones, and those of a device.

    `given` collects the assumptions about factors that claims have used.
    """

    pattern: Pattern
    factor: str | None
    given: list[Formula] = field(default_factory=list)
    made: dict[tuple[str, tuple[str, ...], bool], Number] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.given += [K >= 1, CHUNK >= 1, DEVICE >= 0, DEVICE < K]
        self.whole, self.part, self.digit, self.local_digit = (_Met(self._meet) for _ in range(4))

    def _meet(self, name: str) -> None:
        if name == self.factor:
            self.whole[name], self.part[name] = K * CHUNK, CHUNK
            self.digit[name], self.local_digit[name] = DEVICE * CHUNK + LOCAL, LOCAL
            self.given += [LOCAL >= 0, LOCAL < CHUNK]
            return
        size, digit = z3.Int(f"N_{name}"), z3.Int(f"i_{name}")
        self.whole[name] = self.part[name] = size
        self.digit[name] = self.local_digit[name] = digit
        self.given += [size >= 1, digit >= 0, digit < size]

    @property
    def sizes(self) -> list[Number]:
        """The free sizes, the degree first."""
        return [K, CHUNK, *(self.whole[name] for name in self.pattern.factors if name != self.factor)]

    @_once
    def product(self, names: tuple[str, ...], local: bool) -> Number:
        """Return the product of sizes, which is at least 1 (lemma `range` with a = d = 0)."""
        if not names:
            return z3.IntVal(1)
        total = (self.part if local else self.whole)[names[-1]]
        if len(names) == 1 and (local or names[0] != self.factor):
            return total  # given already
        total = self.product(names[:-1], local) * total
        self.given.append(total >= 1)
        return total

    @_once
    def index(self, names: tuple[str, ...], local: bool) -> Number:
        """Return the index of mixed-radix digits, major first."""
        if not names:
            return z3.IntVal(0)
        total = self.index(names[:-1], local) * (self.part if local else self.whole)[names[-1]]
        return total + (self.local_digit if local else self.digit)[names[-1]]

    @_once
    def within(self, names: tuple[str, ...], local: bool) -> Number:
        """Return the index of the last factors of a dimension, known to be below the product of their sizes."""
        value = self.index(names, local)
        if names:
            self.within(names[:-1], local)
            self.given.append(z3.And(value >= 0, value < self.product(names, local)))
        return value


def denoted(encoding: Encoding, members: tuple[str, ...], dim: int, placement: Placement) -> Number:
    """Return the global index along one dimension that the local index denotes in this layout."""
    if placement.kind != "S" or placement.dim != dim or encoding.factor not in members:
        return encoding.index(members, local=True)
    at = members.index(encoding.factor)
    block, rest = encoding.index(members[:at], local=True), encoding.within(members[at:], local=True)
    width = encoding.product(members[at:], local=True)
    return block * (K * width) + DEVICE * width + rest


def tensor_claims(encoding: Encoding, title: str, dims: FactorDims, placement: Placement) -> Iterator[Claim]:
    """Yield the claims about extents, blocks and indices of one tensor."""
    if placement.kind == "S" and not 0 <= placement.dim < len(dims):
        yield f"{title}: {placement} names a dimension of a tensor of rank {len(dims)}", z3.BoolVal(False)
        return
    unknown = [name for name in placement.blocks if name not in encoding.pattern.factors]
    if unknown:
        yield f"{title}: {placement} counts blocks by {unknown[0]!r}, not a factor of the pattern", z3.BoolVal(False)
        return
    for dim, members in enumerate(dims):
        sharded = placement.kind == "S" and placement.dim == dim
        if not sharded and encoding.factor not in members:
            continue  # local and global are the same expressions
        extent, local = encoding.product(members), encoding.product(members, local=True)
        yield f"{title} is {placement}: local extent of dimension {dim}", extent == local * (K if sharded else 1)
        if sharded and encoding.factor in members:
            tail = members[members.index(encoding.factor) :]
            width, rest = encoding.product(tail, local=True), encoding.within(tail, local=True)
            yield (
                f"{title} is {placement}: block of dimension {dim}",
                encoding.product(placement.blocks) * width == local,
            )
            yield f"{title} is {placement}: rest inside a block of dimension {dim}", z3.And(rest >= 0, rest < width)
        index = denoted(encoding, members, dim, placement)
        yield f"{title} is {placement}: index along dimension {dim}", index == encoding.index(members)


def holds_alone(dims: FactorDims, placement: Placement, factor: str | None) -> bool:
    """Return whether the claims about a tensor follow from the facts of its own factors, and so in every term."""
    names = {name: letter(i) for i, name in enumerate(dict.fromkeys(name for dim in dims for name in dim))}
    if not names.keys() >= set(placement.blocks):
        return False
    renamed = tuple(tuple(names[name] for name in dim) for dim in dims)
    blocks = tuple(names[name] for name in placement.blocks)
    return _holds(renamed, replace(placement, blocks=blocks), names.get(factor or ""))


@lru_cache(maxsize=65536)
def _holds(dims: FactorDims, placement: Placement, factor: str | None) -> bool:
    encoding = Encoding(Pattern((), dims, frozenset()), factor)
    with premises(encoding.given) as known:
        return all(known.imply(formula) for _, formula in tensor_claims(encoding, "", dims, placement))


def sum_claim(encoding: Encoding, term: IndexTerm) -> Claim:
    """Return the claim that both sides sum equally many terms; the lemma `split-sum` says that these correspond.

    Summed factors that are not split have the same number of terms on both sides.
    """
    partial = any(p.kind == "P" and i not in term.body.ignores for i, p in enumerate(term.operands))
    summed = tuple(name for name in term.pattern.summed if name == encoding.factor)
    local, whole = encoding.product(summed, local=True), encoding.product(summed)
    local = local * (K if term.result.kind == "P" else 1)
    return f"terms summed for a result in {term.result}", local == whole * (K if partial else 1)


def position_claims(encoding: Encoding, term: IndexTerm, offset: bool) -> Iterator[Claim]:
    """Yield the claims that the local body sees the global positions, if it gets the `offset` of its part.

    Together with the equality of operands' cells, bodies have equal arguments on both sides. The cell of a `P` operand
    is one summand on both sides: the lemma `additive-sum` takes the sum out of the body.
    """
    for name in term.body.positions:
        start = DEVICE * CHUNK if offset and name == encoding.factor else z3.IntVal(0)
        yield f"equal positions along {name}", start + encoding.local_digit[name] == encoding.digit[name]
