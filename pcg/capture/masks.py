"""Attention masks of `transformers`, made as in training and not as in an export.

In training, a causal mask over whole sequences is left out, and attention is called with `is_causal=True`; so is the
mask of bidirectional attention without padding. While traced, transformers does neither: it cannot read the tensors
that decide (whether anything is padding, whether positions begin anew), and takes every mask for one that is needed.
These decisions are made here as in eager mode, wherever the tensors that they read follow from shapes alone. Tensors of
the batch may differ from step to step: masks that depend on these are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

_MODULE = "transformers.masking_utils"
_PACKED = "find_packed_sequence_indices"
_DECISIONS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
_FILLED = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}  # only the shape of the operand counts


@contextmanager
def masks_as_trained() -> Generator[None]:
    """Make masks as in training while a forward is traced; nothing changes if transformers is not loaded."""
    with ExitStack() as stack:
        for patch in _patches(sys.modules.get(_MODULE)):
            stack.enter_context(patch)
        yield


def _patches(module: ModuleType | None) -> Iterator[Any]:
    functions = vars(module) if module is not None else {}
    wrappers = dict.fromkeys(_DECISIONS, _decided) | {_PACKED: _packed}
    for name, wrapper in wrappers.items():
        if name in functions:
            yield mock.patch.object(module, name, partial(wrapper, functions[name]))
    for name, value in {"is_torchdynamo_exporting": lambda: False, "is_tracing": _is_fake}.items():
        if name in functions:
            yield mock.patch.object(module, name, value)


def _is_fake(tensor: object = None) -> bool:
    return isinstance(tensor, FakeTensor)


def _decided(decide: Callable[..., bool], padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> bool:
    """Return whether a mask can be left out. `padding_mask` [batch, keys] says which keys are not padding."""
    known = None if padding_mask is None else known_value(padding_mask)
    if known is None:
        return decide(padding_mask, *args, **kwargs)
    with _disable_current_modes():
        return bool(decide(known, *args, **kwargs))


def _packed(find: Callable[..., Tensor | None], position_ids: Tensor) -> Tensor | None:
    """Return the sequence that every position [batch, length] belongs to; None if each row is one sequence."""
    known = known_value(position_ids)
    if known is not None:
        with _disable_current_modes():
            if find(known) is None:
                return None
    return find(position_ids)


def known_value(tensor: Tensor) -> Tensor | None:
    """Return the value of a tensor that is being traced, if it follows from shapes alone; else None.

    A tensor that was ever written in place is unknown; so are draws and results from a parameter, a buffer or the
    batch.
    """
    if not isinstance(tensor, FakeTensor):
        return tensor
    mode = get_proxy_mode()
    slot = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    if slot is None:
        return None
    needed = _needed(slot.proxy.node)
    if not all(map(_is_constant, needed)):
        return None
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes():
        for node in needed:
            values[node] = _computed(node, values)
    return values[slot.proxy.node]


def _needed(node: fx.Node) -> list[fx.Node]:
    """Return the node and the nodes that its value is computed from, in the order of the graph."""
    needed, stack = {node}, [node]
    while stack:
        one = stack.pop()
        fresh = [] if _fill(one) is not None else [source for source in one.all_input_nodes if source not in needed]
        needed.update(fresh)
        stack.extend(fresh)
    return sorted(needed)


def _fill(node: fx.Node) -> int | None:
    """Return the number that fills a tensor made in the shape and dtype of another; None for other operators."""
    return _FILLED.get(node.target._opname) if isinstance(node.target, torch._ops.OpOverload) else None


def _computed(node: fx.Node, values: Mapping[fx.Node, Any]) -> object:
    fill = _fill(node)
    if fill is not None:
        return torch.full(node.meta["val"].shape, fill, dtype=node.meta["val"].dtype)
    operands: Any = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = tree_map(_on_cpu, operands)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_constant(node: fx.Node) -> bool:
    """Return whether an operator gives the same in every step, and nothing writes into its result."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable:
        return False
    return not any(map(_is_written, node.users))


def _is_written(node: fx.Node) -> bool:
    """Return whether an operator, or a reader of a view that it gives, writes into its operands."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    if node.target._schema.is_mutable:
        return True
    is_view = any(returned.alias_info is not None for returned in node.target._schema.returns)
    return is_view and any(map(_is_written, node.users))


def _on_cpu(arg: object) -> object:
    return torch.device("cpu") if isinstance(arg, torch.device) else arg
