"""The masks of transformers: captured attention is called as eager attention is, and gives its loss and gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import masking_utils as masks
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shardwright.pcg.capture.capture import Captured, capture
from shardwright.pcg.capture.masks import known_value
from shardwright.pcg.errors import CaptureError
from tests.each import each
from tests.pcg.capture.test_capture import gradients_agree

Batch = dict[str, Any]
Call = tuple[bool, bool]
"""Of attention: whether it has a mask, and whether it is causal by itself."""

LENGTH = 12
CACHE = "cache" if "cache" in inspect.signature(masks.create_causal_mask).parameters else "past_key_values"
"""What transformers calls it, since 5.24 and before."""
DENSE, CAUSAL, FREE = (True, False), (False, True), (False, False)

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip


class Attending(nn.Module):
    """Attention alone, with a mask that transformers makes."""

    num_key_value_groups = 2

    def __init__(self, make: Callable[..., Tensor | None], is_causal: bool = True, **config: Any) -> None:
        super().__init__()
        self.make, self.is_causal = make, is_causal
        sizes: dict[str, Any] = SIZES | {"attn_implementation": "sdpa"} | config
        self.config = hf.LlamaConfig(**sizes)
        self.inner = nn.Linear(16, 32)

    def forward(self, x: Tensor, **batch: Any) -> Tensor:
        mask = self.make(self.config, x, **{"attention_mask": None, CACHE: None} | batch)
        heads = self.inner(x).unflatten(-1, (8, 4)).transpose(1, 2)
        query, key, value = heads.split([4, 2, 2], dim=1)
        y, _ = sdpa_attention_forward(self, query, key, value, mask)
        return (y * y).mean()


def features(**more: Any) -> Batch:
    return {"x": torch.randn(2, LENGTH, 16, dtype=torch.float64)} | more


def positions(*lengths: int) -> Tensor:
    """Of sequences of these lengths in one row."""
    return torch.tensor([[i for length in lengths for i in range(length)]]).repeat(2, 1)


def padding(num_padded: int) -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, LENGTH - num_padded :] = 0
    return mask


def placed(config: Any, x: Tensor, **batch: Any) -> Tensor | None:
    """As models do that are given no positions."""
    return masks.create_causal_mask(config, x, **batch, position_ids=torch.arange(x.shape[1])[None] + 3)


def restarting(config: Any, x: Tensor, **batch: Any) -> Tensor | None:
    return masks.create_causal_mask(config, x, **batch, position_ids=torch.arange(x.shape[1])[None] % 5)


def seeing_four(config: Any, x: Tensor, **batch: Any) -> Tensor | None:
    """Everything sees the first four."""
    return masks.create_causal_mask(config, x, **batch, or_mask_function=lambda batch, head, query, key: key < 4)


def prefixed(num_prefix: int) -> Tensor:
    return torch.tensor([[0] * num_prefix + [-1] * (LENGTH - num_prefix)]).repeat(2, 1)


SLIDING, CHUNKED = masks.create_sliding_window_causal_mask, masks.create_chunked_causal_mask
BOTH_WAYS = masks.create_bidirectional_mask

ATTENTION: dict[str, tuple[nn.Module, Batch, Call]] = {
    "causal": (Attending(masks.create_causal_mask), features(), CAUSAL),
    "causal, positions made in forward": (Attending(placed), features(), CAUSAL),
    "a window longer than the sequence": (Attending(SLIDING, sliding_window=64), features(), CAUSAL),
    "sliding": (Attending(SLIDING, sliding_window=4), features(), DENSE),
    "a chunk longer than the sequence": (Attending(CHUNKED, attention_chunk_size=64), features(), CAUSAL),
    "chunked": (Attending(CHUNKED, attention_chunk_size=5), features(), DENSE),
    "packed": (Attending(masks.create_causal_mask), features(position_ids=positions(5, 7)), DENSE),
    "packed in forward": (Attending(restarting), features(), DENSE),
    "packed and sliding": (Attending(SLIDING, sliding_window=4), features(position_ids=positions(5, 7)), DENSE),
    "packed and chunked": (Attending(CHUNKED, attention_chunk_size=5), features(position_ids=positions(5, 7)), DENSE),
    "padded": (Attending(masks.create_causal_mask), features(attention_mask=padding(3)), DENSE),
    "padded and sliding": (Attending(SLIDING, sliding_window=4), features(attention_mask=padding(3)), DENSE),
    "prefix": (Attending(masks.create_causal_mask), features(block_sequence_ids=prefixed(4)), DENSE),
    "prefix by a function": (Attending(seeing_four), features(), DENSE),
    "bidirectional": (Attending(BOTH_WAYS, is_causal=False), features(), FREE),
    "bidirectional, padded": (Attending(BOTH_WAYS, is_causal=False), features(attention_mask=padding(3)), DENSE),
    "bidirectional and sliding": (
        Attending(masks.create_bidirectional_sliding_window_mask, is_causal=False, sliding_window=4), features(), DENSE,
    ),
}  # fmt: skip


def ids(**more: Any) -> Batch:
    tokens = torch.randint(1, 32, (2, LENGTH))
    return {"input_ids": tokens, "labels": tokens} | more


def llama(**more: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, use_cache=False, **more))


def gemma3() -> nn.Module:
    kinds = ["sliding_attention", "full_attention"]
    config = hf.Gemma3TextConfig(**SIZES, head_dim=4, sliding_window=4, layer_types=kinds, use_cache=False)
    return hf.Gemma3ForCausalLM(config)


def opt() -> nn.Module:
    return hf.OPTForCausalLM(hf.OPTConfig(**SIZES, ffn_dim=16, word_embed_proj_dim=16, dropout=0.0, use_cache=False))


def bart() -> nn.Module:
    sides: dict[str, Any] = {f"{side}_{name}": value for side in ("encoder", "decoder")
             for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))}  # fmt: skip
    config = hf.BartConfig(vocab_size=32, d_model=16, dropout=0.0, use_cache=False, **sides)
    return hf.BartForConditionalGeneration(config)


def captured_calls(captured: Captured) -> list[Call]:
    return [(len(n.inputs) == 4, bool(n.attr("causal"))) for n in captured.graph.nodes if n.op == "sdpa"]


def eager_calls(model: nn.Module, batch: Batch) -> list[Call]:
    calls = list[Call]()
    sdpa = F.scaled_dot_product_attention

    def seen(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *, is_causal: bool, **rest: Any) -> Any:
        calls.append((attn_mask is not None, is_causal))
        return sdpa(q, k, v, attn_mask, is_causal=is_causal, **rest)

    with mock.patch.object(F, "scaled_dot_product_attention", seen):
        model(**batch)
    return calls


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@each("kind", ATTENTION)
def test_attention_is_captured_as_it_is_called(kind: str) -> None:
    model, batch, expected = ATTENTION[kind]
    model = model.double()
    captured = capture(model, batch)
    assert captured_calls(captured) == eager_calls(model, batch) == [expected]
    assert gradients_agree(model, batch, captured)


@each(
    "make, expected",
    [
        (llama, [CAUSAL, CAUSAL]),
        (gemma3, [DENSE, CAUSAL]),
        (opt, [CAUSAL, CAUSAL]),  # makes a mask of ones
        (bart, [FREE, CAUSAL, FREE]),
        (lambda: llama(is_causal=False), [FREE, FREE]),
        (lambda: llama(attn_implementation="eager"), []),
    ],
)
def test_models_are_captured_as_they_train(make: Callable[[], nn.Module], expected: list[Call]) -> None:
    model, batch = make().double(), ids()
    captured = capture(model, batch)
    assert captured_calls(captured) == eager_calls(model, batch) == expected
    assert gradients_agree(model, batch, captured)


@each("given", [{"attention_mask": padding(0)}, {"position_ids": positions(LENGTH)}])
def test_what_a_batch_says_may_differ_in_the_next(given: Batch) -> None:
    """Eager looks at it, and leaves out the mask of this batch; the plan runs the others too."""
    model, batch = Attending(masks.create_causal_mask).double(), features(**given)
    assert eager_calls(model, batch) == [CAUSAL]
    assert captured_calls(capture(model, batch)) == [DENSE]


def test_a_causal_model_without_data_has_no_mask() -> None:
    with FakeTensorMode():
        model = llama()
    graph = capture(model, ids()).graph
    assert not [name for name, made in graph.types.items() if made.shape[-2:] == (LENGTH, LENGTH)]


def test_transformers_is_as_before() -> None:
    before, model = dict(vars(masks)), Attending(masks.create_causal_mask).double()
    capture(model, features())
    with pytest.raises(CaptureError, match="could not be captured"):
        capture(model, features(attention_mask="none"))
    assert dict(vars(masks)) == before


class Look:
    """What is known of values. What is called is no state of a model."""

    def __init__(self) -> None:
        self.seen = list[Tensor | None]()

    def __call__(self, made: Tensor) -> None:
        self.seen.append(known_value(made))


class Looking(nn.Module):
    """Passes a tensor that it makes while it is traced, at times when it may be looked at, to `look`."""

    def __init__(self, make: Callable[..., Iterator[Tensor]], look: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.make, self.look = make, look
        self.inner = nn.Linear(4, 4)
        self.register_buffer("positions", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.zeros(())
        for made in self.make(x, self.positions):
            self.look(made)
        return (self.inner(x) + made).sum()


def written(x: Tensor, _: Tensor) -> Iterator[Tensor]:
    ones = torch.ones(4)
    yield ones
    ones[1:].view(-1).fill_(0)
    yield ones


@each(
    "make, expected",
    [
        (lambda x, _: [torch.arange(x.shape[1]).unsqueeze(0) + 1], [[[1, 2, 3, 4]]]),
        (lambda x, _: [torch.ones(4, device=x.device).cumsum(0)[None, 1:2].expand(2, 4)], [[[2] * 4] * 2]),
        (lambda x, _: [torch.ones_like(x[0]) + torch.ones_like(x) + x.new_zeros(4)], [[[2] * 4] * 2]),
        (lambda x, _: [x + 1], [None]),
        (lambda _, positions: [positions + 1], [None]),
        (lambda *_: [torch.rand(4)], [None]),
        (lambda *_: [torch.ones(4).mul_(2)], [None]),
        (written, [[1, 1, 1, 1], None]),
    ],
)
def test_values_that_follow_from_shapes_are_known(make: Callable[..., Any], expected: list[Any]) -> None:
    look = Look()
    capture(Looking(make, look), {"x": torch.ones(2, 4)})
    assert [value if value is None else value.tolist() for value in look.seen] == expected
