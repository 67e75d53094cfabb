"""Factor strings: one einsum-like line per operator says how it may be split.

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
    """One factor of an operator's iteration space; `fixed` ones may not be split."""

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
        return tuple(prod(self.factors[f].size for f in dim) for dim in self.result)

    def index(self, name: str) -> int | None:
        """The factor of that name, or None."""
        return next((i for i, f in enumerate(self.factors) if f.name == name), None)

    def _layout(self, dims: tuple[tuple[int, ...], ...], factor: int, absent: Layout) -> Layout:
        for dim, members in enumerate(dims):
            if factor in members:
                before = members[: members.index(factor)]
                return S(dim, prod(self.factors[f].size for f in before))
        return absent

    def split_layouts(self, factor: int) -> tuple[tuple[Layout, ...], Layout]:
        """The layouts of the operands and of the result when `factor` is split over one axis."""
        operands = tuple(self._layout(dims, factor, C) for dims in self.operands)
        return operands, self._layout(self.result, factor, P)


def _tokens(side: str, text: str) -> list[str]:
    tokens = _TOKEN.findall(side)
    if "".join(tokens).replace(" ", "") != side.replace(" ", ""):
        raise GraphError(f"factor string {text!r}: cannot read {side.strip()!r}; expected names, 1, (a b), a! or ...")
    return tokens


def _members(token: str) -> list[tuple[str, bool]]:
    """The factors of one dimension's token, each with whether it is marked fixed."""
    if token == "1":
        return []
    return [(name.rstrip("!"), name.endswith("!")) for name in token.strip("()").split()]


@lru_cache(maxsize=16384)
def _resolve(text: str, shapes: tuple[Shape, ...], given: tuple[tuple[str, int], ...]) -> Signature:
    left, arrow, right = text.partition("->")
    if not arrow:
        raise GraphError(f"factor string {text!r}: no '->'")
    sides = [_tokens(side, text) for side in left.split(",")] if left.strip() or len(shapes) == 1 else []
    if len(sides) != len(shapes):
        raise GraphError(f"factor string {text!r}: {len(sides)} operands, got {len(shapes)} shapes {list(shapes)}")

    sizes = dict(given)
    fixed: set[str] = set()
    dims: list[list[list[str]]] = []
    leading = [shape[: len(shape) - (len(tokens) - 1)] if "..." in tokens else () for tokens, shape in zip(sides, shapes, strict=True)]
    depth = max((len(x) for x in leading), default=0)
    extents = [max((x[len(x) - i] for x in leading if len(x) >= i), default=1) for i in range(depth, 0, -1)]
    batch = [f"_{i}" for i in range(depth)]

    def expand(tokens: Sequence[str], shape: Shape | None) -> list[str]:
        """Replace `...` by the names of the leading dimensions that this operand really has."""
        if "..." not in tokens:
            return list(tokens)
        at = tokens.index("...")
        if shape is None:
            return [*tokens[:at], *(b if e != 1 else "1" for b, e in zip(batch, extents, strict=True)), *tokens[at + 1 :]]
        own = len(shape) - (len(tokens) - 1)
        if own < 0:
            raise GraphError(f"factor string {text!r}: shape {list(shape)} has too few dimensions")
        names = [
            "1" if shape[at + i] == 1 else batch[depth - own + i] for i in range(own)
        ]  # fmt: skip
        return [*tokens[:at], *names, *tokens[at + 1 :]]

    pending: list[tuple[list[str], int, str]] = []
    for tokens, shape in zip(sides, shapes, strict=True):
        tokens = expand(tokens, shape)
        if len(tokens) != len(shape):
            raise GraphError(f"factor string {text!r}: expected {len(tokens)} dimensions, got shape {list(shape)}")
        operand: list[list[str]] = []
        for token, extent in zip(tokens, shape, strict=True):
            names = [name for name, _ in _members(token)]
            fixed.update(name for name, mark in _members(token) if mark)
            operand.append(names)
            pending.append((names, extent, token))
        dims.append(operand)
    _solve_sizes(text, pending, sizes)

    result_tokens = expand(_tokens(right, text), None)
    result = [[name for name, _ in _members(token)] for token in result_tokens]
    fixed.update(name for token in result_tokens for name, mark in _members(token) if mark)

    order: dict[str, int] = {}
    for names in [n for operand in [*dims, result] for n in operand]:
        for name in names:
            order.setdefault(name, len(order))
    kept = {name for names in result for name in names}
    missing = [name for name in order if name not in sizes]
    if missing:
        raise GraphError(f"factor string {text!r}: the size of {missing[0]!r} does not follow from shapes {list(shapes)}")
    factors = tuple(
        Factor(name, sizes[name], "fixed" if name in fixed else "map" if name in kept else "sum") for name in order
    )
    return Signature(
        factors,
        tuple(tuple(tuple(order[n] for n in names) for names in operand) for operand in dims),
        tuple(tuple(order[n] for n in names) for names in result),
    )


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

    Raises `GraphError` naming the string and the dimension where shapes do not fit.
    """
    return _resolve(text, tuple(shapes), tuple(sorted((sizes or {}).items())))


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def reshape_factors(before: Shape, after: Shape) -> tuple[str, dict[str, int]]:
    """The factor string of a reshape: the coarsest common factorization of both shapes.

    `(96, 64) -> (8, 12, 64)` is `"(a b) c -> a b c"`. Where the shapes have no common refinement inside a group of
    dimensions (as 6 -> 4 x 3 out of 2 x 6), that group is fixed.
    """
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
    """A reshape that mixes digits: only a common leading part can be split, the rest is fixed."""
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
