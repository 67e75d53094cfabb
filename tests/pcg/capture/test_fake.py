"""Models without memory are built, converted and planned."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import shardwright as sw
from shardwright.pcg.capture.capture import capture
from tests.each import each


class Tied(nn.Module):
    """Two parameters of one shape, two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.up.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(x)) * self.scale).square().mean()


def converted_inside() -> nn.Module:
    with sw.fake():
        return Tied().to(torch.bfloat16)


def converted_outside() -> nn.Module:
    with sw.fake():
        model = Tied()
    return model.to(torch.bfloat16)


def converted_in_parts() -> nn.Module:
    with sw.fake():
        model = Tied().half()
        for module in model.children():
            module.to("cpu", dtype=torch.bfloat16)
        model.scale = model.scale.bfloat16()
    return model


@each("make", [converted_inside, converted_outside, converted_in_parts])
def test_models_are_converted(make: Callable[[], nn.Module]) -> None:
    """torch's own fake mode swaps no parameter that it has a note of: the first of each shape."""
    model = make()
    assert all(isinstance(value, FakeTensor) for value in (*model.parameters(), *model.buffers()))
    assert {value.dtype for value in (*model.parameters(), *model.buffers())} == {torch.bfloat16}
    assert model.get_parameter("head.weight") is model.get_parameter("up.weight")
    captured = capture(model, {"x": torch.empty(4, 8, dtype=torch.bfloat16)})
    assert captured.aliases["up.weight"] == ("up.weight", "head.weight")


def test_a_fake_model_has_the_graph_of_a_real_one() -> None:
    real = Tied()
    with sw.fake():
        fake = Tied()
        batch = {"x": torch.ones(4, 8)}
    graph = capture(fake, batch).graph
    assert graph == capture(real, {"x": torch.ones(4, 8)}).graph
    assert sw.plan(fake, sw.Cluster.preset("dgx-h100", devices_per_node=2), kwargs=batch).mesh.num_devices == 2


def test_tensors_from_elsewhere_may_be_used_inside() -> None:
    table = torch.arange(8.0)
    with sw.fake():
        assert isinstance(table + torch.ones(8), FakeTensor)


def test_models_on_meta_are_told_of_it() -> None:
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(
        sw.ShardwrightError, match=r"^Tied is on device 'meta', .*; build it inside `with shardwright\.fake"
    ):
        sw.plan(model, sw.Cluster.local(2), kwargs={"x": torch.ones(4, 8)})
