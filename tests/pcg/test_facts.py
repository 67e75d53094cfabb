"""What rows say of their operators, for the whole table: against NumPy, torch's memory and torch's autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.pcg.graph import Node, make_attrs
from shardwright.pcg.optable import ROWS, LocalShapes
from tests.each import each
from tests.pcg.run_torch import apply
from tests.samples import SAMPLES, Array, Sample

INTEGERS = [-4.0, -3.0, -2.0, 2.0, 3.0, 4.0]
EVERY_ROW = each("name", sorted(ROWS))


class Run:
    """A row on a sample in torch: operands, result, what autograd keeps, gradients for a cotangent of ones."""

    def __init__(self, name: str, sample: Sample) -> None:
        self.operands = [torch.from_numpy(np.asarray(a)).requires_grad_(a.dtype == np.float64) for a in sample.arrays()]
        node = Node("result", name, tuple(f"t{i}" for i in range(len(self.operands))), make_attrs(**sample.attrs))
        self.kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            self.result = apply(node, list(self.operands))

    def _keep(self, tensor: Tensor) -> Tensor:
        self.kept.append(tensor)
        return tensor

    @property
    def trained(self) -> list[Tensor]:
        return [x for x in self.operands if x.requires_grad]

    def gradients(self, cotangent: Tensor) -> list[Tensor]:
        found: list[Tensor | None] = list(torch.autograd.grad(self.result, self.trained, cotangent, allow_unused=True))
        return [g for g in found if g is not None]


def runs(name: str) -> Iterator[Run]:
    return (Run(name, sample) for sample in SAMPLES[name])


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def computed(name: str, arrays: list[Array], attrs: Any) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(ROWS[name].numpy(*arrays, **attrs))


@EVERY_ROW
def test_differentiable(name: str) -> None:
    """A gradient that is not zero goes through an operator that says so, and through no other."""
    found = [run for run in runs(name) if run.trained and run.result.is_floating_point()]
    flows = [run.gradients(torch.randn_like(run.result)) if run.result.requires_grad else [] for run in found]
    if found:
        assert ROWS[name].differentiable == any(bool(g.any()) for gradients in flows for g in gradients)


@EVERY_ROW
def test_fresh_results(name: str) -> None:
    """Partial sums are written over only where no operand, and nothing that autograd keeps, lies in their memory."""
    row = ROWS[name]
    own = all(memory(run.result) not in {memory(x) for x in (*run.operands, *run.kept)} for run in runs(name))
    signatures = (row.signature(sample.shapes, dict(sample.attrs)) for sample in SAMPLES[name])
    partial = bool(row.linear_in) or any(f.role == "sum" for signature in signatures for f in signature.factors)
    assert row.fresh == (own and partial and not row.aliases)


@EVERY_ROW
def test_fresh_gradients(name: str) -> None:
    """Gradients that may be overwritten are no memory that something else has, the gradient of the result included."""
    for run in runs(name):
        if not (ROWS[name].fresh_gradients and run.result.requires_grad):
            continue
        cotangent = torch.randn_like(run.result)
        gradients = run.gradients(cotangent)
        others = {memory(x) for x in (cotangent, run.result, *run.operands, *run.kept)}
        assert not others & {memory(g) for g in gradients}
        assert len({memory(g) for g in gradients}) == len(gradients)


@EVERY_ROW
def test_aliases(name: str) -> None:
    """A view is its operand's memory wherever that is contiguous; other results are it only where the row says so."""
    for run in runs(name):
        shared = memory(run.result) in {memory(x) for x in run.operands}
        assert shared if ROWS[name].view else not shared or ROWS[name].passes_on


SMALL = 0.2
"""Kept memory that no row counts, as a share of all: statistics of a norm, indices of few rows."""
NOT_AS_TORCH_ON_CPUS = {
    "sdpa": "fused kernels keep its operands, its result and a number for each query",
    "rms_norm": "CUDA's kernel keeps its operand; CPUs keep what it is composed of",
    "matmul": "a batch that is broadcast is copied on CPUs",
    "recurrent": "weights are views; all results lie in one tensor",
    "pow": "the exponent is a number where models use it, and then the result is not kept",
    "expert_linear": "the order of rows is small beside rows of usual width",
    "embedding": "where a table is split; else the index is kept",
    "rfft": "torch keeps an operand that it does not read",
    "scatter_sum": "torch keeps rows that it does not read",
    "scatter_max": "as many counts as places",
}


@EVERY_ROW
def test_what_is_kept_for_backward(name: str) -> None:
    """Operands, the result, and memory beside them, is what autograd keeps: so it can be offloaded, or made again."""
    row = ROWS[name]
    for sample, run in zip(SAMPLES[name], runs(name), strict=True):
        if not run.result.requires_grad or name in NOT_AS_TORCH_ON_CPUS:
            continue
        places: dict[int, int | str] = {memory(x): i for i, x in enumerate(run.operands)}
        places.setdefault(memory(run.result), "result")
        kept = {memory(x): x.untyped_storage().nbytes() for x in run.kept}
        shapes = LocalShapes.whole(row.signature(sample.shapes, dict(sample.attrs)))
        beside = sum(row.beside_bytes(item, shapes, "float64") for item in row.saves)
        rest = sum(size for place, size in kept.items() if place not in places)
        moved = beside + sum(x.nbytes for x in (*run.operands, run.result))
        assert abs(rest - beside) <= SMALL * moved, (dict(sample.attrs), rest, beside)
        large = {places[place] for place, size in kept.items() if place in places and size > SMALL * moved}
        assert large <= set(row.saves), (dict(sample.attrs), large)


