"""Deep models captured from one layer of each kind: the same graph as of all, or all of them are exported."""

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
from shardwright.pcg.capture.alike import ForwardTrace
from shardwright.pcg.capture.capture import Captured, capture, trace_of
from shardwright.pcg.capture.deepening import deepened
from shardwright.pcg.capture.depth import Layers, lists_of_layers, shortened
from shardwright.pcg.capture.kinds import chosen
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
    with mock.patch.object(capturing, "lists_of_layers", return_value=[]):
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
    """Captured from a trace, and with all layers exported; whether the first was, in the end, of few."""
    found, trace = list[bool](), trace_of(model, given, options.get("precision"))
    with noted(found):
        own = capture(model, given, trace=trace, **options)
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


def test_a_trace_is_used_once() -> None:
    """A capture that is begun again may get other answers, and look into fewer parts."""
    model, given = Net(8), batch()
    trace, traces = trace_of(model, given), list[ForwardTrace]()
    traced = mock.patch.object(
        capturing, "ForwardTrace", lambda *args: traces.append(ForwardTrace(*args)) or traces[-1]
    )
    with traced:
        capture(model, given, trace=trace)
        assert not traces
        with mock.patch.object(capturing, "as_in_eager", lambda begin: (begin(), begin())[1]):
            capture(model, given, trace=trace)
    assert len(traces) == 1


@each("num, precision", [(8, None), (9, "amp_bf16"), (13, {"layers.*.norm": "fp32", "*": "amp_bf16"})])
def test_the_graph_of_few_layers_is_that_of_all(num: int, precision: Any) -> None:
    own, whole, of_few = both(Net(num), batch(), precision=precision)
    assert of_few
    assert_same(own, whole)


NUM_LAYERS = 8
"""Of each list of real models. To export more of them takes seconds."""
IDS = torch.randint(3, 90, (2, 8))


def sized(**more: Any) -> dict[str, Any]:
    """Sizes of a small decoder."""
    return {
        "vocab_size": 96, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8,
        "num_key_value_heads": 1, "num_hidden_layers": NUM_LAYERS, "sliding_window": 4, "use_cache": False,
        "pad_token_id": 0, "max_position_embeddings": 64, **more,
    }  # fmt: skip


FEW: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
STATE: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4}
HALF = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 16, "n_layer": NUM_LAYERS, "n_head": 2, "vocab_size": 96}),
    "T5ForConditionalGeneration": ("T5Config", {
        "d_model": 16, "d_ff": 16, "num_heads": 2, "d_kv": 8, "num_layers": NUM_LAYERS, "vocab_size": 96,
        "decoder_start_token_id": 0, "use_cache": False,
    }),
    "MixtralForCausalLM": ("MixtralConfig", sized(num_local_experts=4)),
    "MistralForCausalLM": ("MistralConfig", sized()),
    "Gemma2ForCausalLM": ("Gemma2Config", sized()),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", sized(layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2)),
    "GptOssForCausalLM": ("GptOssConfig", sized(num_local_experts=4, num_experts_per_tok=2, layer_types=HALF)),
    "Llama4ForCausalLM": ("Llama4TextConfig", sized(
        num_local_experts=4, intermediate_size_mlp=16, attention_chunk_size=4,
    )),
    "JambaForCausalLM": ("JambaConfig", sized(
        num_experts=4, use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4, attn_layer_period=4,
        attn_layer_offset=2,
    )),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", sized(
        **FEW, shared_expert_intermediate_size=8, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
    )),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", sized(
        num_key_value_heads=2, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=8,
        first_k_dense_replace=3, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    )),
    "FalconH1ForCausalLM": ("FalconH1Config", sized(
        mamba_d_ssm=16, **{**STATE, "mamba_d_head": 4},
    )),
    "SmolLM3ForCausalLM": ("SmolLM3Config", sized()),
}  # fmt: skip
"""Architectures of equal layers, of layers that repeat with a period, and of runs of layers, by configuration."""


@pytest.mark.parametrize("name", some(["GptOssForCausalLM", *ARCHITECTURES], 1))
def test_real_models_too(name: str) -> None:
    import transformers

    config, options = ARCHITECTURES[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**options)).train()
    own, whole, of_few = both(model, {"input_ids": IDS, "labels": IDS.clone()})
    assert of_few
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


class Third(Layer):
    """A layer of which every third does something else."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)) if self.number % 3 == 2 else super().forward(x)


class Wide(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)


class Table(Layer):
    """A layer that computes a constant, which capture computes once for all of a kind."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(WIDTH) * 0.5
        return super().forward(x + (positions.sin() if self.number % 3 == 2 else positions.cos()))


