"""Known results of operators against torch's own, on real tensors: types, strides, memory, and what is not known."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.pcg.capture.results import KnownResults
from tests.each import each

CASES: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    lambda x, y: x @ y,
    lambda x, y: x + y,
    lambda x, y: x + 1,
    lambda x, y: x + 1.5,
    lambda x, y: x + True,
    lambda x, y: x.t(),
    lambda x, y: x[1:, ::2],
    lambda x, y: x[1:, ::2].t().reshape(-1),
    lambda x, y: x.view(2, 2, 4),
    lambda x, y: x.split(2),
    lambda x, y: x.t().unbind(),
    lambda x, y: torch.stack((x, y)),
    lambda x, y: x.to(torch.bfloat16),
    lambda x, y: x.long(),
    lambda x, y: x.to(torch.complex64),
    lambda x, y: torch.view_as_real(x.to(torch.complex64).conj().resolve_conj()),
    lambda x, y: x.to(torch.complex64).conj().imag,
    lambda x, y: x.topk(2),
    lambda x, y: x.expand(3, 4, 4),
    lambda x, y: torch.zeros_like(x, dtype=torch.int32),
    lambda x, y: x.new_empty((3, 2)),
    lambda x, y: torch.arange(3, device=x.device),
    lambda x, y: x.clone().add_(y),
    lambda x, y: x.clone().t_(),
    lambda x, y: x.detach(),
    lambda x, y: torch.nn.functional.scaled_dot_product_attention(x[None], y[None], y[None]),
    lambda x, y: torch.nn.functional.layer_norm(x, (4,)),
)
"""Functions of two matrices of 4 × 4."""


class Counter(TorchDispatchMode):
    """Counts the operators that torch is asked for."""

    num_calls = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        self.num_calls += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


class Known(TorchDispatchMode):
    """Gives known results."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.results = KnownResults(mode)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        return self.results.of(func, args, kwargs or {})


@contextmanager
def known() -> Generator[Counter]:
    """Make tensors without data, whose results are known the second time."""
    with (mode := FakeTensorMode()), Counter() as counter, Known(mode):
        yield counter


def types(result: object, given: Sequence[Tensor]) -> list[object]:
    """The type of each tensor of a result, its place in memory, and whether that is an operand's."""
    storages = [x.untyped_storage()._cdata for x in given]
    return [
        (
            x.shape,
            x.stride(),
            x.storage_offset(),
            x.dtype,
            x.device,
            x.is_conj(),
            x.untyped_storage()._cdata in storages,
        )
        for x in tree_leaves(result)
        if isinstance(x, Tensor)
    ]


def operands() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 4), torch.ones(4, 4)


@each("case", CASES)
def test_the_second_result_is_torchs(case: Callable[[Tensor, Tensor], Any]) -> None:
    expected = types(case(*(given := operands())), given)
    with known():
        for _ in range(2):
            result = case(*(given := operands()))
            assert types(result, given) == expected
            assert all(isinstance(x, FakeTensor) for x in tree_leaves(result) if isinstance(x, Tensor))


def test_torch_is_asked_once_for_operands_of_a_type() -> None:
    with known() as counter:
        x, y = operands()
        before = counter.num_calls
        for _ in range(3):
            x = (x @ y).t().clone()
        assert counter.num_calls - before == 4  # the copy of a transposed matrix is transposed too
        _ = x.bfloat16() @ y.bfloat16()
        assert counter.num_calls - before == 7


def test_what_does_not_follow_from_types_is_asked_again() -> None:
    with known() as counter:
        x, y = operands()
        for number in (1, 2):
            assert int(torch.tensor(number) + 1) == number + 1
            before = counter.num_calls
            x.add_(1)
            torch.ops.aten._native_batch_norm_legit(x, None, None, y[0], y[1], True, 0.1, 1e-5)  # writes y
            assert counter.num_calls - before >= 2


def test_numbers_that_are_equal_are_told_apart() -> None:
    with known():
        x = torch.ones(2, dtype=torch.int64)
        assert [(x * n).dtype for n in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]


def test_the_default_dtype_counts(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(torch.set_default_dtype, torch.get_default_dtype()))
    with known():
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert torch.arange(0, 1, 0.5).dtype is dtype
