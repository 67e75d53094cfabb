"""Complex numbers as pairs of real tensors: their real and imaginary parts, each a value of its own in the graph.

    view_as_complex(x)  ──▶  Pair(x[..., 0], x[..., 1])
    a · b               ──▶  Pair(aᵣbᵣ - aᵢbᵢ, aᵣbᵢ + aᵢbᵣ)
    reshape(a)          ──▶  Pair(reshape(aᵣ), reshape(aᵢ))        and all else that works on each part by itself
    fft(a)              ──▶  the row `fft`, of both parts in a last dimension

Gradients of real and imaginary parts are those of torch's convention, ∂L/∂aᵣ + i ∂L/∂aᵢ. An operator that stands in
none of these lists is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves

from shardwright.pcg.aten.pairs import Pair, Value, packed, pair_of, unpacked
from shardwright.pcg.aten.reductions import root
from shardwright.pcg.aten.registry import HANDLERS, Handler, NotCovered, Ref, cast, dimensions, dtype_name
from shardwright.pcg.aten.structure import reshape
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import GraphError
from shardwright.pcg.types import COMPLEX, is_float

_BY_PART = frozenset({
    "_unsafe_view", "alias", "cat", "clone", "constant_pad_nd", "copy", "cumsum", "detach", "diagonal", "expand",
    "flip", "gather", "index", "index_put", "index_select", "mean", "neg", "permute", "repeat", "roll", "select",
    "select_scatter", "slice", "slice_scatter", "split", "split_with_sizes", "squeeze", "stack", "sum", "t",
    "transpose", "tril", "triu", "unbind", "unfold", "unsqueeze", "view", "zeros_like",
})  # fmt: skip
"""Operators that do to each part what they do to real numbers; a real operand has the imaginary part 0."""


def _number(b: GraphBuilder, value: complex, dtype: str) -> Pair:
    return Pair(*(b.scalar(part, dtype) for part in (value.real, value.imag)))


_INDEXED = frozenset({"gather", "index", "index_put", "index_select"})
"""Operators by part that take integers as indices; elsewhere integers would be added to the imaginary part too."""


def _refuse_mixed(b: GraphBuilder, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `GraphError` for operands of an operator by part that have no real and imaginary part."""
    leaves = tree_leaves((list(args), dict(kwargs)))
    if any(isinstance(x, complex) for x in leaves):
        raise GraphError("it has a complex number beside tensors; add it as a tensor of complex numbers")
    if name not in _INDEXED and any(isinstance(x, Ref) and not is_float(b.types[x].dtype) for x in leaves):
        raise GraphError("it joins complex numbers and integers; cast the integers by .to(torch.complex64)")
    if name == "constant_pad_nd" and (any(args[2:]) or kwargs.get("value")):
        raise GraphError("it pads complex numbers with another value than 0; pad real and imaginary parts")


