"""Mixed precision: what an operator computes in, by the column `autocast` of its row.

A model is captured *under* a precision: it is traced in a region of `torch.autocast`, as the user's own regions are
(`pcg.capture.regions`), and while its ATen operators become rows, `GraphBuilder` casts what each row reads as
`operand_dtypes` says. So every type in the graph is the true one, and search, cost, memory, collectives and program
follow from types alone. A cast denotes the identity. It is done here and not on the finished graph, because what ATen
operators mean depends on dtypes: batch normalization gives its result in the dtype of its operand, a bias has that of
its product, and a Python number that of the tensor beside it.

The column follows `torch.autocast` for CUDA (ATen/autocast_mode.h): contractions run in 16 bits; exponentials,
logarithms, powers, sums, norms, softmax and losses in fp32; others follow their operands. Parameters stay as they are
and are cast where they are read, once each. `torch.autocast` for CPU runs softmax, norms, sums and exponentials in the
dtype that they come in; it rounds more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardwright.pcg.errors import PlanError
from shardwright.pcg.row import Row
from shardwright.pcg.step.precisions import DTYPES, Casts, Precision, PrecisionByModule, PrecisionMode, canonical, every
from shardwright.pcg.types import TensorType, is_float, promote

HALVES = ("float16", "bfloat16")


def low_dtype(precision: Precision | None, *casts: Casts) -> str:
    """The 16-bit format of a mixed precision, of these kinds alone if any are named; "" for others."""
    wanted = casts or ("autocast", "parameters")
    return DTYPES[precision].compute if precision is not None and DTYPES[precision].casts in wanted else ""


def operand_dtypes(row: Row, operands: Sequence[TensorType], low: str) -> tuple[str, ...]:
    """What a row's operands are cast to where its operators run in `low`. Integers and float64 stay what they are.

    Without a `low`, operands that torch takes in one dtype only are made to be of one.
    """
    floats = [t.dtype for t in operands if is_float(t.dtype)]
    match row.autocast:
        case "low":
            wanted = low or promote(*floats or ["float32"])
            return tuple(wanted if t.dtype in ("float32", *HALVES) else t.dtype for t in operands)
        case "wide" if low:
            return tuple("float32" if t.dtype in HALVES else t.dtype for t in operands)
        case "widest":
            return tuple(promote(*floats) if is_float(t.dtype) else t.dtype for t in operands)
        case _:
            return _beside_tensors(operands) if low else tuple(t.dtype for t in operands)


def _beside_tensors(operands: Sequence[TensorType]) -> tuple[str, ...]:
    """A single number beside tensors of several does not widen the result."""
    several = [t.dtype for t in operands if t.shape and is_float(t.dtype)]
    if not several:
        return tuple(t.dtype for t in operands)
    widest = promote(*several)
    return tuple(
        widest if not t.shape and is_float(t.dtype) and promote(t.dtype, widest) != widest else t.dtype
        for t in operands
    )


def check_precision(
    precision: PrecisionMode | None, parameters: Collection[str], frozen: Collection[str] = ()
) -> Precision | PrecisionByModule | None:
    """A precision, or those by module as pairs, that a model with parameters of these dtypes can be captured under.

    `frozen`: those of parameters that are not trained, which may be stored in 16 bits where parameters are cast.

    Raises:
        FieldError: there is no such precision.
        PlanError: the parameters are not in the dtype that it is for.
    """
    checked = canonical(precision, "")
    for own in sorted(every(checked)):
        _check_state(own, [*parameters, *(() if DTYPES[own].casts == "parameters" else frozen)])
    return checked


def _check_state(precision: Precision, parameters: Collection[str]) -> None:
    own, given = DTYPES[precision], {dtype for dtype in parameters if is_float(dtype)}
    wrong = sorted(given - ({own.state, "float64"} if low_dtype(precision) else {own.compute}))
    if not wrong:
        return
    if own.state in HALVES:
        todo = f"build the model in {own.state}, as with model.to(torch.{own.state}), or choose a mixed precision"
    else:
        todo = "leave the precision out, or build the model in float32"
    raise PlanError(f"precision {precision!r}: expected parameters in {own.state}, got {' and '.join(wrong)}; {todo}")
