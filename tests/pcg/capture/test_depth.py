"""Deep models captured from four of their layers: the same graph as of all, or all of them are exported."""

# transformers' configurations take more keywords than their signatures name
# pyright: reportCallIssue=false

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwright.pcg.capture import capture as capturing
from shardwright.pcg.capture import depth
from shardwright.pcg.capture.capture import Captured, capture
from shardwright.pcg.capture.depth import KEPT, deepened, runs
from shardwright.pcg.errors import CaptureError
from shardwright.search.check import difference
from shardwright.search.plan import fingerprint
from tests.each import each, some

WIDTH = 8


class Layer(nn.Module):
    """A feed-forward layer with dropout, whose number is known."""

    def __init__(self, number: int, drop: float = 0.1) -> None:
        super().__init__()
        self.number, self.drop = number, drop
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(self.norm(x) * self.scale)))
        return x + nn.functional.dropout(y, self.drop, self.training)


class Net(nn.Module):
    """A stem, layers, a head that is not one of them, and a loss."""

    def __init__(self, num: int = 10, layer: Callable[[int], nn.Module] = Layer) -> None:
        super().__init__()
        self.stem, self.layers, self.head = (
            nn.Linear(4, WIDTH),
            nn.ModuleList(map(layer, range(num))),
            nn.Linear(WIDTH, 2),
        )

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.stem(x) * 0.5)).square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 4)}


@contextmanager
def exported_whole() -> Generator[None]:
    with mock.patch.object(capturing, "runs", return_value=[]):
        yield


@contextmanager
def noted(found: list[bool]) -> Generator[None]:
    """Whether each capture was one of few layers."""
    of_few = capturing._of_few

    def noting(*args: Any) -> Any:
        result = of_few(*args)
        found.append(result is not None)
        return result

    with mock.patch.object(capturing, "_of_few", noting):
        yield


class EndedError(Exception):
    """Before all layers are exported."""


def both(model: nn.Module, given: dict[str, Any], **options: Any) -> tuple[Captured, Captured, bool]:
    """Captured as it is, and with all layers exported; whether the first was, in the end, of few."""
    found = list[bool]()
    with noted(found):
        own = capture(model, given, **options)
    with exported_whole():
        return own, capture(model, given, **options), found[-1]


def assert_same(own: Captured, whole: Captured) -> None:
    assert difference(own.graph, whole.graph) is None
    assert fingerprint(own.graph) == fingerprint(whole.graph)
    assert [(n.op, str(n.source)) for n in own.graph.nodes] == [(n.op, str(n.source)) for n in whole.graph.nodes]
    leaves = [[(n.name, n.attrs) for n in found.graph.nodes if n.is_leaf] for found in (own, whole)]
    assert leaves[0] == leaves[1]
    assert own.aliases == whole.aliases
    assert own.constants.keys() == whole.constants.keys()


@each("num, precision", [(8, None), (9, "amp_bf16"), (13, {"layers.*.norm": "fp32", "*": "amp_bf16"})])
def test_the_graph_of_few_layers_is_that_of_all(num: int, precision: Any) -> None:
    own, whole, of_few = both(Net(num), batch(), precision=precision)
    assert of_few
    assert_same(own, whole)


NUM_LAYERS = KEPT + 2
"""Of each list of real models. To export more of them takes seconds."""


def transformers() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    from transformers import (  # takes seconds
        GPT2Config,
        GPT2LMHeadModel,
        MixtralConfig,
        MixtralForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    ids = torch.randint(3, 90, (2, 8))
    given = {"input_ids": ids, "labels": ids.clone()}
    small: dict[str, Any] = {"vocab_size": 96, "use_cache": False, "pad_token_id": 0}
    moe: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    models = (
        GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=NUM_LAYERS, n_head=2, **small)),
        MixtralForCausalLM(
            MixtralConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=NUM_LAYERS, **moe, **small)
        ),
        T5ForConditionalGeneration(
            T5Config(d_model=16, d_ff=16, num_heads=2, d_kv=8, num_layers=NUM_LAYERS, decoder_start_token_id=0, **small)
        ),
    )
    return {type(model).__name__: (model.train(), given) for model in models}