class Tied(Layer):
    first: list[Layer] = []  # noqa: RUF012  no module looks into a list

    def __init__(self, number: int) -> None:
        super().__init__(number)
        if number == 0:
            self.first[:] = [self]
        self.up.weight = self.first[0].up.weight


class Pairs(Net):
    """Layers that hand on two values."""

    def run(self, x: Tensor) -> Tensor:
        y = torch.ones(WIDTH)
        for layer in self.layers:
            x, y = layer(x, y)
        return x + y


class PairOrThird(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.layer = number, Layer(number)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.layer(x) + y
        normed = self.layer.norm(z)
        return (normed, z) if self.number % 3 == 2 else (z, normed)


class Doubling(PairOrThird):
    """It hands on a power of two, which no weight has made."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x) + y, y * 2


class Shaped(PairOrThird):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.layer(x) + y
        return z, torch.zeros_like(z) if self.number == 0 else torch.ones_like(z)


class Written(Net):
    """Layers write into one tensor in place."""

    def run(self, x: Tensor) -> Tensor:
        shared = torch.zeros(WIDTH)
        for layer in self.layers:
            x = layer(x, shared)
        return x + shared


class Writing(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.layer = number, Layer(number)

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        y = self.layer(x)
        self.write(y, shared)
        return y

    def write(self, y: Tensor, shared: Tensor) -> None:
        shared.add_(y[0])


class SomeWriting(Writing):
    def write(self, y: Tensor, shared: Tensor) -> None:
        if self.number % 2:
            shared.add_(y[0])


class SomeMeasuring(Writing):
    """Batch norm writes statistics, of which its schema says nothing."""

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        y = self.layer(x)
        return nn.functional.batch_norm(y, shared, torch.ones(WIDTH), training=True) if self.number % 2 else y


class Stepping(Writing):
    """A layer that counts in a tensor; the last one does something else, too."""

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        y = self.layer(x + shared.add_(1.0))
        return y.sin() if self.number == 9 else y


class ReadingFourth(Net):
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
    "constants": lambda: Net(10, WithConstant),
    "operators between": Alternating,
    "collected": Collecting,
    "read by all": Dense,
    "the last first": Backward,
    "two before": Skipping,
    "twice": Twice,
    "hands on what is common": lambda: Pairs(10, Doubling),
    "hands on what is common but for its shape": lambda: Pairs(10, Shaped),
    "some write what all know": lambda: Written(11, SomeWriting),
    "some measure for all": lambda: Written(11, SomeMeasuring),
    "counts in what all know": lambda: Written(10, Stepping),
    "reads the fourth": ReadingFourth,
    "tied to the fourth": TiedToFourth,
    "a name that a copy would have": named_as_a_copy,
}


ALIKE_AT_FIRST = ("a name that a copy would have",)
"""Of these, few layers are exported before it is seen."""


class HeadReads(Net):
    """The head reads a value of a layer, beside the last layer's result, or a weight."""

    def __init__(self, what: str) -> None:
        super().__init__(10)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(found[-1]))
        beside = found[2] if self.what == "second" else self.layers[int(self.what)].scale
        return self.head(found[-1] * beside).square().mean()


