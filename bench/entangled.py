"""Models that are hard to plan: many operators that join many others, and many that all differ in shape."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

Example = tuple[nn.Module, dict[str, Tensor]]


class DenseLayer(nn.Module):
    """Norm, 1 × 1, norm, 3 × 3 of all that came before it in its block."""

    def __init__(self, channels: int, growth: int = 32) -> None:
        super().__init__()
        self.norm_1, self.conv_1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm_2, self.conv_2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_2(F.relu(self.norm_2(self.conv_1(F.relu(self.norm_1(x))))))


class DenseBlock(nn.Module):
    def __init__(self, layers: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(channels + 32 * i) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, 1)))
        return torch.cat(parts, 1)


class DenseNet(nn.Module):
    """DenseNet-121 (Huang et al. 2017, table 1)."""

    def __init__(self) -> None:
        super().__init__()
        channels, layers = 64, (6, 12, 24, 16)
        parts: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        parts.append(nn.MaxPool2d(3, 2, 1))
        for number, count in enumerate(layers):
            parts.append(DenseBlock(count, channels))
            channels += 32 * count
            if number + 1 < len(layers):
                parts += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False)]
                parts.append(nn.AvgPool2d(2))
                channels //= 2
        parts += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.features, self.head = nn.Sequential(*parts), nn.Linear(channels, 1000)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(x)), y)


class Recurrent(nn.Module):
    """An LSTM cell in a loop, which uses its weights in every step."""

    def __init__(self, steps: int = 16, width: int = 256) -> None:
        super().__init__()
        self.cell, self.head, self.steps, self.width = nn.LSTMCell(width, width), nn.Linear(width, width), steps, width

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], self.width)
        for t in range(self.steps):
            h, c = self.cell(x[:, t], (h, c))
        return self.head(h).square().mean()


def fake(build: Callable[[], Example]) -> Callable[[], Example]:
    """The same without memory for values."""

    def built() -> Example:
        with FakeTensorMode():
            return build()

    return built


def unrepeated(layers: int = 3333, unit: int = 64) -> Example:
    """Products, biases and activations of some 115 widths, in an order in which no part repeats as a block."""
    widths = [unit * (1 + i % 61) for i in range(layers)]
    outer = [unit * (1 + i // 61) for i in range(layers)]
    sizes = [w + o for w, o in zip(widths, outer, strict=True)]
    parts: list[nn.Module] = []
    for before, after in pairwise([sizes[0], *sizes]):
        parts += [nn.Linear(before, after), nn.ReLU()]
    return Squared(nn.Sequential(*parts)), {"x": torch.zeros(256, sizes[0])}


class Squared(nn.Module):
    """The mean square of what a network gives."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).square().mean()


def densenet() -> Example:
    return DenseNet(), {"x": torch.zeros(256, 3, 224, 224), "y": torch.zeros(256, dtype=torch.long)}


def lstm() -> Example:
    return Recurrent(), {"x": torch.zeros(256, 16, 256)}