def test_real_models_too() -> None:
    for name, (model, given) in some(transformers().items(), 1):
        with mock.patch.object(depth, "_FEWEST", NUM_LAYERS - 1):  # T5's first ones are unlike the others
            own, whole, of_few = both(model, given)
        assert of_few, name
        assert_same(own, whole)


class Numbered(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.number + 1)


class SomeNumbered(Layer):
    """What no sample of layers shows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.number == 6 else 3.0)


class Frozen(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.number > 6):
            return super().forward(x)


class WithConstant(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tensor([float(self.number)])


class Alternating(Net):
    def run(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) if number % 2 else layer(-x)
        return x


class Dense(Net):
    """Each layer reads what the first one gave."""

    def run(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in [*self.layers][1:]:
            x = layer(x + first)
        return x


class Collecting(Net):
    def run(self, x: Tensor) -> Tensor:
        seen = [x := layer(x) for layer in self.layers]
        return torch.stack(seen).sum(0)


class Backward(Net):
    def run(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class Numbers(Net):
    def run(self, x: Tensor) -> Tensor:
        for number in range(10):
            x = self.layers[number](x)
        return x


class Skipping(Net):
    """Each layer reads what the one before the last gave, too."""

    def run(self, x: Tensor) -> Tensor:
        before = x
        for layer in self.layers:
            before, x = x, layer(x + before)
        return x


class Twice(Net):
    def run(self, x: Tensor) -> Tensor:
        return super().run(super().run(x))


class VarianceOrMean(Layer):
    """Two results of one operator, which look the same."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, -1, keepdim=True)
        return super().forward(x) + (variance if self.number == 6 else mean)


class BetaOrAlpha(Layer):
    """One number under two names."""

    def forward(self, x: Tensor) -> Tensor:
        beta, alpha = (2, 1) if self.number == 6 else (1, 2)
        return super().forward(torch.addmm(x, x, self.norm.weight.diag(), beta=beta, alpha=alpha))


class PlusOrMinusZero(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.masked_fill(x > 0, -0.0 if self.number == 6 else 0.0))


class ReadingFourth(Net):
    """The fourth is the last one of those that are exported."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(x) + self.get_parameter("layers.3.up.weight").sum()


class TiedToFourth(Net):
    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(WIDTH, 16)
        self.back.weight = self.get_parameter("layers.3.up.weight")

    def run(self, x: Tensor) -> Tensor:
        return super().run(x) + self.back(x).mean()


def named_as_a_copy() -> Net:
    model = Net()
    model.register_parameter("layers_6_up_weight", nn.Parameter(torch.ones(WIDTH)))
    model.stem.register_forward_hook(lambda *call: call[-1] * model.get_parameter("layers_6_up_weight"))
    return model


def odd(number: int) -> Layer:
    return Layer(number, 0.2 if number == 5 else 0.1)


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "numbered": lambda: Net(10, Numbered),
    "one numbered": lambda: Net(10, SomeNumbered),
    "gradients from one on": lambda: Net(10, Frozen),
    "constants": lambda: Net(10, WithConstant),
    "another dropout": lambda: Net(10, odd),
    "operators between": Alternating,
    "read by all": Dense,
    "collected": Collecting,
    "the last first": Backward,
    "by number": Numbers,
    "two before": Skipping,
    "twice": Twice,
    "another result": lambda: Net(10, VarianceOrMean),
    "another argument": lambda: Net(10, BetaOrAlpha),
    "another sign of zero": lambda: Net(10, PlusOrMinusZero),
    "reads the fourth": ReadingFourth,
    "tied to the fourth": TiedToFourth,
    "a name that a copy would have": named_as_a_copy,
}


ALIKE_AT_FIRST = ("reads the fourth", "tied to the fourth", "a name that a copy would have")
"""Of these, few layers are exported before it is seen."""


@each("name", WHOLE)
def test_what_does_not_repeat_is_not_captured_of_few(name: str) -> None:
    found = list[bool]()
    settled = capturing.settled

    def of_few(model: Any, once: Any) -> Any:
        if found:
            raise EndedError
        return settled(model, once)

    with noted(found), mock.patch.object(capturing, "settled", of_few), pytest.raises(EndedError):
        capture(WHOLE[name](), batch())
    assert found == [False]


@each("name", some(["numbered", *ALIKE_AT_FIRST], 1))
def test_what_does_not_repeat_is_exported_whole(name: str) -> None:
    own, whole, of_few = both(WHOLE[name](), batch())
    assert not of_few
    assert difference(own.graph, whole.graph) is None


class Sixth(Layer):
    """One of the layers that are not exported does what is refused."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.number == 6:
            self.act(y)
        return y

    def act(self, y: Tensor) -> None:
        raise NotImplementedError


