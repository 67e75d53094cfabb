"""Encoders and decoders: within the bounds of their rows, for values of all magnitudes, and nothing is hidden."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.lowering.ranks.encodings import decode, encode
from shardwright.pcg.encodings import BLOCK, ENCODINGS, Encoding
from tests.each import each

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NAMES = st.sampled_from(sorted(ENCODINGS))


def sent(values: Tensor, encoding: Encoding) -> Tensor:
    """What arrives of [parts, elements]."""
    codes, found = encode(values, encoding), torch.full_like(values, 7)
    assert codes.dtype == torch.uint8
    assert codes.shape == (len(values), encoding.num_bytes(values.shape[1], str(values.dtype).removeprefix("torch.")))
    decode(codes, encoding, found)
    return found


def largest(values: Tensor) -> Tensor:
    """The largest magnitude in the block of each value, in float64."""
    parts, n = values.shape
    blocks = torch.nn.functional.pad(values.double().abs(), (0, -n % BLOCK)).view(parts, -1, BLOCK)
    return blocks.amax(-1, keepdim=True).expand_as(blocks).reshape(parts, -1)[:, :n]


def bound(values: Tensor, encoding: Encoding) -> Tensor:
    """How far what arrives may be off, as the row says."""
    computed = torch.float64 if values.dtype == torch.float64 else torch.float32
    narrow = torch.finfo(values.dtype)
    rounded = 0.0 if values.dtype == computed else narrow.eps / 2
    least = 0.0 if values.dtype == computed else narrow.smallest_normal * narrow.eps
    most = largest(values).clamp(min=2 * encoding.largest / torch.finfo(computed).max)
    return most * (encoding.bound + rounded) + least


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Blocks of very unlike magnitudes, down to numbers below the normal ones, and with zeros."""
    dtype = draw(st.sampled_from(DTYPES))
    parts, n = draw(st.integers(1, 3)), draw(st.integers(1, 3 * BLOCK))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    info = torch.finfo(dtype)
    low, high = np.log2(info.smallest_normal) - 8, np.log2(info.max) - 1
    spread = draw(st.sampled_from((0.0, 3.0, 40.0)))
    scales = low + (high - low) * torch.rand(parts, -(-n // BLOCK), generator=generator, dtype=torch.float64)
    exponents = scales.repeat_interleave(BLOCK, 1)[:, :n]
    exponents = exponents - spread * torch.rand(parts, n, generator=generator, dtype=torch.float64)
    values = (2 * torch.rand(parts, n, generator=generator, dtype=torch.float64) - 1) * 2**exponents
    values[torch.rand(parts, n, generator=generator) < draw(st.sampled_from((0.0, 0.3, 1.0)))] = 0.0
    return values.to(dtype)


@settings(max_examples=150, deadline=None)
@given(tensors(), NAMES)
def test_what_arrives_is_within_the_bound(values: Tensor, name: str) -> None:
    found, encoding = sent(values, ENCODINGS[name]), ENCODINGS[name]
    off = (found.double() - values.double()).abs()
    assert bool((off <= bound(values, encoding)).all()), (off - bound(values, encoding)).max()
    assert bool((found[values == 0] == 0).all())
    assert torch.equal(sent(found, encoding), found) or values.dtype not in DTYPES[:1]


@each("name", ENCODINGS)
def test_the_bound_is_not_larger_than_needed(name: str) -> None:
    """Some value is off by almost as much."""
    encoding, values = ENCODINGS[name], torch.linspace(-1, 1, 1 << 16).view(-1, BLOCK)
    values[:, 0] = 1.0
    off = (sent(values, encoding) - values).abs().max().item()
    assert encoding.bound * 0.97 < off <= encoding.bound


@each("name", ("int8", "int4"))
def test_codes_are_those_of_numpy(name: str) -> None:
    encoding = ENCODINGS[name]
    values = torch.randn(2, 3 * BLOCK + 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    blocks = np.pad(values.numpy(), ((0, 0), (0, BLOCK - 5))).reshape(2, 4, BLOCK)
    most = np.abs(blocks).max(-1, keepdims=True)
    expected = np.rint(blocks / most * encoding.largest) * most / encoding.largest
    np.testing.assert_allclose(sent(values, encoding), expected.reshape(2, -1)[:, : 3 * BLOCK + 5], rtol=1e-12)


@each("name", ENCODINGS)
@each("dtype", DTYPES)
def test_nothing_is_hidden(name: str, dtype: torch.dtype) -> None:
    """A NaN stays one, an infinity stays itself; other blocks do not notice."""
    values = torch.ones(1, 4 * BLOCK, dtype=dtype)
    values[0, 5], values[0, BLOCK + 7], values[0, BLOCK + 8] = nan, inf, -inf
    values[0, 2 * BLOCK], values[0, 2 * BLOCK + 1] = inf, nan
    found = sent(values, ENCODINGS[name])
    assert found[0, :BLOCK].isnan().all()
    assert found[0, BLOCK + 7 : BLOCK + 9].tolist() == [inf, -inf]
    assert not found[0, BLOCK : 2 * BLOCK].isfinite().any()
    assert found[0, 2 * BLOCK : 3 * BLOCK].isnan().all()
    assert (found[0, 3 * BLOCK :] == 1).all()


@each("name", ENCODINGS)
def test_the_largest_and_the_smallest_numbers(name: str) -> None:
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        for most in (info.max, 500 / info.max, info.smallest_normal, info.smallest_normal * info.eps):
            values = most * torch.linspace(-1, 1, BLOCK, dtype=torch.float64).view(1, -1).to(dtype)
            off = (sent(values, ENCODINGS[name]).double() - values.double()).abs()
            assert bool((off <= bound(values, ENCODINGS[name])).all()), (dtype, most)


def test_few_values_take_a_whole_block() -> None:
    assert ENCODINGS["int8"].num_bytes(1, "float32") == BLOCK + 4
    assert ENCODINGS["int4"].num_bytes(BLOCK + 1, "bfloat16") == 2 * (BLOCK // 2 + 4)
    assert ENCODINGS["fp8"].item_bytes("float64") == pytest.approx(1 + 8 / BLOCK)
