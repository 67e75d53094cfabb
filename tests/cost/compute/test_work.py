"""The kernels of operators: against torch's own count of FLOPs, and what splitting does to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from shardwright.cost.calibration.probes import dispatch_probes
from shardwright.cost.clusters.device import Device
from shardwright.cost.compute.compute import Compute
from shardwright.cost.compute.operators import NodeCost
from shardwright.cost.compute.work import WORK_KINDS, Passes
from shardwright.lowering.runtime import kernels
from shardwright.pcg.bounds import ALL, Band
from shardwright.pcg.choice import WHOLE, Split
from shardwright.pcg.graph import Node
from shardwright.pcg.layout import R, S, shard_order
from shardwright.pcg.offers import parse_choice
from shardwright.pcg.optable import ROWS
from shardwright.pcg.rows.experts import IMBALANCE
from shardwright.pcg.types import TensorType
from tests.each import each

COMPUTE = Compute(Device("test", 10**9, 1e10, {"fp32": 1e11}, 0.5, 1e-6, "cpu"))
Shape = tuple[int, ...]
CONV = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}


def costed(
    op: str,
    shapes: Sequence[Shape],
    attrs: Mapping[str, Any],
    sizes: tuple[int, ...] = (),
    untrained: Mapping[int, str] | None = None,
    band: Band = ALL,
) -> NodeCost:
    """An operator of float32 operands that all get a gradient, but those that are `untrained`, of these dtypes."""
    row, dtypes = ROWS[op], untrained or {}
    operands = [TensorType(s, dtypes.get(i, "float32"), (), i not in dtypes) for i, s in enumerate(shapes)]
    result = TensorType(row.signature(shapes, attrs).result_shape, "float32", (), True)
    node = Node("x", op, tuple(f"x{i}" for i in range(len(shapes))), tuple(sorted(attrs.items())))
    return NodeCost(node, operands, result, sizes, COMPUTE, (), "", band)


def whole(op: str, shapes: Sequence[Shape], attrs: Mapping[str, Any]) -> Passes:
    return costed(op, shapes, attrs).passes((), ((),) * len(shapes), ())


def flops(passes: Passes) -> tuple[float, float]:
    forward, backward = (sum(work.flops for work in works) for works in (passes.forward, passes.backward))
    return forward, backward


@each(
    ("op", "shapes", "untrained", "gradients"),
    [
        ("add", [(4,), (4,)], {}, 1.0),
        ("add", [(4,), (4,)], {1: "float32"}, 0.5),
        ("where", [(4,), (4,), (4,)], {0: "bool"}, 1.0),  # what is no float never has a gradient
        ("where", [(4,), (4,), (4,)], {0: "bool", 2: "float32"}, 0.5),
        ("sdpa", [(2, 4, 4), (2, 4, 4), (2, 4, 4), (4, 4)], {3: "float32"}, 1.0),  # one kernel for all
        ("relu", [(4,)], {0: "float32"}, 0.0),
        ("neg", [(4,)], {0: "int64"}, 0.0),
    ],
)
def test_the_share_of_gradients(op: str, shapes: list[Shape], untrained: dict[int, str], gradients: float) -> None:
    attrs = {"causal": False, "scale": None} if op == "sdpa" else {}
    found = costed(op, shapes, attrs, untrained=untrained).passes((), ((),) * len(shapes), ())
    assert found.gradients == gradients


# ---- against torch ----

CONTRACTIONS = [
    ("linear", [(6, 12, 64), (40, 64)], {}, F.linear),
    ("matmul", [(6, 12, 64), (6, 64, 40)], {}, torch.matmul),
    ("matmul", [(6, 12, 64), (64, 40)], {}, torch.matmul),
    ("conv2d", [(4, 6, 9, 11), (10, 6, 3, 3)], CONV, lambda x, w: F.conv2d(x, w, padding=1)),
    ("conv2d", [(4, 6, 9, 11), (10, 6, 3, 5)], CONV | {"stride": (2, 1), "padding": (0, 2)},
     lambda x, w: F.conv2d(x, w, stride=(2, 1), padding=(0, 2))),
    ("conv2d", [(4, 6, 9, 11), (10, 3, 3, 3)], CONV | {"groups": 2}, lambda x, w: F.conv2d(x, w, padding=1, groups=2)),
]  # fmt: skip


@each(("op", "shapes", "attrs", "call"), CONTRACTIONS)
def test_contractions_count_as_torch_does(op: str, shapes: list[Shape], attrs: dict[str, Any], call: Any) -> None:
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with FlopCounterMode(display=False) as forward:
        result = call(*operands)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    mine = flops(whole(op, shapes, attrs))
    assert mine[0] == forward.get_total_flops()
    if attrs.get("groups", 1) == 1:
        assert mine[1] == backward.get_total_flops()
    else:  # torch counts the gradient of a grouped weight once for every group
        assert mine[1] == 2 * mine[0] < backward.get_total_flops()


def test_attention_counts_as_torch_does_on_a_gpu() -> None:
    """torch's formulas, asked directly: its counter sees nothing of attention on a CPU. It ignores causal masks."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    q, k = (2, 4, 24, 16), (2, 4, 40, 16)
    passes = whole("sdpa", [q, k, k], {"causal": False, "scale": None})
    assert flops(passes) == (sdpa_flop_count(q, k, k), sdpa_backward_flop_count(q, q, k, k))
    assert passes.forward[0].shape == (8, 24, 40, 16)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_a_linear_layer_is_trained_with_6mnk(m: int, n: int, k: int) -> None:
    passes = whole("linear", [(m, k), (n, k)], {})
    assert sum(flops(passes)) == 6 * m * n * k
    assert [work.shape for work in passes.forward] == [(1, m, n, k)]
    assert [work.shape for work in passes.backward] == [(1, m, k, n), (1, k, n, m)]


