"""Writes in place against eager torch: every way to see a part of a tensor, times every method that writes.

    python -m bench.writes          # all of them, some 7,000 forms: 20 minutes of one core

A form takes a layer's output, reads it, writes a part of it, and reads it again. Its gradient, in float64, is compared
with that of the captured program. Forms that eager training refuses are left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import CaptureError
from tests.pcg.run_torch import run_torch

View = Callable[[Tensor], Tensor]
Write = Callable[[Tensor, Tensor], object]
"""Writes into the first tensor, with numbers of the second, which is of the same shape and has a gradient."""

VIEWS: dict[str, View] = {
    "whole": lambda h: h,
    "rows": lambda h: h[1:4],
    "every second column": lambda h: h[:, ::2],
    "row": lambda h: h[2],
    "column": lambda h: h[:, 1],
    "element": lambda h: h[2, 3],
    "corner": lambda h: h[-3:, 2:5],
    "t": lambda h: h.t(),
    "rows of t": lambda h: h.T[1:3],
    "permute": lambda h: h[None].permute(2, 0, 1),
    "diagonal": lambda h: h.diagonal(),
    "upper diagonal": lambda h: h.diagonal(1),
    "lower diagonal": lambda h: h.diagonal(-2)[1:],
    "flat": lambda h: h.view(-1)[3:17],
    "view": lambda h: h.view(4, 9)[1],
    "unflatten": lambda h: h.unflatten(1, (2, 3))[:, 1],
    "flatten": lambda h: h.flatten()[::3],
    "unsqueeze": lambda h: h[:, None, 2:],
    "squeeze": lambda h: h[1:2].squeeze(0),
    "narrow": lambda h: h.narrow(1, 2, 3),
    "select": lambda h: h.select(0, -1),
    "chunk": lambda h: h.chunk(3, 1)[1],
    "split": lambda h: h.split([1, 5])[1],
    "unbind": lambda h: h[3:].unbind(1)[4],
    "unfold": lambda h: h.unfold(0, 2, 3),
    "strides": lambda h: h.as_strided((3, 3), (12, 2), 1),
    "swapaxes": lambda h: h.swapaxes(0, 1)[4],
    "ellipsis": lambda h: h[..., 1],
    "view of a view": lambda h: h[1:][:, 1:].t()[2:],
}


def _rows(y: Tensor) -> Tensor:
    return torch.tensor([y.shape[0] - 1, 0])


def _half(y: Tensor) -> Tensor:
    return torch.arange(y.numel()).reshape(y.shape) % 2 == 0


WRITES: dict[str, Write] = {
    **{
        name: (lambda y, z, name=name: getattr(y, name)())
        for name in ("zero_", "relu_", "neg_", "abs_", "round_", "floor_", "sign_", "sigmoid_", "tanh_", "exp_", "sin_",
                     "square_", "tril_", "triu_", "erf_", "expm1_", "atan_", "t_", "squeeze_")
    },
    **{
        name: (lambda y, z, name=name: getattr(y, name)(z))
        for name in ("add_", "sub_", "mul_", "div_", "copy_", "atan2_", "hypot_")
    },
    "mul_ by a number": lambda y, z: y.mul_(3),
    "add_ twice": lambda y, z: y.add_(z, alpha=2).add_(1),
    "pow_": lambda y, z: y.pow_(2),
    "fill_": lambda y, z: y.fill_(0.5),
    "fill_ of a tensor": lambda y, z: y.fill_(z.sum()),
    "clamp_": lambda y, z: y.clamp_(-0.2, 0.3),
    "clamp_min_": lambda y, z: y.clamp_min_(0.1),
    "leaky_relu_": lambda y, z: nn.functional.leaky_relu_(y, 0.2),
    "elu_": lambda y, z: nn.functional.elu_(y),
    "lerp_": lambda y, z: y.lerp_(z, 0.3),
    "addcmul_": lambda y, z: y.addcmul_(z, z, value=0.5),
    "addcdiv_": lambda y, z: y.addcdiv_(z, z.exp()),
    "masked_fill_": lambda y, z: y.masked_fill_(_half(y), 2.0),
    "masked_scatter_": lambda y, z: y.masked_scatter_(_half(y), z.contiguous()),
    "index_fill_": lambda y, z: y.index_fill_(0, _rows(y), 0.5),
    "index_add_": lambda y, z: y.index_add_(0, _rows(y), z[:2]),
    "index_copy_": lambda y, z: y.index_copy_(0, _rows(y), z[:2]),
    "index_put_": lambda y, z: y.index_put_((_rows(y),), z[:2], accumulate=True),
    "scatter_": lambda y, z: y.scatter_(0, torch.zeros(z[:1].shape, dtype=torch.long), z),
    "scatter_add_": lambda y, z: y.scatter_add_(0, torch.zeros(z.shape, dtype=torch.long), z),
    "scatter_reduce_": lambda y, z: y.scatter_reduce_(0, torch.zeros(z.shape, dtype=torch.long), z, "sum"),
    "cumsum_": lambda y, z: y.cumsum_(0),
    "fill_diagonal_": lambda y, z: y.fill_diagonal_(0.5),
    "fill_diagonal_ in blocks": lambda y, z: y.fill_diagonal_(0.5, wrap=True),
    "addmm_": lambda y, z: y.addmm_(z, torch.eye(z.shape[1], dtype=z.dtype)),
    "item": lambda y, z: y.__setitem__(0, 0.5),
    "items": lambda y, z: y.__setitem__(slice(1, None), z[1:]),
    "items by mask": lambda y, z: y.__setitem__(_half(y), 0.25),
    "items by index": lambda y, z: y.__setitem__(_rows(y), z[:2]),
    "add to items": lambda y, z: y.__setitem__(0, y[0] + z[0]),
    "of itself": lambda y, z: y.add_(y.mean()),
    "out=": lambda y, z: torch.mul(y.detach(), z.detach(), out=y),
    "list": lambda y, z: torch.ops.aten._foreach_add_.List([y], [z]),
    "data": lambda y, z: y.data.mul_(2),
    "detach": lambda y, z: y.detach().clamp_(-0.1, 0.4),
}  # fmt: skip

SCATTERS: dict[str, Write] = {
    "slice_scatter": lambda y, z: y.slice_scatter(z[1:], 0, 1),
    "select_scatter": lambda y, z: y.select_scatter(z[0], 0, 1),
    "diagonal_scatter": lambda y, z: y.diagonal_scatter(z.diagonal(), 0),
    "as_strided_scatter": lambda y, z: y.as_strided_scatter(z[:2], z[:2].shape, z.contiguous().stride()),
    "index_put": lambda y, z: y.index_put((_rows(y),), z[:2]),
    "masked_scatter": lambda y, z: y.masked_scatter(_half(y), z),
}
"""What gives a tensor with another part, out of place: the write is its result."""


@dataclass(frozen=True)
class Form:
    """`seen`: whether autograd sees the write; `early`: whether whole and part are read before it too."""

    view: str
    write: str
    seen: bool
    early: bool

    def __str__(self) -> str:
        return f"{self.write} of {self.view}{'' if self.seen else ', no_grad'}{', read before' if self.early else ''}"

    def __call__(self, layer: nn.Module, x: Tensor) -> Tensor:
        h = layer(x) * 1
        part = VIEWS[self.view](h)
        before = h * 2 + part.sum() if self.early else torch.zeros((), dtype=x.dtype)
        other = VIEWS[self.view](layer(x.flip(0)) * 1).clone()
        with nullcontext() if self.seen else torch.no_grad():
            if self.write in SCATTERS:
                return _weighed(SCATTERS[self.write](part, other)) + before.sum()
            WRITES[self.write](part, other)
        return _weighed(h * 1) + _weighed(part * 1) + before.sum()


def _weighed(h: Any) -> Tensor:  # noqa: ANN401
    return (h.sin() * torch.arange(1.0, h.numel() + 1, dtype=h.dtype).reshape(h.shape)).sum()


def forms() -> list[Form]:
    return [Form(*of) for of in product(VIEWS, (*WRITES, *SCATTERS), (True, False), (False, True))]


class Forms(nn.Module):
    """Every form with a layer of its own: one capture shows the gradients of all, and their values as gradients."""

    def __init__(self, forms: Sequence[Callable[[Any, Tensor], Tensor]]) -> None:
        super().__init__()
        self.forms = forms
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in forms)
        self.values = nn.ParameterList(torch.ones((), dtype=torch.float64) for _ in forms)

    def forward(self, x: Tensor) -> Tensor:
        found = zip(self.forms, self.layers, self.values, strict=True)
        return torch.stack([form(layer, x) * value for form, layer, value in found]).sum()


def batch() -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, 36, dtype=torch.float64).sin().reshape(6, 6)}


def gradients(model: Forms, loss: Tensor) -> list[tuple[Tensor, ...]]:
    """Return, by form, the gradients of its layer and of its value."""
    found = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    number = len(model.forms)
    return [(*found[2 * i : 2 * i + 2], found[2 * number + i]) for i in range(number)]


def trains(form: Form) -> bool:
    """True if eager training can do it."""
    model = Forms([form])
    try:
        gradients(model, model(**batch()))
    except (RuntimeError, IndexError, ValueError):
        return False
    return True


def judge(some: Sequence[Form]) -> Iterator[tuple[Form, str]]:
    """Yield "" for each form whose gradients equal those of eager training, else the way in which they differ."""
    model, given = Forms(some), batch()
    try:
        captured = capture(model, given)
    except CaptureError as error:
        if len(some) == 1:
            yield some[0], f"refused: {error}"
            return
        for half in (some[: len(some) // 2], some[len(some) // 2 :]):
            yield from judge(half)
        return
    values: Mapping[str, Tensor] = {**dict(model.named_parameters()), **captured.constants, **given}
    program = run_torch(
        captured.graph, {n.name: values[str(n.attr("target"))] for n in captured.graph.nodes if n.is_leaf}
    )
    loss = program[dict(captured.graph.outputs)["loss"]]
    eager = gradients(model, model(**given))
    for form, want, got in zip(some, eager, gradients(model, loss), strict=True):
        off = max((a - b).abs().max().item() for a, b in zip(want, got, strict=True))
        yield form, "" if off <= 1e-10 * max(1.0, *(a.abs().max().item() for a in want)) else f"off by {off:.3g}"


def main() -> int:
    """Judge all of them, report those that are refused or wrong, and count."""
    chosen = [form for form in forms() if trains(form)]
    counts: Counter[str] = Counter()
    for start in range(0, len(chosen), 24):
        for form, what in judge(chosen[start : start + 24]):
            counts[what.split(":")[0].split(" by")[0] or "equal"] += 1
            if what:
                print(f"{form}: {what}", flush=True)
    print(", ".join(f"{number} {what}" for what, number in counts.items()), f"of {len(chosen)} forms")
    return int(bool(counts["off"]))


if __name__ == "__main__":
    sys.exit(main())
