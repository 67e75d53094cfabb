"""Buffers and constants that masks of attention are made of: what their values show is written on the leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwright.pcg.bands import MASK
from shardwright.pcg.graph import Graph
from shardwright.pcg.node import make_attrs
from shardwright.pcg.shown import LEAST, read_from


def with_shown(graph: Graph, model: nn.Module, constants: Mapping[str, Tensor]) -> Graph:
    """Return the graph with what the values of masks show (`pcg.shown`), where forward writes to none of them."""
    written = {key for key, _ in graph.outputs}
    buffers = {name: value for name, value in model.named_buffers(remove_duplicate=False) if name not in written}
    told = dict[str, Mapping[str, tuple[int, ...] | bool]]()
    for name in set(_leaves_of_masks(graph)):
        node = graph.by_name[name]
        given = {"buffer": buffers, "constant": constants}.get(node.op, {})
        value = given.get(str(node.attr("target")))
        if value is not None and (attrs := read(value)):
            told[name] = attrs
    nodes = (
        replace(n, attrs=make_attrs(**dict(n.attrs), **told[n.name])) if n.name in told else n for n in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes)) if told else graph


def _leaves_of_masks(graph: Graph) -> Iterator[str]:
    """Yield the leaves that masks of attention are made of."""
    waiting = [node.inputs[MASK] for node in graph.nodes if node.row is not None and node.row.travels
               and len(node.inputs) > MASK]  # fmt: skip
    seen = set[str]()
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            node = graph.by_name[name]
            waiting += node.inputs
            if node.is_leaf:
                yield name


def read(value: Tensor) -> Mapping[str, tuple[int, ...] | bool]:
    """Return what the values of a leaf show; nothing, if it is no mask, or has no values here."""
    plain = type(value) in (Tensor, nn.Parameter, nn.Buffer) and not value.is_meta and value.layout == torch.strided
    if not plain or value.ndim < 2 or not value.numel():
        return {}
    value = value.detach().cpu()
    if value.dtype == torch.bool:
        return read_from(value.numpy(), finite=None)
    if not value.is_floating_point() or value.isnan().any():
        return {}
    visible = value > LEAST
    return read_from(visible.numpy(), finite=bool((~visible & (value != float("-inf"))).any()))
