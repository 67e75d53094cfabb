"""Every operator of the catalogue in pieces, whose certificate is that of a split in blocks.

Where n devices hold a factor and each cuts its part in k, piece q of all of them is slice q of each of n blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shardwright.pcg.choice import Split, needs_consecutive, uneven
from shardwright.pcg.graph import Node, make_attrs
from shardwright.pcg.interpret import denote, run_devices, run_serial, scatter
from shardwright.pcg.layout import S
from shardwright.pcg.optable import ROWS
from shardwright.pcg.types import TensorType
from shardwright.verifier.choices import Certified
from tests.each import each
from tests.pcg.typed import make_mesh, possible, split_case
from tests.samples import SAMPLES, Sample

DEVICES = PIECES = 2
NEEDS_NEIGHBOURS = "needs consecutive parts; it is not split in blocks"
BOOLS = "the result is of bools, which are not summed"
NOT_PROVEN = {("experts", "f")}
"""Factors whose pieces are refused though they would be right: a factor of a product in the row's own string."""


@pytest.fixture(scope="module")
def certified() -> Certified:
    return Certified()


def in_pieces(row: str) -> Iterator[tuple[Sample, str, Split]]:
    """The factors of the row's samples that devices may divide, and the split of which pieces are the members."""
    for given in SAMPLES[row]:
        for factor in ROWS[row].signature(given.shapes, given.attrs).factors:
            if factor.role != "fixed" and factor.size % (DEVICES * PIECES) == 0:
                yield given, factor.name, Split(factor.name, DEVICES)


def reason(certified: Certified, row: str, given: Sample, choice: Split) -> str:
    operands = [TensorType(x.shape, x.dtype) for x in given.operands]
    return certified.reason(Node("y", row, (), make_attrs(**given.attrs)), operands, choice) or ""


@each("row", SAMPLES)
def test_what_devices_divide_is_certified_in_pieces_unless_it_needs_its_neighbours(
    certified: Certified, row: str
) -> None:
    for given, name, choice in in_pieces(row):
        why = reason(certified, row, given, choice)
        neighbours = needs_consecutive(ROWS[row], name)
        assert (NEEDS_NEIGHBOURS in why) == neighbours, why
        if not neighbours and BOOLS not in why:
            assert bool(why) == ((row, name) in NOT_PROVEN), f"{row} {choice}: {why}"


@each("row", SAMPLES)
def test_results_of_pieces_are_put_together_or_added_up(certified: Certified, row: str) -> None:
    mesh = make_mesh(PIECES)
    for given, _, choice in in_pieces(row):
        spaced = uneven(ROWS[row], ROWS[row].signature(given.shapes, given.attrs), [choice], mesh.sizes) is None
        if spaced and not reason(certified, row, given, choice) and possible(row, given, [choice], mesh):
            case = split_case(row, given, [choice], mesh)
            held = denote(run_devices(case.graph, case.leaves)[case.result], case.graph.types[case.result], mesh)
            np.testing.assert_allclose(held, run_serial(case.graph, case.leaves)[case.result], err_msg=choice)


@each("blocks", [1, 3])
def test_the_gathered_pieces_of_parts_are_slices_of_blocks(blocks: int) -> None:
    devices, pieces = make_mesh(2), make_mesh(5)
    x = np.arange(60.0)
    parts = [scatter(part, (S(0, blocks),), pieces) for part in scatter(x, (S(0, blocks),), devices)]
    wanted = scatter(x, (S(0, blocks * 2),), pieces)
    for number in range(5):
        sent = [part[number] for part in parts]
        kind = TensorType((12,), "float64", (S(0, blocks),))
        np.testing.assert_array_equal(denote(sent, kind, devices), wanted[number])
