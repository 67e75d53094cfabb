"""Models with `torch.distributions`: their graphs compute what they do, and what they keep is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.distributions import kl_divergence
from torch.nn import functional as F

from shardwright.checking import check_capture
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import CaptureError
from tests.each import each


def normal(h: Tensor) -> distributions.Normal:
    return distributions.Normal(h, F.softplus(h) + 0.1)


def drawn(h: Tensor) -> Tensor:
    choice = distributions.Categorical(logits=h)
    return choice.log_prob(choice.sample())


Y = torch.linspace(0.1, 0.9, 8)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "drawn from a normal": lambda h: normal(h).rsample().pow(2),
    "divergence": lambda h: kl_divergence(normal(h), distributions.Normal(0.0, 1.0)),
    "independent": lambda h: distributions.Independent(normal(h), 1).log_prob(Y),
    "choices": drawn,
    "entropy": lambda h: distributions.Bernoulli(logits=h).entropy(),
    "mixture": lambda h: distributions.MixtureSameFamily(
        distributions.Categorical(logits=h), distributions.Normal(h, 1.0)
    ).log_prob(Y[: len(h)]),
    "transformed": lambda h: distributions.TransformedDistribution(normal(h), [distributions.TanhTransform()]).log_prob(
        Y
    ),
    "gamma": lambda h: distributions.Gamma(F.softplus(h) + 0.1, 1.0).log_prob(Y),
    "beta": lambda h: distributions.Beta(h.exp(), h.exp() + 1).log_prob(Y),
    "several": lambda h: distributions.MultivariateNormal(h, torch.eye(8) * 2).log_prob(Y),
}


class Losing(nn.Module):
    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.loss = nn.Linear(4, 8), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.inner(x).tanh()).mean()


@each("name", LOSSES)
def test_a_graph_computes_what_distributions_do(name: str) -> None:
    model, batch = Losing(LOSSES[name]), {"x": torch.randn(4, 4)}
    assert check_capture(model, capture(model, batch), (), batch).equal


def test_what_distributions_of_the_model_keep_is_left_as_it_was() -> None:
    """They compute some of what they are asked for once, which is without data in a capture."""
    prior, around = distributions.Categorical(logits=torch.arange(8.0)), torch.zeros(8)
    several, squash = distributions.MultivariateNormal(around, torch.eye(8) * 2), distributions.TanhTransform(1)

    def loss(h: Tensor) -> Tensor:
        squashed = distributions.TransformedDistribution(normal(h), [squash])
        return prior.entropy() + several.log_prob(h) - squashed.log_prob(squashed.rsample()).mean()

    model, batch = Losing(loss), {"x": torch.randn(4, 4)}
    for _ in range(2):
        assert check_capture(model, capture(model, batch), (), batch).equal
        assert type(model(**batch)) is type(prior.probs) is Tensor
        del vars(prior)["probs"]


class Tabled(distributions.Normal):
    tables: ClassVar[dict[str, Tensor]] = {}

    def table(self) -> Tensor:
        if "cos" not in self.tables:
            self.tables["cos"] = torch.arange(8.0).cos()
        return self.tables["cos"]


def test_what_classes_of_distributions_keep_is_never_without_data() -> None:
    prior = Tabled(0.0, 1.0)
    model, batch = Losing(lambda h: prior.log_prob(h) * prior.table()), {"x": torch.randn(4, 4)}
    for _ in range(2):
        assert check_capture(model, capture(model, batch), (), batch).equal
        assert type(model(**batch)) is Tensor


def test_checks_that_are_asked_for_are_refused() -> None:
    model = Losing(lambda h: distributions.Normal(h, 1.0, validate_args=True).log_prob(Y))
    with pytest.raises(CaptureError, match="data-dependent"):
        capture(model, {"x": torch.randn(4, 4)})
