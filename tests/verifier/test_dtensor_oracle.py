"""Row rules against DTensor's sharding propagation, in both directions. Every difference is listed with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as Placed

from shardwright.pcg.offers import parse_choice
from shardwright.pcg.optable import ROWS
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.pattern import pattern_of
from shardwright.substitutions.rules.rowrules import RowRule, choices, derive
from shardwright.verifier.falsifiers.falsify import falsify
from tests.each import in_whole_grids, some
from tests.samples import SAMPLES, Sample
from tests.verifier.catalogue import Case, admits, cases, pattern_for
from tests.verifier.dtensor import DEGREE, REDISTRIBUTES, REFUSES, fake_mesh, layout_of, placed, propagated, tensor


@dataclass(frozen=True)
class Difference:
    """Where DTensor answers otherwise than a certified rule: for these choices ("*": any) of a row, and why."""

    row: str
    choices: str
    answer: str
    reason: str
    pattern: str = ""

    def fits(self, case: Case, answer: str) -> bool:
        named = self.choices == "*" or case.rule.choice in self.choices.split()
        same_pattern = not self.pattern or case.rule.pattern == self.pattern
        return case.rule.row == self.row and named and same_pattern and answer.startswith(self.answer)


NO_PARTIAL = "DTensor does not know that the operator is linear in this operand and sums the partial values first"
NO_OPERATOR = "DTensor has no strategy for the operator, or takes it apart into some without"
TAKES_APART = "DTensor takes the product apart into views that it cannot keep sharded, because one operand is broadcast"
OWN_MASK = "DTensor marks the indices first, without communication; its partial sums then carry the mask of its own"
SORTS = "DTensor sorts the rows of all tokens together, which no shard of them is part of"
SCATTERS = "DTensor gathers rows that go to places, and the places"
WRONG_CONV = "DTensor's handler of convolutions looks at the batch and the width only: it names a wrong placement"

DIFFERENCES = (
    Difference("where", "P1,2", REDISTRIBUTES, NO_PARTIAL),
    Difference("cumsum", "P0", REDISTRIBUTES, NO_PARTIAL),
    Difference("gather", "P0", REDISTRIBUTES, NO_PARTIAL),
    Difference("adaptive_avg_pool2d", "P0", REDISTRIBUTES, NO_PARTIAL),
    Difference("embedding", "P0", REDISTRIBUTES, NO_PARTIAL),
    Difference("embedding", "a", REDISTRIBUTES, OWN_MASK),
    Difference("pick", "P0", REDISTRIBUTES, NO_PARTIAL),
    *(Difference(row, "*", REDISTRIBUTES, SCATTERS) for row in ("scatter_sum", "scatter_put")),
    Difference("pick", "a b c", REDISTRIBUTES, OWN_MASK),
    Difference("expand", "a b c", "R", "nothing is moved: DTensor keeps the whole result where the dimension is new"),
    Difference("matmul", "a P1", REDISTRIBUTES, TAKES_APART, "a b c d, b d e -> a b c e"),
    Difference("matmul", "d P0", REDISTRIBUTES, TAKES_APART, "a 1 b c, a d c e -> a d b e"),
    Difference("scatter_sum", "*", "R", "DTensor keeps all places on every device"),
    Difference("slice", "c", REDISTRIBUTES, "whole blocks are kept or dropped; DTensor gathers shards that it slices"),
    Difference("concat", "b", REDISTRIBUTES, "the shards of a concatenation are shards in blocks; DTensor gathers"),
    Difference("conv2d", "P0 P1 c f", "R", WRONG_CONV),
    Difference("conv2d", "b", REFUSES, "DTensor runs the shards with all groups, which the kernel refuses"),
    Difference("conv3d", "P0 P1 c g", "R", WRONG_CONV),
    Difference("conv3d", "b", REFUSES, "DTensor runs the shards with all groups, which the kernel refuses"),
    Difference("grouped_mm", "*", REFUSES, NO_OPERATOR),
    *(Difference(row, "*", REFUSES, NO_OPERATOR) for row in ("patches", "from_patches", "recurrent", "scatter_max")),
    *(Difference(row, "*", REFUSES, NO_OPERATOR) for row in ("expert_linear", "experts")),
    *(Difference(row, "*", REDISTRIBUTES, SORTS) for row in ("expert_linear", "experts")),
    Difference("embedding_bag", "*", REFUSES, NO_OPERATOR),
    Difference("sdpa", "*", REFUSES, "the kernel for grouped heads or partial values is taken apart into views and "
               "sums that do not take these shards"),
    Difference("sdpa", "d@f", REDISTRIBUTES, "keys travel around a ring; DTensor gathers them"),
    Difference("cross_entropy_sum", "R C", REFUSES, "a bug: the shape of a single target is taken for [1]", "a!,  ->"),
)  # fmt: skip


pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")


@pytest.fixture(autouse=True)
def _torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor as torch has it, whatever a compiled model in this process has put in the place of its operators."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    torchs = {op: handler for op, handler in handlers.items() if not handler.__module__.startswith("shardwright.")}
    monkeypatch.setattr(DTensor._op_dispatcher, "_custom_op_handlers", torchs)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as mesh:
        yield mesh


def sizes_of(row: str, given: Sample) -> dict[str, int]:
    signature = ROWS[row].signature(given.shapes, dict(given.attrs))
    _, names = pattern_of(signature)
    return {name: signature.factors[i].size for i, name in enumerate(names)}


def answers(mesh: DeviceMesh, row: str) -> Iterator[tuple[Case, Placed, Placed | str]]:
    """Every rule of a row on every sample that admits it: what the rule claims and what DTensor says."""
    for case in cases(row):
        for given in case.samples:
            sizes, factor = sizes_of(row, given), case.rule.factor
            if not given.operands or not admits(case.rule, given) or (factor and sizes[factor] % DEGREE):
                continue
            operands = [
                tensor(mesh, array, placed(placement.at(sizes)))
                for array, placement in zip(given.arrays(1), case.rule.operands, strict=True)
            ]
            yield case, placed(case.rule.result.at(sizes)), propagated(mesh, row, given.attrs, operands)


@pytest.mark.parametrize("row", some([row for row in SAMPLES if any(given.operands for given in SAMPLES[row])], 25))
def test_dtensor_agrees_with_every_certified_choice(mesh: DeviceMesh, row: str) -> None:
    seen: set[Difference] = set()
    for case, claimed, answer in answers(mesh, row):
        if answer == claimed:
            continue
        found = [d for d in DIFFERENCES if d.fits(case, str(answer))]
        assert found, f"{case.rule.equation} [{case.rule.pattern}] by {case.rule.choice}: DTensor says {answer}"
        seen.update(found)
    gone = {d for d in DIFFERENCES if d.row == row} - seen
    assert not gone, "listed differences that are gone"


# ---- the other direction ----

STRICTER = "true, and not offered: the row's factor string is stricter than the operator"
NO_MAXIMA = "DTensor has partial maxima and minima; our partial values are sums"
INSIDE = "DTensor's handler communicates inside the operator"
OFFERED: dict[tuple[str, str], str] = {
    ("concat", "P P P -> P"): STRICTER,
    ("concat", "P P -> P"): STRICTER,
    ("pad", "P -> P"): STRICTER + " (padded with zeros only, which a rule for all values cannot say)",
    ("gather", "R S(1) -> S(1)"): STRICTER,
    ("index_put", "P R P -> P"): STRICTER,
    ("index_put", "S(1) R S(1) -> S(1)"): STRICTER,
    ("rms_norm", "R P -> P"): STRICTER,
    ("sdpa", "R R P -> P"): STRICTER,
    ("sdpa", "R R S(3) -> S(3)"): STRICTER,
    ("sdpa", "R R P R -> P"): STRICTER,
    ("sdpa", "R R S(3) R -> S(3)"): STRICTER,
    ("amax", "S(0) -> P(max)"): NO_MAXIMA,
    ("amax", "S(1) -> P(max)"): NO_MAXIMA,
    ("amax", "S(2) -> P(max)"): NO_MAXIMA,
    ("amin", "S(0) -> P(min)"): NO_MAXIMA,
    ("amin", "S(1) -> P(min)"): NO_MAXIMA,
    ("amin", "S(2) -> P(min)"): NO_MAXIMA,
    ("adaptive_avg_pool2d", "S(3) -> P(avg)"): "DTensor has partial means; our partial values are sums",
    ("any", "S(1) -> P"): "a sum of bools over devices is an 'or' to DTensor; partial bools have no meaning here",
    ("any", "S(2) -> P"): "a sum of bools over devices is an 'or' to DTensor; partial bools have no meaning here",
    ("argmax", "S(1) -> R"): INSIDE,
    ("argmax", "S(2) -> R"): INSIDE,
    ("argmax", "P -> R"): INSIDE,
}
WRONG = {"conv2d": WRONG_CONV, "conv3d": WRONG_CONV}
"""Rows of which DTensor accepts what is false: no acceptance of theirs is a hint."""


def offered(row: str, given: Sample) -> dict[tuple[Placed, ...], set[Placed]]:
    """The certified placements of a row on one sample."""
    pattern, sizes = pattern_for(row, given), sizes_of(row, given)
    found: dict[tuple[Placed, ...], set[Placed]] = {}
    for choice in choices(ROWS[row], pattern):
        rule = derive(row, pattern, choice)
        if admits(rule, given):
            operands = tuple(placed(p.at(sizes)) for p in rule.operands)
            found.setdefault(operands, set()).add(placed(rule.result.at(sizes)))
    return found


def options(given: Sample, number: int) -> list[Placed]:
    """How an operand may be placed; a mask, the fourth, stays whole to keep the number of combinations low."""
    operand = given.operands[number]
    if number == 3:
        return [Replicate()]
    shards = [Shard(dim) for dim, extent in enumerate(operand.shape) if extent % DEGREE == 0]
    return [Replicate(), *([Partial()] if operand.dtype.startswith("float") else []), *shards]


def text(placement: Placed) -> str:
    return str(placement).replace("P(sum)", "P")


def accepted(mesh: DeviceMesh, row: str, given: Sample) -> Iterator[tuple[tuple[Placed, ...], Placed]]:
    """What DTensor takes as it stands and our row does not offer."""
    ours = offered(row, given)
    placements = [options(given, number) for number in range(len(given.operands))]
    made: list[list[DTensor]] = [
        [tensor(mesh, array, p) for p in own] for array, own in zip(given.arrays(1), placements, strict=True)
    ]
    for chosen in product(*(range(len(own)) for own in placements)):
        operands = tuple(placements[i][j] for i, j in enumerate(chosen))
        if len(operands) > 2 and {Partial, Shard} <= set(map(type, operands)):
            continue  # to keep the number of combinations low
        answer = propagated(mesh, row, given.attrs, [made[i][j] for i, j in enumerate(chosen)])
        if not isinstance(answer, str) and answer not in ours.get(operands, ()):
            yield operands, answer


def is_false(row: str, given: Sample, operands: tuple[Placed, ...], result: Placed) -> bool:
    """Whether our falsifier refutes the claim that the placements lead to this result."""
    layouts = [layout_of(p) for p in (*operands, result)]
    assert all(layout is not None for layout in layouts)
    places = [Placement(layout.kind, layout.dim) for layout in layouts if layout is not None]
    rule = RowRule(row, str(pattern_for(row, given)), parse_choice("C"), tuple(places[:-1]), places[-1], (), ("attrs",))
    return falsify(rule, given.arrays(1), dict(given.attrs), DEGREE) is not None


def samples_for_acceptance() -> Iterator[tuple[str, Sample]]:
    """A sample of every pattern; of the many patterns of attention, one without and one with a mask."""
    for row, samples in SAMPLES.items():
        by_pattern = {str(pattern_for(row, given)): given for given in reversed(samples) if given.operands}
        if row == "sdpa":
            by_pattern = {str(len(given.operands)): given for given in reversed(samples)}
        yield from ((row, given) for given in by_pattern.values())


@in_whole_grids
@pytest.mark.slow
def test_what_dtensor_accepts_and_we_do_not_offer_is_listed(mesh: DeviceMesh) -> None:
    seen: set[tuple[str, str]] = set()
    for row, given in samples_for_acceptance():
        for operands, result in accepted(mesh, row, given):
            if row in WRONG:
                continue
            key = (row, f"{' '.join(map(text, operands))} -> {text(result)}")
            assert key in OFFERED, f"{key} on {given.shapes}: DTensor takes this as it stands; offer it or say why not"
            seen.add(key)
            if OFFERED[key].startswith("true"):
                assert not is_false(row, given, operands, result), f"{key}: DTensor accepts it, but it is false"
    assert not OFFERED.keys() - seen, "listed, but DTensor no longer accepts them"


@pytest.mark.parametrize("row", WRONG)
def test_dtensor_accepts_what_is_false(mesh: DeviceMesh, row: str) -> None:
    given = SAMPLES[row][0]
    claims = [claim for claim in accepted(mesh, row, given) if layout_of(claim[1]) is not None]
    assert claims
    assert all(is_false(row, given, *claim) for claim in claims)


def test_torch_is_the_one_that_the_lists_were_made_with() -> None:
    assert torch.__version__.startswith("2.13"), "make the lists anew: they are of torch 2.13"
