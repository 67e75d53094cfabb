"""What only a GPU shows: its kernels draw by themselves, and want strides of their own.

`make cuda` runs these tests. Others see no GPU.
"""

from __future__ import annotations

import pytest
import torch

from examples import zoo as examples
from shardwright.api import compile as compile_model
from shardwright.lowering.runtime.kernels import grouped_mm
from shardwright.pcg.step.precisions import PrecisionMode
from tests.models import zoo

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU, or it was not asked for")


@pytest.mark.parametrize("precision", [None, "amp_bf16"])
@pytest.mark.parametrize("name", zoo())
def test_captured_graphs_are_the_models(name: str, precision: PrecisionMode | None) -> None:
    """Dropout inside of attention and outside of it, experts of any width."""
    torch.manual_seed(0)
    model, batch = getattr(examples, name)()
    batch = {key: value.cuda() for key, value in batch.items()}
    parallel = compile_model(model.cuda(), kwargs=batch, precision=precision)
    assert parallel.forward_backward(**batch).isfinite()
    assert parallel.capture_check is not None
    assert parallel.capture_check.equal


@pytest.mark.parametrize("width", [32, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups(width: int, dtype: torch.dtype) -> None:
    """With and without the strides that torch's kernel wants; a group has no rows."""
    torch.manual_seed(0)
    x, w = torch.randn(24, width, device="cuda", dtype=dtype), torch.randn(3, width, 40, device="cuda", dtype=dtype)
    x.requires_grad_()
    y = grouped_mm(x, w, torch.tensor([8, 8, 24], device="cuda"))
    y.float().sum().backward()
    expected = torch.cat([x[:8].float() @ w[0].float(), x[8:].float() @ w[2].float()])
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-1)
    assert x.grad is not None
    torch.testing.assert_close(x.grad[:8].float(), w[0].float().sum(1).expand(8, -1), rtol=2e-2, atol=2e-1)
