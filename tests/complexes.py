"""Models with weights and buffers of complex numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
ROWS, WIDTH, GRID, MODES = 8, 4, 16, 3


class SpectralConv(nn.Module):
    """A convolution as a product in the frequency domain, with complex weights for the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, MODES, dtype=torch.cdouble) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        mixed = torch.einsum("bim,iom->bom", spectrum[..., :MODES], self.weight)
        return torch.fft.irfft(nn.functional.pad(mixed, (0, spectrum.shape[-1] - MODES)), n=GRID)


class Operator(nn.Module):
    """A Fourier neural operator of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv1d(2, WIDTH, 1), nn.Conv1d(WIDTH, 1, 1)
        self.convs = nn.ModuleList(SpectralConv() for _ in range(2))
        self.skips = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.lift(x)
        for conv, skip in zip(self.convs, self.skips, strict=True):
            x = nn.functional.gelu(conv(x) + skip(x))
        return nn.functional.mse_loss(self.project(x), target)


class Rotating(nn.Module):
    """A complex table, a running mean of what it rotates, and a weight that is used twice, once conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "table", torch.polar(torch.ones(WIDTH), torch.arange(WIDTH) * 0.3).to(torch.cdouble).conj()
        )
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.cdouble))
        self.first, self.turn = nn.Linear(WIDTH, 2 * WIDTH), nn.Parameter(torch.randn(WIDTH, dtype=torch.cdouble))
        self.unused = nn.Parameter(torch.randn(WIDTH, 2, dtype=torch.cdouble))
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=torch.cdouble)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.first(x).unflatten(-1, (WIDTH, 2)))
        y = self.mix(z) * self.get_buffer("table") * self.turn + self.turn.conj()
        with torch.no_grad():
            self.get_buffer("mean").mul_(0.9).add_(0.1 * z.mean(0))
        return (y - self.get_buffer("mean")).abs().square().mean()


class Turned(nn.Module):
    """What has no row, with complex arguments, results and weights, and perhaps a buffer that forward writes."""

    is_real = False

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cdouble) + 3 * torch.eye(WIDTH))
        self.counts = counts
        self.register_buffer("mean", torch.ones(WIDTH, dtype=torch.cdouble))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if self.counts:
            with torch.no_grad():
                self.get_buffer("mean").mul_(0.9).add_(0.1 * z.mean(0))
        y = (z @ torch.linalg.inv(self.weight)).conj() * self.weight.conj()[0] + z.imag * self.weight.conj().imag[1]
        return torch.view_as_real(y.resolve_conj()) if self.is_real else y, z.real.sort(0 if self.counts else 1).values


class Turning(nn.Module):
    """Layers around it; it stands in the first of two blocks."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.first, self.turned = nn.Linear(WIDTH, 2 * WIDTH), Turned(counts=counts)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        z, parts = self.turned(torch.view_as_complex(self.first(x).unflatten(-1, (WIDTH, 2))))
        y = (z * self.turned.get_buffer("mean")).abs() + parts
        for block in self.blocks:
            y = y + block(y).tanh()
        return y.square().mean()


def operator() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(ROWS, 2, GRID).double(), "target": torch.randn(ROWS, 1, GRID).double()}
    return Operator().double(), batch


def rotating() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return Rotating().double(), {"x": torch.randn(ROWS, WIDTH).double()}


def turning(*, counts: bool) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return Turning(counts=counts).double(), {"x": torch.randn(ROWS, WIDTH).double()}
