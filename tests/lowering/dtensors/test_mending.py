"""What users read of parameters and gradients, and draw into them, is what one process would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn import init

from shardwright.lowering.dtensors.mending import mend_dtensors
from shardwright.lowering.dtensors.reductions import all_extreme
from shardwright.lowering.ranks.launch import connect, run_ranks
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.store.sources import own_part
from shardwright.lowering.store.storage import hold_parameter, slices
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.layout import R, S
from shardwright.pcg.mesh import Mesh
from tests.lowering.runs import Case, whole
from tests.lowering.test_training import TWO, ZERO3, Net

# pyright: reportPrivateImportUsage=false

LAYOUTS = (S(0), S(1), S(0, 2), R)

READS: dict[str, Callable[[Tensor], object]] = {
    "norm": lambda g: g.norm().item(),
    "norm of order 1": lambda g: float(g.norm(1)),
    "norm of order inf": lambda g: g.norm(math.inf).item(),
    "sum": lambda g: g.sum().item(),
    "mean": lambda g: float(g.mean()),
    "largest": lambda g: g.max().item(),
    "least": lambda g: g.min().item(),
    "largest magnitude": lambda g: float(g.abs().max()),
    "both extremes": lambda g: [x.item() for x in g.aminmax()],
    "product": lambda g: g.prod().item(),
    "deviation": lambda g: g.std().item(),
    "by hand": lambda g: float(g.pow(2).sum()) ** 0.5,
    "sum of two": lambda g: sum([g.norm(), g.sum()]).item(),  # pyright: ignore[reportAttributeAccessIssue]
    "norm of norms": lambda g: torch.stack([g.norm(), 2 * g.norm()]).norm().item(),
    "sum of norms": lambda g: torch.stack([g.norm(), 2 * g.norm()]).sum().item(),
    "norms of rows": lambda g: g.norm(dim=1).sum().item(),
    "norms of columns": lambda g: g.norm(dim=0, keepdim=True).pow(3).sum().item(),
    "extremes of columns": lambda g: (g.amax(0) - 2 * g.amin(0)).sum().item(),
    "all norms": lambda g: [x.item() for x in torch._foreach_norm([g, 2 * g])],
    "all norms of order inf": lambda g: [x.item() for x in torch._foreach_norm([g, 2 * g], math.inf)],
    "torch's total norm of order inf": lambda g: nn.utils.get_total_norm([g, 2 * g], math.inf).item(),
    "norm of order 0": lambda g: g.norm(0).item(),
    "norm of order -inf": lambda g: g.norm(-math.inf).item(),
    "compared extreme": lambda g: bool(g.max() < 9),
    "torch's total norm": lambda g: nn.utils.get_total_norm([g, 2 * g]).item(),
    "in words": lambda g: float(f"{g.norm().item():.6f}"),
    "a comparison": lambda g: bool(g.norm() > 3.0),
    "which is larger": lambda g: float(max(g.norm(), g.abs().sum())),
    "a factor": lambda g: min(1.0, 2.0 / float(g.norm())),
    "clipped": lambda g: (g * (1.0 / g.norm()).clamp(max=1.0)).sum().item(),
    "how many": lambda g: int((g > 0).sum()),
    "an index": lambda g: list(range(99))[(g > 0).sum()],
    "how many are none": lambda g: g.count_nonzero().item(),
    "if NaN": lambda g: True if torch.isnan(g).any() else False,  # noqa: SIM210
    "if finite": lambda g: bool(g.isfinite().all()),
    "isnan of a sum": lambda g: math.isnan(g.sum()),
    "not any": lambda g: not (g > 1.2).any(),
    "all": lambda g: bool((g > -1.5).all()),
    "equal to itself": lambda g: bool(g.eq(g).all()),
    "which is largest": lambda g: g.argmax().item(),
    "which is least in each column": lambda g: g.nan_to_num().argmin(0).float().pow(2).sum().item(),
    "an element": lambda g: g[3, 1].item(),
    "a product of matrices": lambda g: (g @ g.t()).sum().item(),
}

DRAWS: dict[str, Callable[[Tensor], Tensor | None]] = {
    **{name: lambda p, name=name: getattr(init, name)(p) for name in (
        "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
        "kaiming_normal_", "orthogonal_", "eye_", "ones_", "zeros_")},
    **{name: lambda p, name=name: getattr(p.data, name)() for name in (
        "normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_")},
    "geometric_": lambda p: p.data.geometric_(0.3),
    "random_ to": lambda p: p.data.random_(5),
    "own generator": lambda p: p.data.normal_(generator=torch.Generator().manual_seed(3)),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda p: torch.randint_like(p, 3, 9),
    "noise": lambda p: p + 0.1 * torch.randn_like(p),
    "new": lambda p: p.new_empty(4, 4).normal_(),
    "like zeros": lambda p: torch.zeros_like(p).normal_(),
    "dropout": lambda p: F.dropout(p, 0.5),
    "dropout of channels": lambda p: F.dropout1d(p, 0.5),
    "alpha dropout": lambda p: F.alpha_dropout(p, 0.5, training=True),
    "bernoulli": lambda p: torch.bernoulli(p.detach().sigmoid()),
    "normal of means": lambda p: torch.normal(p.detach(), 1.0),
    "poisson": lambda p: torch.poisson(p.detach().exp()),
    "multinomial": lambda p: torch.multinomial(p.detach().exp(), 2),
    "gumbel": F.gumbel_softmax,
}  # fmt: skip


def held(value: Tensor, ranks: Ranks) -> Iterator[nn.Parameter]:
    """A value as a parameter in every layout."""
    for layout in LAYOUTS:
        part = own_part(value, slices(tuple(value.shape), (layout,), ranks), ranks.device)
        outside = hold_parameter(part, value, tuple(value.shape), ("w",), (layout,), ranks).outside
        if isinstance(outside, DTensor):
            yield outside  # pyright: ignore[reportReturnType]


def same(found: Any, expected: Any) -> bool:
    return found == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_numbers_are_those_of_the_whole_tensor() -> None:
    """Whichever rank has what decides, a NaN too."""
    torch.manual_seed(0)
    plain = torch.randn(4, 4).double()
    wrong = plain.clone()
    wrong[3, 3] = math.nan

    def body() -> list[str]:
        mend_dtensors()
        ranks, failed = connect(TWO, 30), list[str]()
        for value in (plain, wrong):
            for g in held(value, ranks):
                for name, read in READS.items():
                    found, expected = read(g.detach()), read(value)
                    if not same(found, expected):
                        failed.append(f"{name} of {g}: {found} for {expected}")
        return failed

    assert run_ranks(body, 2, 60) == [[], []]


REFUSED: dict[str, Callable[[Tensor], object]] = {
    ".tolist()": lambda g: g.tolist(),
    ".numpy()": lambda g: g.numpy(),
    ".numpy() ": np.asarray,
    ".tolist() ": lambda g: g.sum().tolist(),
    "the format '.3f'": lambda g: f"{g.norm():.3f}",
    "x[a mask or": lambda g: g[g > 0],
    "x[a mask or ": lambda g: g[g[:, 0] > 0],
    "x[a mask or  ": lambda g: g[torch.tensor([0, 2])],
    "masked_select": lambda g: g.masked_select(g > 0),
    "nonzero": lambda g: g.nonzero(),
    "nonzero ": lambda g: torch.where(g > 0),
    "unique2": lambda g: g.unique(),
    "allclose": lambda g: torch.allclose(g, g),
}


def test_what_needs_the_whole_tensor_says_so() -> None:
    def body() -> list[str]:
        mend_dtensors()
        ranks, wrong = connect(TWO, 30), list[str]()
        for g in held(torch.randn(4, 4), ranks):
            assert isinstance(g, DTensor)
            for name, read in REFUSED.items():
                with pytest.raises(ShardwrightError) as error:
                    read(g.detach())
                text = str(error.value)
                if not text.startswith(name.strip()) or "x.full_tensor()" not in text:
                    wrong.append(f"{name}: {text}")
            assert "use x.full_tensor() (of one number: x.item()) instead of x" in _said(lambda: f"{g.norm():.1f}")  # noqa: B023
            assert "DTensor" in f"{g.norm()}"
        return wrong

    assert run_ranks(body, 2, 60) == [[], []]


def _said(read: Callable[[], object]) -> str:
    with pytest.raises(ShardwrightError) as error:
        read()
    return str(error.value)


def test_draws_are_those_of_one_process() -> None:
    """Ranks in one state go on as one process does; where they are in other ones, the first rank's counts."""
    torch.manual_seed(0)
    start = torch.randn(4, 4).double()

    def one(draw: Callable[[Tensor], Tensor | None]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        parameter = nn.Parameter(start.clone())
        found = draw(parameter)
        return (parameter if found is None else found).detach(), torch.get_rng_state()

    expected = {name: one(draw) for name, draw in DRAWS.items()}

    def body() -> list[str]:
        mend_dtensors()
        ranks, rank, failed = connect(TWO, 30), dist.get_rank(), list[str]()
        for alike in (True, False):
            for name, draw in DRAWS.items():
                value, state = expected[name]
                for parameter in held(start, ranks):
                    torch.manual_seed(1 if alike else 1 + rank)
                    own = torch.get_rng_state()
                    found = whole(draw(parameter))  # pyright: ignore[reportArgumentType]
                    after = state if alike or rank == 0 else own
                    if not (torch.equal(found.detach(), value) and torch.equal(torch.get_rng_state(), after)):
                        failed.append(f"{name} of {parameter}, {alike}")
        return failed

    assert run_ranks(body, 2, 60) == [[], []]


def test_extremes_keep_a_nan_of_any_rank() -> None:
    """gloo's own maximum drops one that is not on the first rank."""

    def body() -> list[list[float]]:
        connect(Mesh.of(x=3), 30)
        rank, found = dist.get_rank(), list[list[float]]()
        for bad in range(-1, 3):
            x = torch.tensor([math.nan if rank == bad else float(rank), -float(rank)])
            found += [all_extreme(x).tolist(), all_extreme(x, least=True).tolist()]
        found.append(all_extreme(torch.tensor([rank, -rank])).double().tolist())
        return found

    nan = [[math.nan, 0.0], [math.nan, -2.0]]
    expected = [[2.0, 0.0], [0.0, -2.0], *nan, *nan, *nan, [2.0, 0.0]]
    for found in run_ranks(body, 3, 60):
        for own, other in zip(found, expected, strict=True):
            assert own == pytest.approx(other, nan_ok=True)


def test_a_clip_by_hand_and_an_inf_norm_see_all_ranks() -> None:
    torch.manual_seed(0)
    net = Case(Net().double(), {"ids": torch.randint(20, (8, 12)), "labels": torch.randint(20, (8, 12))})

    def body() -> tuple[float, list[float]]:
        parallel = net.lower(net.graph(TWO, ZERO3, data_axes=(0,)))
        parallel.forward_backward(**net.batch)
        gradients = [p.grad for p in parallel.parameters() if p.grad is not None]
        by_hand = sum(float(g.norm()) ** 2 for g in gradients) ** 0.5
        ours = float(parallel.clip_grad_norm_(1e9))
        if dist.get_rank() == 1:
            gradients[0].to_local()[0] = math.nan  # pyright: ignore[reportAttributeAccessIssue]
        return by_hand / ours, [float(parallel.clip_grad_norm_(1e9, order)) for order in (2.0, math.inf)]

    for ratio, norms in run_ranks(body, 2, 60):
        assert ratio == pytest.approx(1, rel=1e-9)
        assert all(map(math.isnan, norms))
