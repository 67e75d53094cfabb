"""`parallel.evaluate` gives what the model returns: nests of tensors, of which each rank has its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

import shardwright as sw
from shardwright.lowering.module import lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.capture.returned import Returned
from shardwright.pcg.errors import BatchError, CaptureError, DistributedError, ShardwrightError
from tests.each import some
from tests.shardwright.test_programs import Net, batch_of, model_of

PLANS: dict[str, dict[str, Any]] = {
    "zero": {"mesh": {"x": 2}, "roles": "zero"},
    "tensor": {"mesh": {"x": 2}, "roles": "tensor", "recompute": "full"},
    "chunks": {"stages": 2, "microbatches": 2, "schedule": "interleaved"},
    "stages and data": {"stages": 2, "microbatches": 2, "schedule": "1f1b", "mesh": {"x": 2}, "roles": "zero"},
    "smaller last": {"stages": [2, 1], "microbatches": 2, "mesh": {"x": 2}, "roles": "data"},
    "larger last": {"stages": [1, 2], "microbatches": 2, "mesh": {"x": 2}, "roles": "zero"},
}
ALONE = {"chunks": (0, 1), "smaller last": (2,), "larger last": (0,)}
"""The ranks with all rows, which are alone in their stage."""


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


def by_row(result: dict[str, Any], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of one row each: floats, a vector, whether each prediction is right."""
    logits, labels = result["logits"], batch["labels"]
    assert isinstance(logits, Tensor)
    assert not isinstance(logits, DTensor)
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
    return {"losses": losses, "right": logits.argmax(-1) == labels, "input": batch["ids"]}


class Adding:
    """It counts rows and right predictions, and adds up over ranks by itself, as metrics of torchmetrics do."""

    def __init__(self) -> None:
        self.state = torch.zeros(2, dtype=torch.float64)

    def __call__(self, result: dict[str, Any], batch: dict[str, Tensor]) -> None:
        right = (result["logits"].argmax(-1) == batch["labels"]).sum()
        self.state += torch.stack([torch.tensor(len(batch["labels"])), right])

    def total(self) -> Tensor:
        total = self.state.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total


def measured_by_row(evaluate: Callable[..., Any]) -> list[Any]:
    """Of rows that ranks share evenly, and of some that they do not."""
    found, adding = list[Any](), Adding()
    for batch in (batch_of(8, 6), batch_of(3, 7), batch_of(1, 7)):
        found.append(evaluate(metrics=by_row, **batch))
        assert evaluate(metrics=adding, **batch) is None
    return [*found, adding.total()]


def of_one_process(model: nn.Module) -> Callable[..., Any]:
    def evaluate(metrics: Callable[..., Any], **batch: Tensor) -> Any:
        with torch.no_grad():
            return metrics(model.eval()(**batch), batch)

    return evaluate


def trained_and_evaluated(model: nn.Module, parallel: nn.Module | None = None) -> list[Any]:
    """After a step, and again after another one, of which evaluation gathers the results."""
    found, calls = list[Any](), parallel or model
    optimizer = torch.optim.SGD(calls.parameters(), lr=0.1)
    for gather in (False, True):
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
            results = [parallel.evaluate(**batch, gather=gather) for batch in batches()]  # pyright: ignore[reportCallIssue]
            assert not gather or not any(isinstance(x, DTensor) for x in tree_leaves(results))
            found += [gathered(result) for result in results]
    return found


def without_dropout(*, norm: bool = True) -> Model:
    model = Model(model_of(norm=norm))
    for block in model.net.blocks:
        block.drop = nn.Dropout(0.0)  # masks are compared elsewhere
    return model


