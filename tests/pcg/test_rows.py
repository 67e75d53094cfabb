"""Every row of the op table is a homomorphism: running it on every device denotes running it once.

Over the whole catalogue: every sample, every factor that may be split, every set of operands that may be partial, R and
C, at degrees 2, 3 and 4 wherever sizes allow, and every pair of choices on two axes. A new row is tested as soon as it
has a sample in `tests/samples.py`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from shardwright.pcg.errors import GraphError
from shardwright.pcg.graph import Graph, Node, make_attrs
from shardwright.pcg.interpret import denote, run_devices, run_serial
from shardwright.pcg.optable import ROWS
from shardwright.pcg.types import is_float
from tests.each import each, some
from tests.pcg.typed import choices, leaf_node, make_mesh, possible, split_case
from tests.samples import SAMPLES, Sample, below, flags, real, sample


def assert_denotes(op: str, one: Sample, split: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    """Per-device execution denotes serial execution, for the operator and for all that leads to it."""
    case = split_case(op, one, split, make_mesh(*sizes))
    graph = case.graph
    whole, held = run_serial(graph, case.leaves), run_devices(graph, case.leaves)
    for name, value in graph.types.items():
        got, want = denote(held[name], value, graph.mesh), whole[name]
        if np.array_equal(got, want):  # as they are mostly; closeness takes ten times as long to see
            continue
        close = 1e-4 if want.dtype == np.float32 else 1e-9
        np.testing.assert_allclose(got, want, rtol=close, atol=close, err_msg=f"{op} {one.attrs} {split}: %{name}")


def test_every_row_has_samples() -> None:
    assert set(SAMPLES) == set(ROWS)


@each("op", ROWS)
def test_one_axis(op: str) -> None:
    for one in SAMPLES[op]:
        for choice, size in product(choices(op, one), (2, 3, 4)):
            if possible(op, one, (choice,), make_mesh(size)):
                assert_denotes(op, one, (choice,), (size,))


@each("op", some(ROWS, len(ROWS) // 2))
def test_two_axes(op: str) -> None:
    for one in SAMPLES[op][:2]:
        for split in product(choices(op, one), repeat=2):
            sizes = (2, 3) if possible(op, one, split, make_mesh(2, 3)) else (2, 2)
            if possible(op, one, split, make_mesh(*sizes)):
                assert_denotes(op, one, split, sizes)


def blocked(op: str, one: Sample) -> list[str]:
    """Every factor that may be split, within two and three blocks."""
    if ROWS[op].random or ROWS[op].offset is not None:
        return []
    plain = [c for c in choices(op, one) if c not in ("R", "C") and not c[1:2].isdigit() and "," not in c]
    return [f"{c}/{blocks}" for c in plain for blocks in (2, 3)]


@each("op", ROWS)
def test_one_axis_within_blocks(op: str) -> None:
    for one in SAMPLES[op]:
        for choice, size in product(blocked(op, one), (2, 3)):
            if possible(op, one, (choice,), make_mesh(size)):
                assert_denotes(op, one, (choice,), (size,))


def test_blocks_and_plain_parts_of_one_factor_on_two_axes() -> None:
    one = sample(real(8, 12, 24), real(48, 24))
    for split in (("o", "o/4"), ("o/4", "o"), ("o/3", "o/3"), ("o/2", "i/3"), ("_1/2", "o/3")):
        assert possible("linear", one, split, make_mesh(2, 2))
        assert_denotes("linear", one, split, (2, 2))


def test_three_axes() -> None:
    one = sample(real(8, 12, 24), real(32, 24))
    for split in (("_0", "i", "o"), ("_0", "_0", "_0"), ("o", "P0", "_1"), ("o", "o", "i"), ("C", "P1", "i")):
        assert_denotes("linear", one, split, (2, 2, 2))


@each("op", ROWS)
def test_every_splittable_factor_is_tried(op: str) -> None:
    """A sample that no degree divides would test nothing."""
    tried = {
        c for one in SAMPLES[op] for c in choices(op, one) for n in (2, 3, 4) if possible(op, one, (c,), make_mesh(n))
    }
    assert {c for one in SAMPLES[op] for c in choices(op, one)} <= tried


@each("op", ROWS)
def test_inference_agrees_with_numpy(op: str) -> None:
    """Shape and kind of the result; the interpreter itself checks shapes."""
    for one in SAMPLES[op]:
        case = split_case(op, one, (), make_mesh())
        result, value = case.graph.types[case.result], run_serial(case.graph, case.leaves)[case.result]
        kind = "f" if is_float(result.dtype) else "b" if result.dtype == "bool" else "i"
        assert (value.shape, value.dtype.kind) == (result.shape, kind)


@each("op", ROWS)
def test_what_does_not_fit_is_refused_by_name(op: str) -> None:
    """No row crashes on operands or attributes that it does not expect; the error names the operator."""
    for one, rank, missing in product(SAMPLES[op], range(4), range(2)):
        leaves = [leaf_node(f"x{i}", (4, 8, 12)[:rank], o.dtype) for i, o in enumerate(one.operands)][missing:]
        node = Node("y", op, tuple(x.name for x in leaves), make_attrs(**one.attrs))
        for attrs in (node.attrs, node.attrs[1:], tuple((key, "wrong") for key, _ in node.attrs)):
            assert complaint(Graph((*leaves, replace(node, attrs=attrs)), ())).startswith(("%y = ", "none"))


def complaint(graph: Graph) -> str:
    """The error of inference, or none."""
    try:
        graph.validate()
    except GraphError as error:
        return str(error)
    return "none"


# ---- what samples cannot show ----


@each(
    ("op", "one"),
    [
        ("contiguous", sample(real())),
        ("neg", sample(real())),
        ("sum", sample(real(), dims=(), keepdim=False)),
        ("permute", sample(real(), dims=())),
        ("reshape", sample(real(), shape=(1, 1))),
        ("reshape", sample(real(1, 4), shape=(2, 1, 2))),
        ("expand", sample(real(1), shape=(1,))),
        ("add", sample(real(1), real(4, 1))),
        ("add", sample(real(0), real(1))),
        ("sum", sample(real(0, 4), dims=(0,), keepdim=False)),
        ("slice", sample(real(8), dim=0, start=5, stop=3, step=1)),
        ("cast", sample(real(4), dtype="bfloat16")),
        ("full", sample(shape=(4,), value=1.0, dtype="bfloat16")),
        ("arange", sample(start=0, stop=4, step=1, dtype="bfloat16")),
        ("cumsum", sample(real(4), dim=0, dtype="bfloat16")),
        ("dropout", sample(real(4), p=1.0, seed=0)),
    ],
)
def test_corners(op: str, one: Sample) -> None:
    for choice in choices(op, one):
        if possible(op, one, (choice,), make_mesh(2)):
            assert_denotes(op, one, (choice,), (2,))


@each(
    ("op", "one", "sets"),
    [
        ("cast", sample(real(4), dtype="float32"), ((0,),)),
        ("cast", sample(below(9, 4), dtype="float32"), ((0,),)),
        ("cast", sample(below(9, 4), dtype="int32"), ((0,),)),
        ("cast", sample(real(4), dtype="int64"), ()),
        ("cast", sample(real(4), dtype="bool"), ()),
        ("cast", sample(flags(4), dtype="float32"), ()),
        ("cumsum", sample(real(4), dim=0, dtype="int64"), ()),
        ("mul", sample(flags(4), flags(4)), ()),
        ("mul", sample(below(9, 4), real(4)), ((0,), (1,))),
        ("where", sample(flags(4), real(4), real(4)), ((1, 2),)),
    ],
)
def test_partial_sets_depend_on_dtypes(op: str, one: Sample, sets: tuple[tuple[int, ...], ...]) -> None:
    assert ROWS[op].partial_sets(one.dtypes, one.attrs) == sets