class WithNorm(Layer):
    """It gives a second value, which the next layer does not read."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        normed = self.norm(x)
        return super().forward(x) + normed, normed


class HeadReadsTwo(Net):
    """The head reads both values of the last layer."""

    def __init__(self) -> None:
        super().__init__(10, WithNorm)

    def run(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            x, y = layer(x)
        return x * y


KINDS: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "one numbered": (lambda: Net(10, SomeNumbered), [0, 1, 6, 9]),
    "gradients from one on": (lambda: Net(14, Frozen), [0, 1, 7, 8]),
    "another dropout": (lambda: Net(10, odd), [0, 1, 5, 9]),
    "another result": (lambda: Net(10, VarianceOrMean), [0, 1, 6, 9]),
    "another argument": (lambda: Net(10, BetaOrAlpha), [0, 1, 6, 9]),
    "another sign of zero": (lambda: Net(10, PlusOrMinusZero), [0, 1, 6, 9]),
    "by number": (Numbers, [0, 1]),
    "a period of three": (lambda: Net(12, Third), [0, 1, 2]),
    "a period of three, and two values": (lambda: Pairs(18, PairOrThird), [0, 1, 2, 3, 4, 17]),
    "all write what all know": (lambda: Written(10, Writing), [0, 1, 2]),
    "runs": (lambda: Net(12, lambda n: (Layer, SomeNumbered, Third)[n // 4](n)), [0, 1, 4, 6, 8]),
    "weights of the first": (lambda: Net(10, Tied), [0, 1]),
    "layers of two sizes": (lambda: Net(12, lambda n: Wide(n) if n % 4 == 3 else Layer(n)), [0, 1, 3]),
    "the head reads the second": (lambda: HeadReads("second"), [0, 1, 9]),
    "the head reads the last's weight": (lambda: HeadReads("9"), [0, 1, 9]),
    "the head reads the second's weight": (lambda: HeadReads("1"), [0, 1]),
    "the head reads two values": (HeadReadsTwo, [0, 1, 9]),
    "a common table": (lambda: Net(12, Table), [0, 1, 2]),
}
"""Models of several kinds of layers, and the layers that are exported."""


@each("name", some(KINDS, 6))
def test_one_layer_of_each_kind_is_exported(name: str) -> None:
    make, kept = KINDS[name]
    found, kinds = list[list[int]](), ForwardTrace.kinds

    def noting(trace: ForwardTrace) -> list[Layers] | None:
        few = kinds(trace)
        found.extend(layers.kept for layers in few or ())
        return few

    with mock.patch.object(ForwardTrace, "kinds", noting):
        own, whole, of_few = both(make(), batch())
    assert found == [kept]
    assert of_few
    assert_same(own, whole)


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


def numbers(model: nn.Module) -> list[list[int]]:
    return [[*layers.stands_for] for layers in lists_of_layers(model)]


def test_lists_of_few_or_shared_or_unlike_layers_are_exported_whole() -> None:
    assert numbers(Net(8)) == [[*range(8)]]
    assert not numbers(Net(7))
    shared = Layer(0)
    assert not numbers(Net(10, lambda number: shared))
    assert not numbers(Net(10, lambda n: nn.Linear(WIDTH, n + 1)))
    assert numbers(Net(10, lambda n: nn.Linear(WIDTH, n // 2 + 1))) == [[*range(10)]]
    nested = Net(8, lambda n: nn.Sequential(*map(Layer, range(8))))
    assert [layers.path for layers in lists_of_layers(nested)] == ["layers"]


def test_the_first_and_last_layers_and_one_of_each_kind_are_kept() -> None:
    calls = dict(enumerate([0, 1, 1, 3, 1, 1, 3, 1, 1, 3]))
    found = chosen("layers", calls, {**calls, 9: 9}, (), ())
    assert found is not None
    assert found.kept == [0, 1, 3, 9]
    assert found.stands_for == {0: 0, 1: 1, 2: 1, 3: 3, 4: 1, 5: 1, 6: 3, 7: 1, 8: 1, 9: 9}
    apart = chosen("layers", calls, calls, (4,), ())
    assert apart is not None
    assert apart.kept == [0, 1, 3, 4, 9]
    assert apart.stands_for[7] == 4, "it stands behind a layer of the same kind"
    assert chosen("layers", calls, dict(zip(calls, calls, strict=True)), (), ()) is None
    alike = {0: 0, **dict.fromkeys(range(1, 10), 1)}
    kept = [found and found.kept for found in (chosen("layers", alike, alike, apart, ()) for apart in ((), (1,)))]
    assert kept == [[0, 1], [0, 1, 9]], "the last stands for itself behind one that is read by others too"


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
        (Gaps(10, 0), [[*range(1, 10)]]),
        (Gaps(10, 0, 3), [[1, 2, *range(4, 10)]]),
        (Gaps(10, 0, 3, 9), []),
        (Gaps(9, *range(9)), []),
        (Gaps(20, *range(0, 20, 2)), [[*range(1, 20, 2)]]),
        (Net(0), []),
    ],
)
def test_layers_that_are_none(model: Net, found: list[list[int]]) -> None:
    assert numbers(model) == found


def test_layers_behind_gaps_are_captured_of_few() -> None:
    own, whole, of_few = both(Gaps(12, 0, 5, 6), batch())
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
    assert exported == [2]


def test_a_graph_whose_layers_are_no_chain_is_not_deepened() -> None:
    stands_for, calls = {0: 0, 1: 1, 2: 1, 3: 3}, {0: 0, 1: 1, 2: 1, 3: 1}
    found = [Layers("layers", stands_for, calls, calls)]

    def of_few(model: Net) -> object:
        with shortened(model, found):
            return deepened(capture(model, batch()).graph, found)

    assert of_few(Net(4)) is not None
    for other in (Net(4, Numbered), Net(4, WithConstant)):
        assert of_few(other) is None, type(other).__name__