def _parts(b: GraphBuilder, handler: Handler, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a handler of real numbers for the real parts and for the imaginary ones."""

    def given(value: Any, *, imag: bool) -> Any:
        if isinstance(value, Pair):
            return Ref(value.imag if imag else value.real)
        if isinstance(value, (list, tuple)):
            return type(value)(given(v, imag=imag) for v in value)
        if isinstance(value, Ref) and imag and is_float(b.types[value].dtype):
            return Ref(pair_of(b, value).imag)
        return COMPLEX.get(dtype_name(value), value)

    real, imag = (
        handler(b, *given(list(args), imag=imag), **{k: given(v, imag=imag) for k, v in kwargs.items()})
        for imag in (False, True)
    )
    if isinstance(real, tuple):
        return tuple(Pair(*both) for both in zip(real, imag, strict=True))
    return Pair(real, imag)


def _mul(b: GraphBuilder, x: Any, y: Any) -> Pair:
    x, y = (x, y) if isinstance(x, Pair) else (y, x)
    if isinstance(y, complex):
        y = _number(b, y, b.types[x.real].dtype)
    if not isinstance(y, Pair):
        return Pair(b.op("mul", x.real, y), b.op("mul", x.imag, y))
    return _product(b, HANDLERS["mul"], x, y)


def _product(b: GraphBuilder, row: Handler, x: Pair, y: Pair) -> Pair:
    """Multiply numbers or matrices: (xᵣ + i xᵢ)(yᵣ + i yᵢ)."""
    real = b.op("sub", row(b, x.real, y.real), row(b, x.imag, y.imag))
    return Pair(real, b.op("add", row(b, x.real, y.imag), row(b, x.imag, y.real)))


def _matmul(b: GraphBuilder, x: Any, y: Any, row: str = "matmul") -> Pair:
    multiply = HANDLERS[row]
    if isinstance(x, Pair) and isinstance(y, Pair):
        return _product(b, multiply, x, y)
    if isinstance(x, Pair):
        return Pair(multiply(b, x.real, y), multiply(b, x.imag, y))
    return Pair(multiply(b, x, y.real), multiply(b, x, y.imag))


def _vdot(b: GraphBuilder, x: Any, y: Any) -> Pair:
    x = pair_of(b, x)
    return _matmul(b, Pair(x.real, b.op("neg", x.imag)), y)


def _add_product(b: GraphBuilder, bias: Any, x: Any, y: Any, *, beta: complex = 1, alpha: complex = 1) -> Pair:
    return _biased(b, bias, _matmul(b, x, y), beta, alpha)


def _add_products(b: GraphBuilder, bias: Any, x: Any, y: Any, *, beta: complex = 1, alpha: complex = 1) -> Pair:
    return _biased(b, bias, _parts(b, HANDLERS["sum"], (_matmul(b, x, y), [0]), {}), beta, alpha)


def _biased(b: GraphBuilder, bias: Any, product: Pair, beta: complex, alpha: complex) -> Pair:
    """Append α product + β bias. As in torch, a bias with β = 0 is not read."""
    product = product if alpha == 1 else _mul(b, product, alpha)
    if beta == 0:
        return product
    return _parts(b, HANDLERS["add"], (product, bias if beta == 1 else _mul(b, pair_of(b, bias), beta)), {})


def _conv2d(b: GraphBuilder, x: Pair, w: Pair, bias: Pair | None = None, *window: Any) -> Pair:
    """Convolve by three products instead of four, as torch does where it decomposes other convolutions."""

    def convolved(x: str, w: str) -> str:
        return HANDLERS["conv2d.default"](b, x, w, None, *window)

    reals, imags = convolved(x.real, w.real), convolved(x.imag, w.imag)
    both = convolved(b.op("add", x.real, x.imag), b.op("add", w.real, w.imag))
    y = Pair(b.op("sub", reals, imags), b.op("sub", b.op("sub", both, reals), imags))
    if bias is None:
        return y
    column = _parts(b, reshape, (bias, (b.shape(bias.real)[0], 1, 1)), {})
    return _parts(b, HANDLERS["add"], (y, column), {})


def _linear(b: GraphBuilder, x: Any, weight: Any, bias: Any = None) -> Pair:
    y = _matmul(b, x, weight, "linear")
    return y if bias is None else _parts(b, HANDLERS["add"], (y, bias), {})


def _div(b: GraphBuilder, x: Any, y: Any) -> Pair:
    if isinstance(y, complex):
        return _mul(b, pair_of(b, x), 1 / y)
    if not isinstance(y, Pair):
        return Pair(b.op("div", x.real, y), b.op("div", x.imag, y))
    size = _squares(b, y)
    top = _mul(b, Pair(y.real, b.op("neg", y.imag)), x)
    return Pair(b.op("div", top.real, size), b.op("div", top.imag, size))


def _add_number(row: str) -> Handler:
    def handler(b: GraphBuilder, x: Any, y: Any, alpha: float = 1) -> Any:
        if isinstance(y, (int, float)) and isinstance(x, Pair):
            return Pair(b.op(row, x.real, y * alpha), x.imag)
        if isinstance(y, complex):
            x = pair_of(b, x)
            return Pair(b.op(row, x.real, y.real * alpha), b.op(row, x.imag, y.imag * alpha))
        _refuse_mixed(b, row, (x, y), {})
        return _parts(b, HANDLERS[row], (x, y, alpha), {})

    return handler


def _squares(b: GraphBuilder, x: Pair) -> str:
    return b.op("add", b.op("mul", x.real, x.real), b.op("mul", x.imag, x.imag))


def _abs(b: GraphBuilder, x: Pair) -> str:
    return root(b, _squares(b, x))


def _exp(b: GraphBuilder, x: Pair) -> Pair:
    return _polar(b, b.op("exp", x.real), x.imag)


def _polar(b: GraphBuilder, size: str, angle: str) -> Pair:
    return Pair(b.op("mul", size, b.op("cos", angle)), b.op("mul", size, b.op("sin", angle)))


def _to_copy(b: GraphBuilder, x: Any, *, dtype: Any = None) -> Value:
    """Cast to complex numbers, or to complex numbers of another width."""
    part = COMPLEX.get(dtype_name(dtype)) if dtype is not None else None
    if dtype is not None and part is None:
        raise GraphError(f"it drops imaginary parts in a cast to {dtype_name(dtype)}; take x.real")
    x = pair_of(b, x)
    return Pair(cast(b, x.real, part), cast(b, x.imag, part))


def _fft_r2c(b: GraphBuilder, x: str, dims: Sequence[int], norm: int, onesided: bool) -> Pair:
    dims = dimensions(b, x, dims)
    if not onesided:
        return _fft_c2c(b, pair_of(b, x), dims, norm, True)
    return unpacked(b, b.op("rfft", x, dims=dims, norm=norm))


def _fft_c2c(b: GraphBuilder, x: Any, dims: Sequence[int], norm: int, forward: bool) -> Pair:
    x = pair_of(b, x)
    dims = dimensions(b, x.real, dims)
    return unpacked(b, b.op("fft", packed(b, x), dims=dims, norm=norm, forward=forward)) if dims else x


def _fft_c2r(b: GraphBuilder, x: Any, dims: Sequence[int], norm: int, last: int) -> str:
    x = pair_of(b, x)
    dims = dimensions(b, x.real, dims)
    return b.op("irfft", packed(b, x), dims=dims, norm=norm, last=last)


def _fill(value: float) -> Handler:
    def handler(b: GraphBuilder, shape: Sequence[int], *, dtype: Any = None) -> Pair:
        parts = (b.op("full", shape=tuple(shape), value=n, dtype=COMPLEX[dtype_name(dtype)]) for n in (value, 0.0))
        return Pair(*parts)

    return handler


def _where(b: GraphBuilder, condition: str, x: Any, y: Any) -> Pair:
    dtype = next((b.types[v.real].dtype for v in (x, y) if isinstance(v, Pair)), b.default_float)
    x, y = (_number(b, v, dtype) if isinstance(v, (int, float, complex)) else pair_of(b, v) for v in (x, y))
    return Pair(b.op("where", condition, x.real, y.real), b.op("where", condition, x.imag, y.imag))


_HANDLERS: dict[str, Handler] = {
    "_conj": lambda b, x: Pair(x.real, b.op("neg", x.imag)),
    "_conj_physical": lambda b, x: Pair(x.real, b.op("neg", x.imag)),
    "conj_physical": lambda b, x: Pair(x.real, b.op("neg", x.imag)),
    "_fft_c2c": _fft_c2c,
    "_fft_c2r": _fft_c2r,
    "_fft_r2c": _fft_r2c,
    "_to_copy": _to_copy,
    "abs": _abs,
    "add": _add_number("add"),
    "addbmm": _add_products,
    "addmm": _add_product,
    "addmv": _add_product,
    "angle": lambda b, x: b.op("atan2", x.imag, x.real),
    "baddbmm": _add_product,
    "bmm": _matmul,
    "complex": lambda b, real, imag: Pair(real, imag),
    "conv2d": _conv2d,
    "div": _div,
    "dot": _matmul,
    "empty": _fill(0.0),
    "exp": _exp,
    "imag": lambda b, x: x.imag,
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "mul": _mul,
    "mv": _matmul,
    "ones": _fill(1.0),
    "polar": _polar,
    "real": lambda b, x: x.real,
    "resolve_conj": lambda b, x: x,
    "resolve_neg": lambda b, x: x,
    "sub": _add_number("sub"),
    "vdot": _vdot,
    "view_as_complex": unpacked,
    "view_as_real": packed,
    "where": _where,
    "zeros": _fill(0.0),
}


def lift_complex(
    b: GraphBuilder, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Value | None, ...]:
    """Append what an operator with complex operands or results computes; refuse what the lists here lack by name."""
    namespace, name, _ = (*target.split("."), "", "")[:3]
    try:
        if namespace == "aten" and name in _HANDLERS:
            lifted = _HANDLERS[name](b, *args, **kwargs)
        elif namespace == "aten" and name in _BY_PART and (handler := HANDLERS.get(name)) is not None:
            _refuse_mixed(b, name, args, kwargs)
            lifted = _parts(b, handler, args, kwargs)
        else:
            raise NotCovered
    except NotCovered:
        raise GraphError("it has no row for complex numbers; compute with their real and imaginary parts") from None
    return lifted if isinstance(lifted, tuple) else (lifted,)
