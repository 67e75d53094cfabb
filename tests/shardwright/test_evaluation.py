"""`parallel.evaluate` gives what the model returns: nests of tensors, of which each rank has its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

import shardwright as sw
from shardwright.lowering.module import lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.capture.returned import Returned
from shardwright.pcg.errors import CaptureError, DistributedError, PlanError, ShardwrightError
from tests.shardwright.test_programs import Net, batch_of, model_of

PLANS: dict[str, dict[str, Any]] = {
    "zero": {"mesh": {"x": 2}, "roles": "zero"},
    "tensor": {"mesh": {"x": 2}, "roles": "tensor", "recompute": "full"},
    "chunks": {"stages": 2, "microbatches": 2, "schedule": "interleaved"},
    "stages and data": {"stages": 2, "microbatches": 2, "schedule": "1f1b", "mesh": {"x": 2}, "roles": "zero"},
}


class Model(nn.Module):
    """It returns a nest: logits, values between, a number, its own input, and a loss where there are labels."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        states = [self.net.tok(ids)]
        for block in self.net.blocks:
            states.append(block(states[-1]))
        logits = self.net.head(self.net.seen(states[-1].transpose(1, 2)).transpose(1, 2))
        found = {"logits": logits, "states": tuple(states), "number": 3, "labels": labels, "bias": self.net.head.bias}
        if labels is None:
            return found
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), **found}


def gathered(result: object) -> Any:
    """The same with whole tensors, in memory of their own."""

    def whole(x: object) -> object:
        x = x.full_tensor() if isinstance(x, DTensor) else x
        return x.clone() if isinstance(x, Tensor) else x

    return tree_map(whole, result)


def batches() -> list[dict[str, Tensor]]:
    """One as in training, one without labels, one of another shape that two ranks do not share evenly."""
    return [batch_of(8, 6), {"ids": batch_of(8, 6)["ids"]}, batch_of(3, 7)]


def trained_and_evaluated(model: nn.Module, parallel: nn.Module | None = None) -> list[Any]:
    """After a step, and again after another one."""
    found, calls = list[Any](), parallel or model
    optimizer = torch.optim.SGD(calls.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        if parallel is None:
            model.train()(**batch_of(8, 6))["loss"].backward()
        else:
            parallel.forward_backward(**batch_of(8, 6))  # pyright: ignore[reportCallIssue]
        optimizer.step()
        if parallel is None:
            model.eval()
            with torch.no_grad():
                found += [gathered(model(**batch)) for batch in batches()]
        else:
            found += [gathered(parallel.evaluate(**batch)) for batch in batches()]  # pyright: ignore[reportCallIssue]
    return found


def without_dropout(*, norm: bool = True) -> Model:
    model = Model(model_of(norm=norm))
    for block in model.net.blocks:
        block.drop = nn.Dropout(0.0)  # masks are compared elsewhere
    return model


@pytest.mark.filterwarnings("ignore:Model returns")
@pytest.mark.parametrize(("names", "num_ranks"), [(("zero", "tensor", "chunks"), 2), (("stages and data",), 4)])
def test_everything_that_the_model_returns_comes_back(names: tuple[str, ...], num_ranks: int) -> None:
    def body() -> list[tuple[list[Any], tuple[int, ...], bool]]:
        found, cluster = list[tuple[list[Any], tuple[int, ...], bool]](), sw.Cluster.local(num_ranks)
        for options in (PLANS[name] for name in names):
            model = without_dropout(norm="stages" not in options)  # microbatches share no statistics
            parallel = sw.compile(model, cluster, kwargs=batch_of(8, 6), timeout_s=60, **options)
            results = trained_and_evaluated(model, parallel)
            logits = parallel.evaluate(**batch_of(8, 6))["logits"]
            own = logits.to_local() if isinstance(logits, DTensor) else logits
            found.append((results, tuple(own.shape), parallel.training))
        return found

    expected = {norm: trained_and_evaluated(without_dropout(norm=norm)) for norm in (True, False)}
    for by_plan in run_ranks(body, num_ranks, 120):
        for name, (results, own, training) in zip(names, by_plan, strict=True):
            is_cut = "stages" in PLANS[name]
            torch.testing.assert_close(results, expected[not is_cut], rtol=1e-9, atol=1e-11)
            assert own == (8 if name == "chunks" else 4, 6, 32)
            assert training  # the mode stays


def test_results_of_transformers_keep_their_classes() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0,
                        use_cache=False)  # fmt: skip
    model, ids = GPT2LMHeadModel(config), batch_of(4, 8)["ids"]
    expected = model.eval()(input_ids=ids, output_hidden_states=True)

    def body() -> Any:
        parallel = sw.compile(model.train(), sw.Cluster.local(2), kwargs={"input_ids": ids, "labels": ids},
                              mesh={"x": 2}, roles="zero", timeout_s=60, check_capture="never")  # fmt: skip
        return gathered(parallel.evaluate(input_ids=ids, output_hidden_states=True))

    for found in run_ranks(body, 2, 60):
        assert isinstance(found, CausalLMOutputWithCrossAttentions)
        torch.testing.assert_close(dict(found), dict(expected), rtol=1e-4, atol=1e-5)


def test_complex_results_are_refused() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(self.inner(x))

    with pytest.raises(CaptureError, match="returns complex numbers, which no program gives"):
        capture(Waves(), {"x": torch.ones(2, 4)}, returned=Returned())


class Odd(nn.Module):
    """It returns an object beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        return self.inner(x).square().mean(), object()


def test_what_cannot_be_given_is_refused() -> None:
    def body() -> list[str]:
        texts = list[str]()

        def refused(kind: type[Exception], parallel: Any, **batch: Tensor) -> None:
            with pytest.raises(kind) as error:
                parallel.evaluate(**batch)
            texts.append(str(error.value))

        x, two = {"x": torch.ones(4, 4)}, sw.Cluster.local(2)
        refused(AttributeError, sw.compile(Odd(), two, timeout_s=60), **x)
        odd = Odd()
        refused((CaptureError, DistributedError), sw.compile(odd, two, kwargs=x, mesh={"x": 2}, timeout_s=60), **x)  # pyright: ignore[reportArgumentType]
        return texts

    for found in run_ranks(body, 2, 120):
        assert "has no plan before its first call" in found[0]
        assert "returns a object, which no program gives" in found[1]


def test_stages_of_unlike_sizes_are_refused() -> None:
    def body() -> str:
        net, words = model_of(norm=False), {"stages": [2, 1], "microbatches": 2, "mesh": {"x": 2}}
        parallel = sw.compile(net, sw.Cluster.local(3), kwargs=batch_of(8, 6), timeout_s=60, **words)  # pyright: ignore[reportArgumentType]
        with pytest.raises(PlanError) as error:
            parallel.evaluate(**batch_of(8, 6))
        return str(error.value)

    assert all("plan with equal stages" in found for found in run_ranks(body, 3, 60))


def test_a_program_that_was_lowered_by_hand_says_who_makes_others() -> None:
    model = Odd()
    with pytest.raises(ShardwrightError, match=r"evaluate: only shardwright\.compile"):
        run_ranks(lambda: lower(capture(model, {"x": torch.ones(4, 4)}).graph, model).evaluate(x=torch.ones(4, 4)), 1)