# ---- shapes ----


def test_shapes_of_products() -> None:
    assert whole("matmul", [(5, 6, 12, 64), (5, 6, 64, 40)], {}).forward[0].shape == (30, 12, 40, 64)
    assert whole("matmul", [(6, 12, 64), (64, 40)], {}).forward[0].shape == (1, 72, 40, 64)
    conv = whole("conv2d", [(4, 6, 9, 11), (10, 3, 3, 3)], CONV | {"groups": 2})
    assert (conv.forward[0].kind, conv.forward[0].shape) == ("conv", (2, 4 * 9 * 11, 5, 3 * 9))


def test_gradients_of_convolutions_have_kernels_of_their_own_and_those_of_products_have_not() -> None:
    conv, linear = whole("conv2d", [(4, 6, 9, 11), (10, 6, 3, 3)], CONV), whole("linear", [(8, 4), (6, 4)], {})
    assert [work.backward for work in (*conv.forward, *conv.backward)] == [False, True, True]
    assert not any(work.backward for work in (*linear.forward, *linear.backward))


def test_a_causal_mask_leaves_out_what_it_hides() -> None:
    shapes = [(2, 4, 24, 16)] * 3
    full, causal = (whole("sdpa", shapes, {"causal": c, "scale": None}).forward[0] for c in (False, True))
    assert causal.flops == full.flops * 25 / 48
    assert causal.causal
    assert not full.causal


def test_the_last_part_of_causal_queries_has_the_most_work() -> None:
    shapes = [(2, 4, 24, 16)] * 3
    node = costed("sdpa", shapes, {"causal": True, "scale": None}, (3,))
    rows, whole_keys = (S(2),), (R,)
    found = node.passes((Split("q"),), (rows, whole_keys, whole_keys), rows)
    pairs = [sum(range(8 * part + 1, 8 * part + 9)) for part in range(3)]  # of a query and a key that it sees
    assert sum(pairs) == 24 * 25 // 2
    assert found.forward[0].flops == 2 * 4 * pairs[-1] * 2 * (16 + 16)
    assert found.backward[0].flops == 2.5 * found.forward[0].flops


def test_shared_key_heads_save_bytes_and_no_products() -> None:
    attrs = {"causal": False, "scale": None}
    alone = whole("sdpa", [(2, 4, 24, 16)] * 3, attrs).forward[0]
    shared = whole("sdpa", [(2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16)], attrs).forward[0]
    assert (shared.shape, shared.flops) == (alone.shape, alone.flops)
    assert alone.num_bytes - shared.num_bytes == 2 * 2 * 2 * 24 * 16 * 4


def test_what_moves_nothing_has_no_kernel() -> None:
    for passes in (whole("reshape", [(4, 8)], {"shape": (32,)}), whole("permute", [(4, 8)], {"dims": (1, 0)})):
        assert [work.kind for work in (*passes.forward, *passes.backward)] == ["view", "view"]


