"""Factor strings: an einsum-like line per operator that says how it may be split.

    linear       "... i, o i -> ... o"       i is absent from the result: it is summed
    layer_norm   "... h!, h!, h! -> ... h!"  h! is needed whole and may not be split
    reshape      "(b s) h -> b s h"          a dimension may be a product of factors, major first

Splitting factor f over a mesh axis gives every operand that has f a shard of the dimension that holds it, every other
operand a copy (`C`), and the result a shard, or, where f is summed away, a partial sum (`P`). Inside a product the
shard is blocked: splitting s of `(b s)` is `S(d, b)`. That rule, `split_layouts`, is the only place where the
parallelization of an operator is derived. The idea of the notation is Shardy's and einops'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from shardwright.pcg.errors import GraphError
from shardwright.pcg.layout import C, Layout, P, S

Shape = tuple[int, ...]
_TOKEN = re.compile(r"\.\.\.|\([^()]*\)|[a-zA-Z_]\w*!?|1")


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of an operator's iteration space; `fixed` ones may not be split."""

    name: str
    size: int
    role: Literal["map", "sum", "fixed"]


@dataclass(frozen=True, slots=True)
class Signature:
    """A factor string resolved for concrete shapes.

    `operands[i][d]` and `result[d]` list the indices into `factors` that make up that dimension, major first.
    """

    factors: tuple[Factor, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    result: tuple[tuple[int, ...], ...]

    @property
    def result_shape(self) -> Shape:
        return self.shape_of(self.result)

    def shape_of(self, dims: tuple[tuple[int, ...], ...]) -> Shape:
        """Return the shape of a tensor of these dimensions."""
        return tuple(prod(self.factors[f].size for f in dim) for dim in dims)

    def index(self, name: str) -> int | None:
        """Return the index of the factor of that name, or None."""
        return next((i for i, f in enumerate(self.factors) if f.name == name), None)

    def refined(self, factor: int, blocks: int) -> Signature:
        """Return the operator with a factor seen as `blocks` equal blocks: f becomes the product `(f_blocks f)`.

        Splitting f then gives blocked shards, as a fused QKV weight needs them. Raises `GraphError` if the factor
        does not fall into that many blocks.
        """
        whole = self.factors[factor]
        if whole.size % blocks:
            raise GraphError(f"factor {whole.name!r} has size {whole.size}, which does not fall into {blocks} blocks")
        outer = Factor(f"{whole.name}_blocks", blocks, "fixed")
        factors = (
            *self.factors[:factor],
            Factor(whole.name, whole.size // blocks, whole.role),
            *self.factors[factor + 1 :],
            outer,
        )
        new = len(self.factors)

        def refine(dims: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(x for f in dim for x in ((new, f) if f == factor else (f,))) for dim in dims)

        return Signature(factors, tuple(map(refine, self.operands)), refine(self.result))

    def _layout(self, dims: tuple[tuple[int, ...], ...], factor: int, absent: Layout) -> Layout:
        for dim, members in enumerate(dims):
            if factor in members:
                before = members[: members.index(factor)]
                return S(dim, prod(self.factors[f].size for f in before))
        return absent

    def split_layouts(self, factor: int) -> tuple[tuple[Layout, ...], Layout]:
        """Return the layouts of the operands and of the result when `factor` is split over one axis."""
        operands = tuple(self._layout(dims, factor, C) for dims in self.operands)
        return operands, self._layout(self.result, factor, P)


def _tokens(side: str, text: str) -> list[str]:
    tokens = _TOKEN.findall(side)
    if "".join(tokens).replace(" ", "") != side.replace(" ", ""):
        raise GraphError(f"factor string {text!r}: cannot read {side.strip()!r}; expected names, 1, (a b), a! or ...")
    return tokens


def _members(token: str) -> list[tuple[str, bool]]:
    """Return the factors of one dimension's token, each with whether it is marked fixed."""
    if token == "1":
        return []
    return [(name.rstrip("!"), name.endswith("!")) for name in token.strip("()").split()]


@lru_cache(maxsize=16384)
def _resolve(text: str, shapes: tuple[Shape, ...], given: tuple[tuple[str, int], ...]) -> Signature:
    sides, right = _read(text, shapes)
    members = [[_members(token) for token in tokens] for tokens in (*sides, right)]
    sizes = dict(given)
    pending = [
        ([name for name, _ in dim], extent, token)
        for dims, shape, tokens in zip(members, shapes, sides, strict=False)
        for dim, extent, token in zip(dims, shape, tokens, strict=True)
    ]
    _solve_sizes(text, pending, sizes)

    order: dict[str, int] = {}
    fixed: set[str] = set()
    for name, mark in (pair for dims in members for dim in dims for pair in dim):
        order.setdefault(name, len(order))
        fixed.update({name} if mark else ())
    mapped = {name for dim in members[-1] for name, _ in dim}
    missing = [name for name in order if name not in sizes]
    if missing:
        raise GraphError(
            f"factor string {text!r}: the size of {missing[0]!r} does not follow from shapes {_listed(shapes)}"
        )
    factors = tuple(
        Factor(name, sizes[name], "fixed" if name in fixed else "map" if name in mapped else "sum") for name in order
    )
    indices = [tuple(tuple(order[name] for name, _ in dim) for dim in dims) for dims in members]
    return Signature(factors, tuple(indices[:-1]), indices[-1])


def _read(text: str, shapes: tuple[Shape, ...]) -> tuple[list[list[str]], list[str]]:
    """Return the tokens of every operand's dimensions and of the result's, with `...` replaced by its dimensions."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise GraphError(f"factor string {text!r}: no '->'")
    sides = [_tokens(side, text) for side in left.split(",")] if left.strip() or len(shapes) == 1 else []
    if len(sides) != len(shapes):
        raise GraphError(
            f"factor string {text!r}: {len(sides)} operands, got {len(shapes)} of shapes {_listed(shapes)}"
        )
    leading: list[Shape] = []
    for tokens, shape in zip(sides, shapes, strict=True):
        num_leading = len(shape) - (len(tokens) - 1)
        if "..." in tokens and num_leading < 0:
            raise GraphError(f"factor string {text!r}: shape {list(shape)} has too few dimensions")
        if "..." not in tokens and num_leading != 1:
            raise GraphError(f"factor string {text!r}: expected {len(tokens)} dimensions, got shape {list(shape)}")
        at = tokens.index("...") if "..." in tokens else 0
        leading.append(shape[at : at + num_leading] if "..." in tokens else ())
    extents = _broadcast(leading)
    spread = [_spread(tokens, leading_dims, len(extents)) for tokens, leading_dims in zip(sides, leading, strict=True)]
    return spread, _spread(_tokens(right, text), extents, len(extents))


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the extents of shapes that are aligned at their ends; mismatches are found when sizes are solved."""
    rank = max(map(len, shapes), default=0)
    extents = ([shape[len(shape) - i] for shape in shapes if len(shape) >= i] for i in range(rank, 0, -1))
    return tuple(next((n for n in column if n != 1), 1) for column in extents)


def _spread(tokens: list[str], extents: Shape, rank: int) -> list[str]:
    """Return the tokens with `...` replaced by `1` or a factor for each of these extents, the last of `rank` in all."""
    if "..." not in tokens:
        return tokens
    at, skipped = tokens.index("..."), rank - len(extents)
    names = ["1" if extent == 1 else f"_{skipped + i}" for i, extent in enumerate(extents)]
    return [*tokens[:at], *names, *tokens[at + 1 :]]


def _listed(shapes: Sequence[Shape]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes) or "none"


def _solve_sizes(text: str, pending: list[tuple[list[str], int, str]], sizes: dict[str, int]) -> None:
    """Find every factor's size from the dimensions that hold it; products may leave one unknown each."""
    progress = True
    while pending and progress:
        progress = False
        for entry in list(pending):
            names, extent, token = entry
            unknown = [n for n in names if n not in sizes]
            if len(unknown) > 1:
                continue
            known = prod(sizes[n] for n in names if n in sizes)
            if unknown and known and extent % known == 0:
                sizes[unknown[0]] = extent // known
            elif unknown or known != extent:
                raise GraphError(f"factor string {text!r}: {token} should have size {known}, got {extent}")
            pending.remove(entry)
            progress = True


def resolve(text: str, shapes: Sequence[Shape], sizes: Mapping[str, int] | None = None) -> Signature:
    """Resolve a factor string for operand shapes; `sizes` gives factors that no operand determines.

    Raises `GraphError` naming the string and the dimension if shapes do not fit.
    """
    return _resolve(text, tuple(shapes), tuple(sorted((sizes or {}).items())))


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def reshape_factors(before: Shape, after: Shape) -> tuple[str, dict[str, int]]:
    """Return the factor string of a reshape: the coarsest common factorization of both shapes.

    `(96, 64) -> (8, 12, 64)` is `"(a b) c -> a b c"`. If the shapes have no common refinement inside a group of
    dimensions (as 6 -> 4 x 3 out of 2 x 6), that group is fixed. Raises `GraphError` if the sizes differ.
    """
    if prod(before) != prod(after):
        raise GraphError(
            f"reshape of {list(before)}, {prod(before)} elements, to {list(after)}, {prod(after)} elements"
        )
    sizes: dict[str, int] = {}
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    i = j = 0
    rest_i = rest_j = 1
    while True:
        while rest_i == 1 and i < len(before):
            rest_i, i = before[i], i + 1
        while rest_j == 1 and j < len(after):
            rest_j, j = after[j], j + 1
        if rest_i == 1 and rest_j == 1:
            break
        name = _LETTERS[len(sizes) % 26] + (str(len(sizes) // 26) if len(sizes) >= 26 else "")
        small, large = sorted((rest_i, rest_j))
        if small > 1 and large % small == 0:
            sizes[name] = small
            left[i - 1].append(name)
            right[j - 1].append(name)
            rest_i, rest_j = rest_i // small, rest_j // small
        else:
            return _whole_reshape(before, after)
    return _product_string(left, right), sizes


def _product_string(left: Sequence[Sequence[str]], right: Sequence[Sequence[str]]) -> str:
    def side(dims: Sequence[Sequence[str]]) -> str:
        return " ".join("1" if not d else d[0] if len(d) == 1 else "(" + " ".join(d) + ")" for d in dims)

    return f"{side(left)} -> {side(right)}"


def _whole_reshape(before: Shape, after: Shape) -> tuple[str, dict[str, int]]:
    """Return the factors of a reshape that mixes digits: a common leading part can be split, the rest is fixed."""
    common = 0
    while common < min(len(before), len(after)) and before[common] == after[common]:
        common += 1
    names = [_LETTERS[k] for k in range(common)]
    tail_before = [f"x{k}!" for k in range(len(before) - common)]
    tail_after = [f"y{k}!" for k in range(len(after) - common)]
    sizes = {n: before[k] for k, n in enumerate(names)}
    sizes |= {n[:-1]: before[common + k] for k, n in enumerate(tail_before)}
    sizes |= {n[:-1]: after[common + k] for k, n in enumerate(tail_after)}
    return f"{' '.join([*names, *tail_before])} -> {' '.join([*names, *tail_after])}", sizes
