"""A model after its compiled form was trained."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardwright.api import compile
from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import ShardwrightError
from tests.each import each

BATCH = {"x": torch.arange(16.0).reshape(4, 4) / 16}


class Small(nn.Module):
    """A layer whose weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.inner.weight
        self.register_buffer("steps", torch.zeros(1))
        self.counted, self.frozen = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.counted(self.tied(self.inner(x)))).square().sum()


def _trained(*, lazily: bool) -> dict[str, bool | str]:
    """What calls of the model say on the way, on one rank."""
    model, found = Small(), dict[str, bool | str]()

    def call(what: str, called: Callable[..., Any] = model) -> None:
        try:
            called(BATCH["x"])
            found[what] = True
        except ShardwrightError as error:
            found[what] = str(error)

    parallel = compile(model, Cluster.local(2), kwargs=None if lazily else BATCH)
    optimizer = torch.optim.SGD([p for p in parallel.parameters() if p.requires_grad], lr=0.1)
    call("compiled")
    parallel.forward_backward(**BATCH)
    call("a layer before the update", model.inner)
    reference = deepcopy(model.inner)
    optimizer.step()
    call("after it")
    call("in eval mode", model.eval())
    model.train()
    call("a layer", model.inner)
    call("a tied layer", model.tied)
    call("statistics", model.counted)
    call("a frozen layer", model.frozen)
    call("an earlier copy", reference)
    copied = deepcopy(model)
    call("a copy", copied)
    call("a copy's layer", copied.tied)
    call("a copy's frozen layer", copied.frozen)
    call("a copy of a copy", deepcopy(copied))
    call("a copy of a layer", deepcopy(model.inner))
    call("pickling", lambda _: torch.save(model, io.BytesIO()))
    found["compiled again"] = bool(compile(model, Cluster.local(2), kwargs=BATCH).capture_check)
    whole = get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True))
    for one, name in ((model, "the model"), (copied, "the copy")):
        one.load_state_dict(whole)
        for module in (one, one.inner, deepcopy(one)):
            call(f"{type(module).__name__} of {name} with the trained weights", module)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    call("a pickled one", torch.load(file, weights_only=False))
    model.load_state_dict(whole)
    found["equal"] = torch.allclose(model(**BATCH), parallel(**BATCH))
    return found


STALE = {
    "after it": "this model", "in eval mode": "this model", "a layer": "'inner' of this model",
    "a tied layer": "'tied' of this model", "statistics": "'counted' of this model", "a copy": "this copy",
    "a copy's layer": "'tied' of this copy", "a copy of a copy": "this copy",
    "a copy of a layer": "'inner' of this copy", "pickling": "this model",
}  # fmt: skip


@pytest.mark.parametrize("lazily", [False, True])
def test_a_model_does_not_run_its_first_weights_once_the_compiled_one_is_trained(*, lazily: bool) -> None:
    for found in run_ranks(lambda: _trained(lazily=lazily), 2):
        said = {what: text for what, text in found.items() if text is not True}
        assert list(said) == list(STALE)
        for what, text in said.items():
            start = "Small was compiled, and its compiled form trained since; "
            assert str(text).startswith(f"{start}{STALE[what]} still has the weights of before (")
            assert "model.load_state_dict(get_model_state_dict(parallel" in str(text)


def _gone() -> bool:
    model = Small()
    parallel = compile(model, Cluster.local(1), kwargs=BATCH)
    parallel.forward_backward(**BATCH)
    torch.optim.SGD(parallel.parameters(), lr=0.1).step()
    del parallel
    return bool(model(**BATCH) > 0)


def test_a_model_whose_compiled_form_is_gone_may_be_called() -> None:
    assert run_ranks(_gone, 1) == [True]


class Both(Small):
    """Returns what it is told to beside its loss."""

    def __init__(self, result: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.result = [result]

    def forward(self, x: Tensor) -> Any:
        return self.result[0](super().forward(x), self.inner(x))


def _warned(result: Callable[[Tensor, Tensor], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compile(Both(result), Cluster.local(1), kwargs=BATCH)
    return [str(one.message) for one in found]


@each(
    "result, what",
    [
        (lambda loss, logits: (loss, logits), "1 a tensor of shape [4, 4]"),
        (lambda loss, logits: [loss, {"all": [logits]}], "1 a tensor of shape [4, 4]"),
        (lambda loss, logits: {"loss": loss, "logits": logits}, "'logits' a tensor of shape [4, 4]"),
        (lambda loss, logits: {"loss": loss, "step": 3}, ""),
        (lambda loss, logits: (loss,), ""),
        (lambda loss, logits: loss, ""),
    ],
    ids=["pair", "nest", "dictionary", "number", "alone", "loss"],
)
def test_what_is_returned_beside_the_loss_is_warned_of(result: Callable[[Tensor, Tensor], Any], what: str) -> None:
    (found,) = run_ranks(_warned, 1, args=(result,))
    assert len(found) == bool(what)
    assert all(text.startswith(f"Both returns {what} beside its loss, which the compiled") for text in found)