def test_a_broadcast_operand_gets_a_sum() -> None:
    bias = whole("add", [(16, 8), (8,)], {}).backward
    assert [work.kind for work in bias] == ["view", "reduction"]
    expanded = whole("expand", [(1, 8)], {"shape": (16, 8)}).backward
    assert [work.kind for work in expanded] == ["reduction"]


def test_dropout_draws_the_whole_mask_on_every_device() -> None:
    cost = costed("dropout", [(8, 16)], {"p": 0.1, "seed": 0}, (2,))
    row, signature = ROWS["dropout"], ROWS["dropout"].signature([(8, 16)], {})
    choice = Split(signature.factors[0].name)
    operands, result = choice.layouts(signature, row)
    passes = cost.passes((choice,), ((operands[0],),), (result,))
    assert [(work.kind, work.shape) for work in passes.forward] == [("random", (8 * 16,))]


# ---- every operator that has a sample ----


@each("probe", dispatch_probes("float32"), ids=lambda probe: probe.op)
def test_every_operator_has_work(probe: Any) -> None:
    found = probe.passes()
    assert found.forward
    for work in (*found.forward, *found.backward):
        assert work.kind in WORK_KINDS
        assert work.num_bytes >= 0 <= work.flops
        assert min(work.shape) >= 1
        assert COMPUTE.work_s(work) >= 0
        if work.kind in ("matmul", "conv"):
            assert work.flops == 2 * prod(work.shape)


