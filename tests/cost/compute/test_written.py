"""Kernels of operators that are written as a part of others, and of losses."""

from __future__ import annotations

from shardwright.cost.compute.work import Local, passes
from shardwright.pcg.analysis import Written
from shardwright.pcg.attrs import Attrs
from shardwright.pcg.optable import ROWS
from shardwright.pcg.types import TensorType


def local(op: str, shapes: list[tuple[int, ...]], attrs: Attrs, how: Written = "", dtype: str = "float32") -> Local:
    """An operator on whole operands that all get a gradient, or on indices."""
    row = ROWS[op]
    signature = row.signature(shapes, attrs)
    operands = tuple(
        TensorType(s, dtype if i == 0 or len(s) > 1 else "float32", (), True) for i, s in enumerate(shapes)
    )
    if op == "cross_entropy_sum":
        operands = (operands[0], TensorType(shapes[1], "int64", (), False))
    result = TensorType(signature.result_shape, dtype, (), True)
    return Local(row, attrs, signature, tuple(f.size for f in signature.factors), operands, result, 0, how)


def test_a_fused_bias_has_no_forward_and_its_gradient_is_a_sum() -> None:
    shapes = [(8, 16), (16,)]
    alone, fused = (passes(local("add", shapes, {}, how)) for how in ("", "fused"))
    assert [w.kind for w in alone.forward] == ["pointwise"]
    assert fused.forward == ()
    assert fused.backward == alone.backward
    assert [w.kind for w in fused.backward] == ["view", "reduction"]


def test_a_part_of_a_split_copies_its_own_gradient_only() -> None:
    attrs: Attrs = {"dim": 1, "start": 0, "stop": 4, "step": 1}
    alone, part = (passes(local("slice", [(8, 12)], attrs, how)) for how in ("", "part"))
    assert alone.backward[0].num_bytes == 4 * (8 * 12 + 2 * 8 * 4)  # zeros of the whole, and the part written
    assert [(w.kind, w.num_bytes) for w in part.backward] == [("copy", 4 * 2 * 8 * 4)]


def test_a_loss_goes_through_log_probabilities_in_fp32() -> None:
    """Bytes per logit: 8 forward and 16 backward, and 6 more each for logits in 16 bits."""
    attrs: Attrs = {"ignore_index": -100, "label_smoothing": 0.0}
    logits = 32 * 50
    for dtype, cast in (("float32", 0), ("bfloat16", 6)):
        found = passes(local("cross_entropy_sum", [(32, 50), (32,)], attrs, dtype=dtype))
        assert sum(w.num_bytes for w in found.forward) == (8 + cast) * logits
        assert sum(w.num_bytes for w in found.backward) == (16 + cast) * logits
