"""Complex numbers inside of a model, as pairs of real ones: results and gradients are torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import CaptureError
from shardwright.pcg.interpret import run_serial
from tests.each import each
from tests.pcg.aten_cases.case import Case, case, ints, real
from tests.pcg.run_torch import run_torch
from tests.pcg.test_aten import Lifted, gradients, lift_all, to_numpy


def parts(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj())


def numbers(x: Tensor) -> Tensor:
    return torch.view_as_complex(x)


def unit(x: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(x), x)


def written(x: Tensor) -> Tensor:
    """The lowest frequencies, each channel times a matrix: what neural operators do."""
    z = torch.fft.rfft2(x)
    out = torch.zeros_like(z)
    out[..., :2] = torch.einsum("bihw,io->bohw", z[..., :2], unit(torch.ones(3, 3, dtype=torch.float64)))
    return torch.fft.irfft2(out, s=(4, 6))


WINDOW = torch.hann_window(4, dtype=torch.float64)
CASES: list[Case] = [
    case(lambda x, y: parts(numbers(x) * numbers(y)), real(3, 4, 2), real(4, 2)),
    case(lambda x, y: parts(numbers(x) * unit(y)), real(3, 4, 2), real(3, 4)),
    case(lambda x, y: parts(numbers(x) * y + y), real(3, 2), real(3)),
    case(lambda x: parts(numbers(x) * (2 + 1j) - 1.5), real(3, 2)),
    case(lambda x, y: parts(numbers(x) / numbers(y) / 2), real(3, 2), real(3, 2)),
    case(lambda x, y: parts((numbers(x) + (1 + 2j)) / (2 - 1j) + (y - 1j)), real(3, 2), real(3)),
    case(lambda x, y: parts(y / numbers(x)), real(3, 2), real(3)),
    case(lambda x, y: parts(numbers(x) @ numbers(y)), real(3, 4, 2), real(4, 5, 2)),
    case(lambda x, y: parts(numbers(x) @ y.to(torch.complex128)), real(3, 4, 2), real(4, 5)),
    case(lambda x: (numbers(x).abs(), numbers(x).angle()), real(3, 2)),
    case(lambda x: numbers(x * 0).abs(), real(3, 2)),
    case(lambda x: (numbers(x).real, numbers(x).imag.conj(), parts(numbers(x).conj().exp())), real(3, 2)),
    case(lambda x, y: parts(torch.complex(x, y)[1:].mT.flatten(1).sum(0)), real(4, 3, 2), real(4, 3, 2)),
    case(lambda x, y: parts(torch.where(x > 0, torch.complex(x, y), 0)), real(4, 3), real(4, 3)),
    case(lambda x, i: parts(torch.cat([numbers(x), numbers(x)[i]]).mean(0, keepdim=True)), real(4, 3, 2), ints(4, 5)),
    *(case(lambda x, n=n: parts(torch.fft.rfft(x, norm=n)), real(3, 5)) for n in (None, "ortho", "forward")),
    *(case(lambda x, n=n: torch.fft.irfft(numbers(x), norm=n), real(3, 5, 2)) for n in (None, "ortho", "forward")),
    case(lambda x: parts(torch.fft.fft2(numbers(x), dim=(0, 1))), real(3, 4, 5, 2)),
    case(lambda x: parts(torch.fft.ifft(torch.fft.fftshift(torch.fft.fft(x, dim=0)), 6, dim=0)), real(4, 3)),
    case(lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(4, 5)), real(2, 4, 6)),
    case(written, real(2, 3, 4, 6)),
    case(lambda x: torch.stft(x, 4, 2, window=WINDOW, return_complex=True).abs(), real(2, 12)),
    case(
        lambda x: parts(torch.view_as_complex(x) * torch.tensor([1 + 2j, 0.5j], dtype=torch.complex128)), real(3, 2, 2)
    ),
]


@cache
def lifted() -> Lifted:
    return lift_all({"complex": CASES})["complex"]


def test_results_are_torchs() -> None:
    one = lifted()
    assert not one.opaque()
    values = run_serial(one.graph, {name: to_numpy(value) for name, value in one.leaves.items()})
    for name, want, where in one.results:
        np.testing.assert_allclose(values[name], to_numpy(want), rtol=1e-11, atol=1e-11, err_msg=where)


def test_gradients_are_torchs() -> None:
    one = lifted()
    values, parameters = run_torch(one.graph, one.leaves), dict(one.after.named_parameters())
    leaves = {str(n.attr("target")): one.leaves[n.name] for n in one.graph.leaves("parameter")}
    got = gradients([values[name] for name, _, _ in one.results], {k: leaves[k] for k in parameters if k in leaves})
    for name, want in gradients([want for _, want, _ in one.results], parameters).items():
        found = got.get(name, torch.zeros_like(want))
        np.testing.assert_allclose(to_numpy(found), to_numpy(want), rtol=1e-11, atol=1e-11, err_msg=name)


class Refused(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "parameter":
            self.x = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.fft(x * self.scale)
        if self.kind == "parameter":
            z = z * self.x
        if self.kind == "operator":
            z = torch.linalg.inv(z.unsqueeze(-1) * z.unsqueeze(-2))
        if self.kind == "integers":
            z = z + torch.arange(4)
        if self.kind == "joined":
            z = torch.cat([z, torch.ones(2, 4, dtype=torch.long)])
        if self.kind == "padding":
            z = nn.functional.pad(z, (1, 1), value=2.0)
        return z.abs().sum()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("integers", r"joins complex numbers and integers; cast the integers"),
        ("joined", r"joins complex numbers and integers; cast the integers"),
        ("padding", r"pads complex numbers with another value than 0"),
        ("operator", r"aten.linalg_inv.default could not be lifted: it has no row for complex numbers; compute"),
    ],
)
def test_what_has_no_pairs_is_refused_by_name(kind: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Refused(kind), {"x": torch.ones(2, 4)}, strict=True)


class Product(nn.Module):
    """A product of complex numbers that a linear layer in 16 bits gives, and of complex weights."""

    def __init__(self, product: Callable[..., Tensor], shape: tuple[int, ...], *weights: tuple[int, ...]) -> None:
        super().__init__()
        self.product, self.shape, self.lin = product, shape, nn.Linear(4, 4, bias=False)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape, dtype=torch.cfloat)) for shape in weights)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x.reshape(-1, 4)).float().reshape(x.shape)
        return torch.view_as_real(self.product(torch.complex(x, y), *self.weights)).square().mean()


VECTOR, MATRIX, STACK = (4,), (4, 4), (2, 4, 4)
PRODUCTS: dict[str, Any] = {
    "conv1d": (F.conv1d, (2, 4, 8), (6, 4, 3), (6,)),
    "conv1d in groups": (partial(F.conv1d, stride=2, padding=1, dilation=2, groups=2), (2, 4, 8), (6, 2, 3), (6,)),
    "conv1d, same": (partial(F.conv1d, padding="same"), (2, 4, 8), (6, 4, 3)),
    "conv2d": (partial(F.conv2d, stride=(1, 2)), (2, 4, 8, 8), (6, 4, 3, 3), (6,)),
    "conv2d without bias": (F.conv2d, (2, 4, 8, 8), (6, 4, 3, 3)),
    "conv3d": (F.conv3d, (2, 4, 4, 4, 4), (6, 4, 3, 3, 3)),
    "conv_transpose1d": (F.conv_transpose1d, (2, 4, 8), (4, 6, 3), (6,)),
    "conv_transpose2d": (F.conv_transpose2d, (2, 4, 8, 8), (4, 6, 3, 3)),
    "conv_transpose3d": (F.conv_transpose3d, (2, 4, 4, 4, 4), (4, 6, 3, 3, 3)),
    "matmul": (torch.matmul, STACK, (4, 3)),
    "bmm": (torch.bmm, STACK, (2, 4, 3)),
    "einsum": (lambda x, w: torch.einsum("bik,oi->bok", x, w), STACK, (3, 4)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, 1), MATRIX, (4, 3)),
    "linear": (F.linear, STACK, (3, 4), (3,)),
    "addmm": (lambda x, w, c: torch.addmm(c, x, w, beta=0.5, alpha=2 - 1j), MATRIX, (4, 3), (3,)),
    "addmm, unread": (lambda x, w, c: torch.addmm(c, x, w, beta=0), MATRIX, (4, 3), (3,)),
    "baddbmm": (lambda x, w, c: torch.baddbmm(c, x, w), STACK, (2, 4, 3), (4, 3)),
    "addbmm": (lambda x, w, c: torch.addbmm(c, x, w), STACK, (2, 4, 3), (4, 3)),
    "addmv": (lambda x, w, c: torch.addmv(c, x, w), MATRIX, VECTOR, VECTOR),
    "mv": (torch.mv, MATRIX, VECTOR),
    "dot": (torch.dot, VECTOR, VECTOR),
    "vdot": (torch.vdot, VECTOR, VECTOR),
    "outer": (torch.outer, VECTOR, VECTOR),
    "multi_dot": (lambda x, v, w: torch.linalg.multi_dot([x, v, w]), MATRIX, (4, 3), (3, 2)),
    "matrix_power": (lambda x: torch.linalg.matrix_power(x, 3), MATRIX),
    "a real one after it": (lambda x, w: x @ w + x.imag @ x.real, MATRIX, MATRIX),
}


@each("name", PRODUCTS)
def test_products_of_complex_numbers_under_autocast_are_torchs(name: str) -> None:
    torch.manual_seed(0)
    product, shape, *weights = PRODUCTS[name]
    model, batch = Product(product, shape, *weights), {"x": torch.randn(shape)}
    captured = capture(model, batch, precision="amp_bf16")
    state = {**batch, **dict(model.named_parameters()), **captured.constants}
    leaves = {leaf.name: state[str(leaf.attr("target"))] for leaf in captured.graph.nodes if leaf.is_leaf}
    pairs = {key: torch.view_as_real(x) if x.is_complex() else x for key, x in leaves.items()}
    (_, output), *_ = captured.graph.outputs
    loss = run_torch(captured.graph, pairs)[output]
    with torch.autocast("cpu", torch.bfloat16):
        alone = model(**batch)
    torch.testing.assert_close(loss, alone, rtol=1e-6, atol=0)
    parameters = list(model.parameters())
    both = (torch.autograd.grad(x, parameters, materialize_grads=True) for x in (loss, alone))
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    products = [captured.graph.types[n.name].dtype for n in captured.graph.nodes if n.op in {"linear", "matmul"}]
    assert products.count("bfloat16") == (2 if name == "a real one after it" else 1)


def test_a_complex_convolution_without_a_batch_is_refused_by_name() -> None:
    model, batch = Product(F.conv2d, (4, 8, 8), (6, 4, 3, 3)), {"x": torch.randn(4, 8, 8)}
    with pytest.raises(
        CaptureError, match=r"aten.conv2d.default could not be lifted: it has no row for complex numbers"
    ):
        capture(model, batch)
