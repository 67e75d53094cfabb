"""Regions of `torch.autocast` through `torch.export`: the operators that ran in each.

By itself `torch.export` makes a graph of every region. In it, it forgets `torch.no_grad()` and where operators come
from; and without a GPU, it ignores a region for one. So while a model is exported, entering or leaving a region
leaves a *mark* in the graph: an operator without effect, with a message. Before decomposition, torch's own entering and
leaving is put beside the marks, so that its casts become operators; the importer reads the marks.

`torch.autocast` casts no complex numbers. Decomposed, a complex convolution is several real ones, which it would cast.
So in a program with regions, operators on complex numbers get marks too: those of a region that is disabled.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from itertools import groupby
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.amp.autocast_mode import autocast

_ENTER = torch.amp.autocast_mode._enter_autocast
_EXIT = torch.amp.autocast_mode._exit_autocast
_MARK = torch.ops.aten._assert_async.msg
_BEGIN, _END = "shardwright: autocast begins: ", "shardwright: autocast ends"


class Marker:
    """Marks for the regions of an export. A mark reads a tensor: any that the forward has seen."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.tensor: Tensor | None = None

    def mark(self, region: autocast, text: str) -> None:
        """Mark the region, unless it is for another device than the model's and changes nothing."""
        if self.tensor is not None and region.device == self.device:
            _MARK(self.tensor, text)

    @contextmanager
    def watching(self) -> Generator[None]:
        """Mark regions inside the context; regions for a GPU count on the model's device."""
        begin = autocast.__init__

        def init(region: autocast, device_type: str, dtype: torch.dtype | None = None, *rest: Any, **more: Any) -> None:
            if device_type == "cuda" and self.device == "cpu":
                dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype
            begin(region, self.device if device_type == "cuda" else device_type, dtype, *rest, **more)

        def enter(region: autocast) -> autocast:
            device = region.device
            region.prev = torch.is_autocast_enabled(device)
            region.prev_fastdtype = torch.get_autocast_dtype(device)
            torch.set_autocast_enabled(device, region._enabled)
            torch.set_autocast_dtype(device, region.fast_dtype)
            torch.autocast_increment_nesting()
            low = str(region.fast_dtype).removeprefix("torch.") if region._enabled else ""
            self.mark(region, f"{_BEGIN}{low}")
            return region

        def leave(region: autocast, *error: object) -> None:
            self.mark(region, _END)
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            torch.set_autocast_enabled(region.device, region.prev)
            torch.set_autocast_dtype(region.device, region.prev_fastdtype)

        with mock.patch.multiple(autocast, __init__=init, __enter__=enter, __exit__=leave):
            yield


def enter_regions(module: fx.GraphModule, device: str) -> None:
    """Put torch's call that enters or leaves a region beside every mark, and complex operators outside of all."""
    modules = [m for m in module.modules() if isinstance(m, fx.GraphModule)]
    if not any(_text(node) is not None for m in modules for node in m.graph.nodes):
        return
    for own in modules:
        _mark_complex(own.graph)
        _enter_marked(own, device)


def _mark_complex(graph: fx.Graph) -> None:
    """Put marks of a disabled region around each run of operators that read complex numbers."""
    for is_complex, run in groupby(list(graph.nodes), _reads_complex):
        if is_complex:
            first, *rest = run
            tensor = first.all_input_nodes[0]
            with graph.inserting_before(first):
                graph.call_function(_MARK, (tensor, _BEGIN))
            with graph.inserting_after(rest[-1] if rest else first):
                graph.call_function(_MARK, (tensor, _END))


def _reads_complex(node: fx.Node) -> bool:
    values = (operand.meta.get("val") for operand in node.all_input_nodes)
    is_aten = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
    return is_aten and any(isinstance(value, Tensor) and value.is_complex() for value in values)


def _enter_marked(module: fx.GraphModule, device: str) -> None:
    open_: list[fx.Node] = []
    for node in list(module.graph.nodes):
        text = _text(node)
        if text is None:
            continue
        with module.graph.inserting_after(node):
            if text == _END:
                module.graph.call_function(_EXIT, (open_.pop(),))
            else:
                low = text.removeprefix(_BEGIN)
                dtype = getattr(torch, low) if low else torch.get_autocast_dtype(device)
                open_.append(module.graph.call_function(_ENTER, (device, dtype, bool(low), False)))
    module.recompile()


class Regions:
    """The region around the operators that are walked.

    `low`: the 16-bit format there, "" in a region that is disabled and outside of all, None in a program without any.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._stack = ["" if any(_text(node) is not None for node in graph.nodes) else None]

    @property
    def low(self) -> str | None:
        return self._stack[-1]

    def passes(self, node: fx.Node) -> bool:
        """Return whether the node is a mark; if so, enter or leave its region."""
        if (text := _text(node)) is None:
            return False
        if text == _END:
            self._stack.pop()
        else:
            self._stack.append(text.removeprefix(_BEGIN))
        return True


def _text(node: fx.Node) -> str | None:
    """Return the message of a mark; None for another node."""
    text = str(node.args[1]) if node.target is _MARK else ""
    return text if text.startswith((_BEGIN, _END)) else None