@each("probe", dispatch_probes("float32"), ids=lambda probe: probe.op)
def test_splitting_never_makes_more_work(probe: Any) -> None:
    """In two along each factor that may be split: no device has more FLOPs than before, contractions have half.

    Of experts the fullest device counts, and of causal attention the one with the last queries.
    """
    shapes = [tuple(2 * extent for extent in shape) for shape in probe.shapes]
    attrs = dict(probe.attrs)
    if probe.op in ("reshape", "expand", "concat", "slice", "conv2d", "embedding_bag"):
        shapes = list(probe.shapes)
    row = ROWS[probe.op]
    signature = row.signature(shapes, attrs)
    before = costed(probe.op, shapes, attrs, (2,))
    whole_flops = flops(before.passes((WHOLE,), ((R,),) * len(shapes), (R,)))
    for factor in signature.factors:
        if factor.role == "fixed" or factor.size % 2:
            continue
        choice = Split(factor.name)
        operands, result = choice.layouts(signature, row)
        if isinstance(shard_order(signature.result_shape, (result,), (2,)), str):
            continue
        part = flops(before.passes((choice,), tuple((x,) for x in operands), (result,)))
        assert all(mine <= all_ for mine, all_ in zip(part, whole_flops, strict=True)), factor
        if row.contraction and (probe.op, factor.name) != ("experts", "o"):  # of which only the last product has it
            fullest = IMBALANCE if factor.name == row.offset else 1.0
            if probe.op == "sdpa" and factor.name == row.offset:  # causal: the last queries see the most keys
                fullest = 2 * sum(range(factor.size // 2 + 1, factor.size + 1)) / sum(range(factor.size + 1))
            assert part[0] * 2 == pytest.approx(fullest * whole_flops[0], rel=1e-12), factor


# ---- experts ----

EXPERTS = [(24, 12), (24, 4), (24, 4), (8, 12, 32), (8, 16, 20)]


def experts(split: str, size: int) -> tuple[NodeCost, Passes, float]:
    """A network of experts under a split: its passes, and what it keeps inside."""
    cost = costed("experts", EXPERTS, {"activation": "silu"}, (size,), {1: "int64"})
    assert cost.signature is not None
    choice = parse_choice(split)
    needs, result = choice.layouts(cost.signature, ROWS["experts"])
    layouts = tuple((need,) for need in needs)
    cost.kept = ("inside",)
    return cost, cost.passes((choice,), layouts, (result,)), cost.kept_bytes((choice,), layouts, (result,))


def products(passes: Passes) -> float:
    return sum(work.flops for work in (*passes.forward, *passes.backward) if work.kind == "matmul")


@each(("split", "size", "part"), [("_0", 4, 1 / 4), ("k", 4, 1 / 4), ("f", 4, 1 / 4), ("e", 4, IMBALANCE / 4)])
def test_experts_are_divided_by_tokens_units_and_number(split: str, size: int, part: float) -> None:
    """Where experts are split, a step waits for the device that has most rows."""
    (cost, whole, kept), (_, mine, own) = experts("R", size), experts(split, size)
    assert products(whole) == 3 * ROWS["experts"].flops(cost.signature)  # type: ignore[arg-type]
    assert products(mine) == pytest.approx(part * products(whole))
    assert own == pytest.approx(kept * (part if split != "f" else (12 + 64 / 4 + 20) / (12 + 64 + 20)))
    assert (whole.groups, mine.groups) == (16, 4 if split == "e" else 16)


def test_experts_keep_inside_what_autograd_keeps() -> None:
    """Beside weights and indices."""
    names = [torch.randn(shape) for shape in EXPERTS]
    names[1] = torch.arange(96).reshape(24, 4) % 8
    operands = [x.requires_grad_() if x.is_floating_point() else x for x in names]
    own, kept = {x.untyped_storage().data_ptr() for x in operands}, dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x, index, weights, up, down = operands
        result = kernels.experts(x, index, weights, up, down, "silu", None)
    small = 96 * 4  # the weights in the order of the rows
    assert sum(kept.values()) == experts("R", 1)[2] + small
    assert result.shape == (24, 20)


@pytest.mark.parametrize("causal", [False, True])
def test_rounds_of_a_ring_are_together_the_attention_of_all_keys(causal: bool) -> None:
    """Of the device with the last queries: a kernel for each block, one on the diagonal, and sums of results."""
    shapes, attrs = [(2, 4, 32, 8), (2, 2, 32, 8), (2, 2, 32, 8)], {"causal": causal, "scale": None}
    cost = costed("sdpa", shapes, attrs, (4,))
    ring = cost.passes((parse_choice("q@k"),), ((S(2),),) * 3, (S(2),))
    split = cost.passes((Split("q"),), ((S(2),), (R,), (R,)), (S(2),))
    attention = [[w for w in works if w.kind == "attention"] for works in (ring.forward, ring.backward)]
    assert [len(works) for works in attention] == [4, 4]
    assert [sum(w.flops for w in works) for works in attention] == [split.forward[0].flops, split.backward[0].flops]
    assert [w.causal for w in attention[0]] == [False] * 3 + [causal]
    assert {w.shape for w in attention[0]} == {(8, 8, 8, 8)}
    sums = [w.shape for w in ring.forward if w.kind == "pointwise"]
    assert sums == [(2 * 4 * 8 * 8,)] * 3
    assert [w.shape for w in ring.backward if w.kind == "pointwise"] == [(512,), (256,), (256,)] * 3
    assert (ring.groups, split.groups) == (4, 1)


@each(
    ("band", "seen", "keys"),
    [
        (Band(-8, 0), 2, 16),
        (Band(-9, 0), 3, 17),
        (Band(-8, 8), 3, 24),
        (Band(-3, 1), 3, 12),
        (Band(0, 0), 1, 8),
        (Band(last=0), 4, 32),
    ],
)
def test_a_ring_computes_what_the_busiest_device_sees(band: Band, seen: int, keys: int) -> None:
    """Of 32 positions on 4 devices; the search's table of parts says the same as a part alone."""
    shapes = [(2, 4, 32, 8), (2, 2, 32, 8), (2, 2, 32, 8), (32, 32)]
    cost = costed("sdpa", shapes, {"causal": False, "scale": None}, (4,), {3: "bool"}, band)
    ring, layouts = parse_choice("q@k"), (*[(S(2),)] * 3, (S(0),))
    found = cost.passes((ring,), layouts, (S(2),))
    assert [sum(w.kind == "attention" for w in works) for works in (found.forward, found.backward)] == [seen, seen]
    assert (found.groups, sum(w.kind == "pointwise" for w in found.forward)) == (seen, seen - 1)
    (sent,) = cost.exchanges((ring,), layouts, (S(2),))
    assert len(sent.sent(backward=False).listed) == seen - 1
    assert sum(w.flops for w in found.forward if w.kind == "attention") == 2 * (2 * 4) * 8 * keys * (8 + 8)
    parts, _ = cost.parts([[(ring, (*[S(2)] * 3, S(0)), S(2))]], np.zeros((1, 1), np.int64))
    assert parts[0] == cost.part((ring,), layouts, (S(2),))._replace(step=parts[0].step)