@each("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_attention_keeps_the_log_sum_exp_of_each_query(dtype: torch.dtype) -> None:
    """In fp32 or wider. Torch keeps two numbers of a generator beside it."""
    shapes, row = ((2, 4, 24, 8), (2, 2, 16, 8), (2, 2, 16, 8)), ROWS["sdpa"]
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    kept = dict[int, int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(memory(x), x.nbytes), lambda x: x):
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    own = {memory(x) for x in (q, k, v, y)}
    shapes_of = LocalShapes.whole(row.signature(shapes, {"causal": False, "scale": None}))
    expected = sum(row.beside_bytes(item, shapes_of, str(dtype).removeprefix("torch.")) for item in row.saves)
    assert 0 <= sum(size for place, size in kept.items() if place not in own) - expected <= 16
    assert expected == 2 * 4 * 24 * max(4, dtype.itemsize)


def test_what_passes_its_operand_on() -> None:
    x = torch.ones(2, 3)
    attrs = {"cast": make_attrs(dtype="float32"), "contiguous": ()}
    assert {row.name for row in ROWS.values() if row.passes_on} == set(attrs)
    assert all(apply(Node("y", op, ("x",), given), [x]) is x for op, given in attrs.items())


@EVERY_ROW
def test_commutative(name: str) -> None:
    """Exchanged operands give the same, in every sample of two, for operators that say so and for no others."""
    pairs = [s for s in SAMPLES[name] if len(s.operands) == 2 and s.operands[0].dtype == s.operands[1].dtype]

    def same(sample: Sample) -> bool:
        a, b = sample.arrays()
        try:
            return np.array_equal(computed(name, [a, b], sample.attrs), computed(name, [b, a], sample.attrs))
        except (ValueError, IndexError):
            return False

    assert ROWS[name].commutative == (bool(pairs) and all(map(same, pairs)))


@EVERY_ROW
def test_moves(name: str) -> None:
    """Where the elements of the result come from, numbers that say their places tell; other numbers come from there."""
    row, seen = ROWS[name], []
    for sample in SAMPLES[name]:
        if not sample.operands or any(o.dtype != "float64" for o in sample.operands):
            continue
        arrays = sample.arrays()
        ends = np.cumsum([0, *(a.size for a in arrays)])
        places = computed(name, [np.arange(a.size, dtype=float).reshape(a.shape) + n for a, n in zip(arrays, ends)],  # noqa: B905
                          sample.attrs)  # fmt: skip
        known = np.isin(places, np.arange(ends[-1])).all() and places.dtype == np.float64
        flat = np.concatenate([a.ravel() for a in arrays])
        seen.append(known and np.array_equal(computed(name, arrays, sample.attrs), flat[places.astype(int)]))
    assert row.moves == (bool(seen) and all(seen) and row.differentiable)


@EVERY_ROW
def test_rounds(name: str) -> None:
    """Integers give other numbers, in every sample, where the row says so."""
    rng, seen = np.random.default_rng(0), []
    for sample in SAMPLES[name]:
        if sample.differentiable:
            arrays = [rng.choice(INTEGERS, a.shape) if a.dtype == np.float64 else a for a in sample.arrays()]
            result = computed(name, arrays, sample.attrs)
            seen.append(not np.array_equal(result, np.round(result)))
    assert ROWS[name].rounds == (bool(seen) and all(seen))


@EVERY_ROW
def test_indexes(name: str) -> None:
    """Integers below the size that they point into are what the operator takes; larger ones are another matter."""
    for sample in SAMPLES[name]:
        arrays = sample.arrays()
        for position, (operand, dim) in ROWS[name].indexes.items():
            dim = sample.attrs.get("dim", dim) if dim < 0 else min(dim, arrays[operand].ndim - 1)
            assert sample.operands[position].dtype == "int64"
            last = [a.copy() for a in arrays]
            last[position][...] = arrays[operand].shape[dim] - 1
            assert np.isfinite(computed(name, last, sample.attrs)).all()
            last[position][...] += 1
            with suppress(IndexError, ValueError):
                assert not computed(name, last, sample.attrs).any()  # zeros, or no loss


@EVERY_ROW
def test_free_attributes(name: str) -> None:
    """No shape depends on them, and the operator takes the value that stands for them."""
    row = ROWS[name]
    for sample in SAMPLES[name]:
        free = {key: value for key, value in row.free.items() if key in sample.attrs}
        assert free.keys() == row.free.keys()
        if name not in ("conv2d", "conv3d", "max_pool2d", "avg_pool2d"):  # there the samples' own windows decide
            shapes = [
                row.signature(sample.shapes, dict(attrs)).result_shape
                for attrs in (sample.attrs, {**sample.attrs, **free})
            ]
            assert shapes[0] == shapes[1]
        computed(name, sample.arrays(), {**sample.attrs, **free})


@EVERY_ROW
def test_numbers(name: str) -> None:
    """A Python number in the place of a tensor of no dimensions gives the same."""
    row = ROWS[name]
    for position in row.numbers:
        sample = SAMPLES[name][0]
        tensors = [torch.from_numpy(np.asarray(a)) for a in sample.arrays()]
        number = tensors[position].flatten()[0]
        given: list[Any] = [number if i == position else t for i, t in enumerate(tensors)]
        text = [f"operands[{i}]" for i in range(len(given))]
        expected = eval(row.torch.format(*text), {"torch": torch, "operands": given})
        given[position] = number.item()
        form, order = row.torch, text
        if row.with_number:
            form, order = row.with_number, [text[1 - position], text[position]]
        found = eval(form.format(*order), {"torch": torch, "operands": given})
        assert found.dtype == expected.dtype
        assert torch.allclose(found, expected, rtol=1e-15)