@pytest.mark.filterwarnings("ignore:Model returns")
@pytest.mark.parametrize(
    ("names", "num_ranks"),
    [(some(("tensor", "chunks", "zero"), 2), 2), (["stages and data"], 4), (["smaller last", "larger last"], 3)],
)
def test_everything_that_the_model_returns_comes_back(names: list[str], num_ranks: int) -> None:
    def body() -> list[tuple[list[Any], tuple[int, ...], bool, list[Any]]]:
        found, cluster = list[tuple[list[Any], tuple[int, ...], bool, list[Any]]](), sw.Cluster.local(num_ranks)
        for options in (PLANS[name] for name in names):
            model = without_dropout(norm="stages" not in options)  # microbatches share no statistics
            parallel = sw.compile(model, cluster, kwargs=batch_of(8, 6), timeout_s=60, **options)
            results = trained_and_evaluated(model, parallel)
            logits = parallel.evaluate(**batch_of(8, 6))["logits"]
            own = logits.to_local() if isinstance(logits, DTensor) else logits
            found.append((results, tuple(own.shape), parallel.training, measured_by_row(parallel.evaluate)))
        return found

    models = {norm: without_dropout(norm=norm) for norm in (True, False)}
    expected = {norm: trained_and_evaluated(model) for norm, model in models.items()}
    by_rows = {norm: measured_by_row(of_one_process(model)) for norm, model in models.items()}
    for rank, by_plan in enumerate(run_ranks(body, num_ranks, 120)):
        for name, (results, own, training, rows) in zip(names, by_plan, strict=True):
            is_cut = "stages" in PLANS[name]
            torch.testing.assert_close(results, expected[not is_cut], rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(rows, by_rows[not is_cut], rtol=1e-9, atol=1e-11)
            assert own == (8 if rank in ALONE.get(name, ()) else 4, 6, 32)
            assert training  # the mode stays


class Residual(nn.Module):
    """Sums lie between its blocks, in sections of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def test_stages_whose_sections_are_others_than_in_training() -> None:
    """Each stage keeps its parameters, however many sections there are between them."""
    torch.manual_seed(0)
    model, batch = Residual().double(), {"x": torch.randn(8, 8, dtype=torch.float64)}

    def body() -> float:
        parallel = sw.compile(model, sw.Cluster.local(2), kwargs=batch, stages=2, microbatches=2, timeout_s=60)
        return parallel.evaluate(**batch).item()

    expected = model(**batch).item()
    assert run_ranks(body, 2, 60) == pytest.approx([expected] * 2, rel=1e-12)


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

        def on_rank_1(result: Tensor, batch: dict[str, Tensor]) -> Tensor:
            if dist.get_rank():
                raise KeyError("labels")
            return result

        def unlike(result: Tensor, batch: dict[str, Tensor]) -> list[Tensor]:
            return [result] * (1 + dist.get_rank())

        plain = nn.Linear(4, 4)
        parallel: Any = sw.compile(plain, two, kwargs={"input": x["x"]}, mesh={"x": 2}, timeout_s=60,
                                   loss_fn=lambda result, _: result.mean())  # fmt: skip
        for metrics in (lambda result, _: result.mean(), lambda result, _: 3.0, on_rank_1, unlike):
            with pytest.raises((ShardwrightError, KeyError)) as error:
                parallel.evaluate(input=x["x"], metrics=metrics)
            texts.append(str(error.value))
        with pytest.raises(BatchError) as error:
            parallel.evaluate(input=x["x"], metrics=on_rank_1, more=torch.ones(3))
        texts.append(str(error.value))
        return texts

    for found in run_ranks(body, 2, 120):
        assert "has no plan before its first call" in found[0]
        assert "returns a object, which no program gives" in found[1]
        assert "metrics returned a Tensor [] for 2 rows; return tensors with a row for each" in found[2]
        assert "metrics returned a float for 2 rows" in found[3]
        assert found[4] in ("'labels'", "evaluate: metrics failed on rank 1: KeyError('labels')")
        assert "on rank 1 and" in found[5]
        assert "same number of rows; these have [3, 4]" in found[6]


def test_a_program_that_was_lowered_by_hand_says_who_makes_others() -> None:
    model = Odd()
    with pytest.raises(ShardwrightError, match=r"evaluate: only shardwright\.compile"):
        run_ranks(lambda: lower(capture(model, {"x": torch.ones(4, 4)}).graph, model).evaluate(x=torch.ones(4, 4)), 1)