class HookedInForward(Sixth):
    def act(self, y: Tensor) -> None:
        y.register_hook(lambda gradient: gradient * 2)


class Counting(Sixth):
    def act(self, y: Tensor) -> None:
        self.steps = getattr(self, "steps", 0) + 1


class Drawing(Sixth):
    def act(self, y: Tensor) -> None:
        random.random()


class Seeding(Sixth):
    def act(self, y: Tensor) -> None:
        torch.manual_seed(3)


def hooked(register: Callable[[Layer], object]) -> Net:
    model = Net()
    for number, layer in enumerate(model.layers):
        if number == 6:
            register(cast(Layer, layer))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook on a gradient": (lambda: Net(10, HookedInForward), "a hook is registered on the gradient"),
    "state": (lambda: Net(10, Counting), "forward changes 'steps'"),
    "a draw": (lambda: Net(10, Drawing), "forward draws from Python's random"),
    "a seed": (lambda: Net(10, Seeding), "forward seeds torch's generator"),
    "hook of a parameter": (
        lambda: hooked(lambda layer: layer.up.weight.register_hook(lambda gradient: gradient)),
        "layers.6.up.weight has the hook",
    ),
    "hook of backward": (
        lambda: hooked(lambda layer: layer.register_full_backward_hook(lambda *_: None)),
        "would not be called in training",
    ),
    "silent hook": (lambda: hooked(lambda layer: layer.register_forward_hook(lambda *_: None)), "returns nothing"),
}


@each("name", REFUSED)
def test_what_a_layer_that_is_not_exported_does_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    model, given, state = make(), batch(), (torch.get_rng_state(), random.getstate())
    with pytest.raises(CaptureError, match=message):
        capture(model, given)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]


