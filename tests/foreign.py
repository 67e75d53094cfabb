"""Models with a part that capture cannot see through, as they are found in the wild."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
ROWS, WIDTH = 8, 8


class Masked(nn.Module):
    """Rows by a boolean index, dropout on them, batch norm, and a branch on values. `unused` is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.unused, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, 0] > 0
        self.seen += mask.sum()
        y = x.clone()
        if mask.any():
            y[mask] = self.drop(self.lin(x[mask]))
        return self.norm(y)


class Gated(nn.Module):
    """A branch on a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.lin(x) * mask[:, None] if mask.any() else x


class Lengths(nn.Module):
    """Lengths as Python's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        rows = x[:, None].expand(-1, 6, -1)
        return torch.stack([self.lin(row[:number]).sum(0) for row, number in zip(rows, lengths.tolist(), strict=True)])


class Reverse(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -ctx.scale * gradient, None


reverse = Reverse.apply


class Nearest(torch.autograd.Function):
    """The nearest entry of a book, whose gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, book: Tensor) -> Tensor:
        index = torch.cdist(x, book).argmin(-1)
        ctx.save_for_backward(index, book)
        return book[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        index, book = ctx.saved_tensors
        return gradient, torch.zeros_like(book).index_add_(0, index, gradient)


class Quantizer(nn.Module):
    """A vector quantizer that counts how often an entry is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.randn(6, WIDTH))
        self.register_buffer("taken", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.taken += torch.bincount(torch.cdist(x, self.book).argmin(-1), minlength=6)
        return Nearest.apply(x, self.book)


class Spectral(nn.Module):
    """A filter in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = (nn.Parameter(torch.randn(WIDTH // 2 + 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.complex(self.real, self.imaginary).tanh(), n=WIDTH)


class Counting(nn.Module):
    """A number that decides what a step computes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop, self.steps = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.drop(self.lin(x)) / self.steps if self.steps % 2 else self.lin(x)


class Ragged(nn.Module):
    """Rows by a boolean index: their number depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x[x[:, 0] > 0])


class AroundRagged(nn.Module):
    """A sum over such rows, in an inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lin = Ragged(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(self.inner(x)).sum(0)


class Slope(nn.Module):
    """A derivative along its inputs, which is differentiated again."""

    def __init__(self, *, by_func: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.by_func = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), by_func

    def energy(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        if self.by_func:
            return torch.func.grad(self.energy)(x)
        return torch.autograd.grad(self.energy(x), x, create_graph=True)[0]


class Net(nn.Module):
    """A part between two linear layers."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.last(torch.relu(self.part(self.first(x), **others))).pow(2).mean()


class Adversary(nn.Module):
    """A Function that the model itself calls, by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(reverse(self.first(x), 0.3))).pow(2).mean()


class Calling(nn.Module):
    """A function of torch, called by the model itself."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), function

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        return self.last(y).pow(2).mean() + self.function(y).square().mean()


def alignment(y: Tensor) -> Tensor:
    targets, lengths = torch.arange(2 * ROWS).view(ROWS, 2) % (WIDTH - 1) + 1, torch.arange(ROWS) % 3 + 4
    steps = y.log_softmax(-1) * torch.arange(1, 7)[:, None, None]
    return nn.functional.ctc_loss(steps.log_softmax(-1), targets, lengths, torch.full((ROWS,), 2))


class Block(nn.Module):
    """A residual block with such a part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.part = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), Counting()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.part(torch.tanh(x))))))


class Deep(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.last = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return self.last(x).pow(2).mean()


def _more(**others: Tensor) -> Batch:
    return {"x": torch.randn(ROWS, WIDTH).double(), **others}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], str]] = {
    "boolean index": (lambda: Net(Masked()), _more, "part"),
    "branch on a mask": (lambda: Net(Gated()), lambda: _more(mask=torch.rand(ROWS) > 0.5), "part"),
    "lengths": (lambda: Net(Lengths()), lambda: _more(lengths=torch.tensor([1, 2, 3, 6, 5, 4, 3, 2])), "part"),
    "gradient reversal": (Adversary, _more, "tests.foreign.Reverse"),
    "quantizer": (lambda: Net(Quantizer()), _more, "part"),
    "fourier": (lambda: Net(Spectral()), _more, "part"),
    "python state": (lambda: Net(Counting()), _more, "part"),
    "function": (lambda: Calling(alignment), _more, "torch.nn.functional.ctc_loss"),
    "function of many results": (
        lambda: Calling(lambda y: torch.linalg.lstsq(y, y.roll(1, 0) + 1).solution),
        _more,
        "torch.linalg.lstsq",
    ),
    "derivative": (lambda: Net(Slope()), _more, "part"),
    "ragged inside": (lambda: Net(AroundRagged()), _more, "part"),
}
"""Models, their batches, and the part that is found to be foreign."""


def make(name: str) -> tuple[nn.Module, Batch]:
    """A model of `MODELS` in float64, with its batch."""
    torch.manual_seed(0)
    model, batch, _ = MODELS[name]
    return model().double(), batch()
