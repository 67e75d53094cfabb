"""Mixed precision: the dtype that an operator computes in, by the column `autocast` of its row.

A model is captured *under* a precision: it is traced in a region of `torch.autocast`, as the user's own regions are
(`pcg.capture.regions`), and while its ATen operators become rows, `GraphBuilder` casts the operands of each row as
`operand_dtypes` says. So every type in the graph is the true one, and search, cost, memory, collectives and program
follow from types alone. A cast denotes the identity. It is done here and not on the finished graph, because the meaning
of ATen operators depends on dtypes: batch normalization gives its result in the dtype of its operand, a bias has that
of its product, and a Python number that of the tensor beside it.

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
    """Return the 16-bit format of a mixed precision, of these kinds alone if any are named; "" for others."""
    wanted = casts or ("autocast", "parameters")
    return DTYPES[precision].compute if precision is not None and DTYPES[precision].casts in wanted else ""


def operand_dtypes(row: Row, operands: Sequence[TensorType], low: str) -> tuple[str, ...]:
    """Return the dtypes that a row's operands are cast to in `low`. Integers and float64 keep theirs.

    Without a `low`, operands that torch takes only in equal dtypes get one dtype.
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
    """Return the dtypes, with single numbers narrowed so that they do not widen the result of larger tensors."""
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
    """Return a precision, or pairs by module, that a model with parameters of these dtypes can be captured under.

    `frozen`: the dtypes of parameters that are not trained, which may be stored in 16 bits if parameters are cast.

    Raises:
        FieldError: there is no such precision.
        PlanError: the parameters are not in the dtype that the precision is for.
    """
    checked = canonical(precision, "")
    for state_precision in sorted(every(checked)):
        _check_state(state_precision, [*parameters, *(() if DTYPES[state_precision].casts == "parameters" else frozen)])
    return checked


def _check_state(precision: Precision, parameters: Collection[str]) -> None:
    dtypes, given = DTYPES[precision], {dtype for dtype in parameters if is_float(dtype)}
    wrong = sorted(given - ({dtypes.state, "float64"} if low_dtype(precision) else {dtypes.compute}))
    if not wrong:
        return
    if dtypes.state in HALVES:
        todo = f"build the model in {dtypes.state}, as with model.to(torch.{dtypes.state}), or choose a mixed precision"
    else:
        todo = "leave the precision out, or build the model in float32"
    raise PlanError(
        f"precision {precision!r}: expected parameters in {dtypes.state}, got {' and '.join(wrong)}; {todo}"
    )