def test_what_settles_in_all_layers_alike_is_captured_of_few() -> None:
    class Settling(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.width = x.shape[-1]
            return super().forward(x) / self.width

    own, whole, of_few = both(Net(10, Settling), batch())
    assert of_few
    assert_same(own, whole)


def test_buffers_without_data_stay_free_of_gradients() -> None:
    class Averaging(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(WIDTH))

        def run(self, x: Tensor) -> Tensor:
            y = super().run(x)
            self.get_buffer("average").mul_(0.9).add_(y.mean(0))
            return y

    with FakeTensorMode():
        model, given = Averaging(), batch()
    own, whole, of_few = both(model, given)
    assert of_few
    assert_same(own, whole)
    assert not model.get_buffer("average").requires_grad


def test_lists_of_few_or_shared_or_unlike_layers_are_no_runs() -> None:
    assert [run[1:] for run in runs(Net(8))] == [(0, 8)]
    assert not runs(Net(7))
    shared = Layer(0)
    assert not runs(Net(10, lambda number: shared))
    assert [run[1:] for run in runs(Net(12, lambda n: Layer(n) if n > 1 else nn.Linear(WIDTH, WIDTH)))] == [(2, 12)]
    assert not runs(Net(10, lambda n: Layer(n) if n < 9 else nn.Linear(WIDTH, WIDTH)))
    frozen = Net(10)
    next(frozen.layers[4].parameters()).requires_grad = False
    assert [run[1:] for run in runs(frozen)] == []
    nested = Net(8, lambda n: nn.Sequential(*map(Layer, range(8))))
    assert [run.path for run in runs(nested)] == ["layers"]


class Gaps(Net):
    """Some of its layers have been taken out."""

    def __init__(self, num: int, *gone: int) -> None:
        super().__init__(num)
        layers: dict[str, Any] = vars(self.layers)["_modules"]
        layers.update(dict.fromkeys(map(str, gone)))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if isinstance(layer, nn.Module) else x
        return x


@each(
    "model, found",
    [
        (Gaps(10, 0), [(1, 10)]),
        (Gaps(14, 0, 3), [(4, 14)]),
        (Gaps(10, 9), []),
        (Gaps(9, *range(9)), []),
        (Gaps(20, *range(0, 20, 2)), []),
        (Net(0), []),
    ],
)
def test_layers_that_are_none(model: Net, found: list[tuple[int, int]]) -> None:
    assert [run[1:] for run in runs(model)] == found


def test_layers_behind_gaps_are_captured_of_few() -> None:
    own, whole, of_few = both(Gaps(10, 0), batch())
    assert of_few
    assert_same(own, whole)


def test_other_layers_at_the_front_stay() -> None:
    own, whole, of_few = both(Net(12, lambda n: Layer(n) if n > 1 else nn.Linear(WIDTH, WIDTH)), batch())
    assert of_few
    assert_same(own, whole)


def test_the_model_stays_as_it_was() -> None:
    class Remembering(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = [*getattr(self, "seen", []), x][-1:]
            return super().forward(x)

    for model in (Net(10), Net(10, Numbered), Net(10, Remembering)):
        names, given, state = [name for name, _ in model.named_modules()], batch(), torch.get_rng_state()
        with mock.patch.object(capturing, "settled", side_effect=KeyError), pytest.raises(KeyError):  # what comes next
            capture(model, given)
        assert [name for name, _ in model.named_modules()] == names
        assert torch.equal(torch.get_rng_state(), state)
        values = [value for module in model.modules() for value in vars(module).values()]
        assert not any(isinstance(value, FakeTensor) or (isinstance(value, list) and value) for value in values)
        assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_models_without_data_are_captured_so_too() -> None:
    with FakeTensorMode():
        model, given = Net(10), batch()
    own, whole, of_few = both(model, given)
    assert of_few
    assert_same(own, whole)


def test_only_a_few_layers_are_exported() -> None:
    exported = list[int]()
    export = capturing.export

    def counting(*args: Any) -> torch.export.ExportedProgram:
        found = export(*args)
        exported.append(sum("layer_norm" in str(node.target) for node in found.graph.nodes))
        return found

    with mock.patch.object(capturing, "export", counting):
        assert sum(n.op == "layer_norm" for n in capture(Net(20), batch()).graph.nodes) == 20
    assert exported == [KEPT]


def test_a_graph_whose_layers_are_no_chain_is_not_deepened() -> None:
    model = Net(KEPT)
    with mock.patch("shardwright.pcg.capture.depth._FEWEST", KEPT):
        found = runs(model)
    assert deepened(capture(model, batch()).graph, found) is not None
    for other in (Collecting(KEPT), Skipping(KEPT), Alternating(KEPT), Net(KEPT, Numbered), Net(KEPT, WithConstant)):
        assert deepened(capture(other, batch()).graph, found) is None, type(other).__name__
