"""Small serial graphs, clusters, and a choice oracle and planners for the search's tests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from shardwright.cost.clusters.cluster import Cluster, Level
from shardwright.cost.clusters.device import Device
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.choice import Choice
from shardwright.pcg.graph import Graph, Node, Source
from shardwright.pcg.offers import alone
from shardwright.pcg.optable import ROWS
from shardwright.pcg.types import TensorType
from shardwright.search.choices.interning import Interner
from shardwright.search.tree.planner import Planner


def every_choice(node: Node, operands: Sequence[TensorType], blocked: Sequence[Choice] = ()) -> frozenset[Choice]:
    """All choices that the op table offers. Only tests of the search machinery use it; plans use certified ones."""
    row = ROWS[node.op]
    signature = row.signature([t.shape for t in operands], dict(node.attrs))
    return frozenset([*alone(row, (f.name for f in signature.factors if f.role != "fixed")), *blocked])


def cluster(
    num_devices: int, *, link_bytes_per_s: float = 1e9, latency_s: float = 1e-6, memory_bytes: int = 2**34,
    host_bytes_per_s: float = 0.0,
) -> Cluster:  # fmt: skip
    """A flat cluster of slow devices; the link decides whether splitting pays."""
    device = Device("test", memory_bytes, 1e10, {"fp32": 1e11}, 0.5, 1e-6, "cpu", host_bytes_per_s=host_bytes_per_s)
    return Cluster("test", device, (Level("rank", num_devices, link_bytes_per_s, latency_s),), "gloo", "test")


def planner(num_devices: int = 8, **options: Any) -> Planner:
    return Planner(cluster(num_devices, **options), every_choice)


def mixed(memory_bytes: Sequence[int] = (1 << 34, 1 << 34), times: float = 3.0, num_devices: int = 2) -> Cluster:
    """Two machines, of which the second computes and reads `times` as fast."""
    slow = cluster(num_devices, memory_bytes=memory_bytes[0]).device
    fast = replace(
        slow, name="fast", memory_bytes=memory_bytes[1], memory_bytes_per_s=times * slow.memory_bytes_per_s,
        flops_per_s={name: times * rate for name, rate in slow.flops_per_s.items()},
    )  # fmt: skip
    own = [replace(cluster(num_devices), device=device) for device in (slow, fast)]
    return Cluster.join(own, Level("net", 2, 1e8, 1e-5))


def mlp(batch: int = 8, width: int = 16, hidden: int = 32, layers: int = 2, residual: bool = False) -> Graph:
    """x ↦ relu(x w₁ᵀ) w₂ᵀ, repeated, then a sum of squares as the loss."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (batch, width), "float32", "x")
    for i in range(layers):
        up = b.leaf(f"up{i}", "parameter", (hidden, width), "float32", f"layers.{i}.up", grad=True)
        down = b.leaf(f"down{i}", "parameter", (width, hidden), "float32", f"layers.{i}.down", grad=True)
        y = b.op("linear", b.op("relu", b.op("linear", x, up)), down)
        x = b.op("add", x, y) if residual and i else y
    return b.graph([("loss", b.op("sum", b.op("mul", x, x), dims=(0, 1), keepdim=False))])


def mixture(tokens: int = 64, hidden: int = 64, experts: int = 8, used: int = 2, dense: int = 16) -> Graph:
    """A dense layer, a router, a network of experts of which each token has some, and a loss.

    Matrices of experts are read transposed.
    """
    b = GraphBuilder()
    x = b.leaf("x", "input", (tokens, 16), "float32", "x")
    shapes = {
        "first": (dense, 16), "second": (16, dense), "router": (experts, 16), "up": (experts, hidden, 16),
        "down": (experts, 16, hidden),
    }  # fmt: skip
    first, second, router, up, down = (b.leaf(n, "parameter", s, "float32", n, grad=True) for n, s in shapes.items())
    x = b.op("linear", b.op("relu", b.op("linear", x, first)), second)
    scores = b.op("softmax", b.op("linear", x, router), dim=1)
    index, weights = (b.op(f"topk_{what}", scores, dim=1, k=used) for what in ("indices", "values"))
    matrices = (b.op("permute", name, dims=(0, 2, 1)) for name in (up, down))
    y = b.op("experts", x, index, weights, *matrices, activation="gelu")
    return b.graph([("loss", b.op("sum", b.op("mul", y, y), dims=(0, 1), keepdim=False))])


def blocks(batch: int = 8, width: int = 16, layers: int = 3, seq: int = 4) -> Graph:
    """An embedding, layers of a norm and a feed-forward part, and a loss, with sources as captured models have them."""
    b = GraphBuilder()
    ids = b.leaf("ids", "input", (batch, seq), "int64", "ids")
    table = b.leaf("table", "parameter", (32, width), "float32", "embed.weight", grad=True)
    b.at("e", Source("embed", "model.py:1"))
    x = b.op("embedding", table, ids, padding_idx=-1)
    for i in range(layers):
        leaves = [
            b.leaf(f"{name}{i}", "parameter", shape, "float32", f"layers.{i}.{path}", grad=True)
            for name, shape, path in (("g", (width,), "norm.weight"), ("up", (4 * width, width), "mlp.up.weight"),
                                      ("down", (width, 4 * width), "mlp.down.weight"))
        ]  # fmt: skip
        b.at("n", Source(f"layers.{i}.norm", "model.py:2"))
        y = b.op("rms_norm", x, leaves[0], normalized_dims=1, eps=1e-6)
        b.at("h", Source(f"layers.{i}.mlp", "model.py:3"))
        y = b.op("linear", b.op("relu", b.op("linear", y, leaves[1])), leaves[2])
        b.at("a", Source(f"layers.{i}", "model.py:4"))
        x = b.op("add", x, y)
    b.at("l", Source("", "model.py:5"))
    return b.graph([("loss", b.op("sum", b.op("mul", x, x), dims=(0, 1, 2), keepdim=False))])


def branched(num_blocks: int, num_branches: int, depth: int, *, batch: int = 4096, width: int = 64) -> Graph:
    """Blocks of branches that all read the block's input, and whose results are added to it one after the other."""
    b = GraphBuilder()

    def linear(x: str, module: str, out: int, own: int) -> str:
        weight = b.leaf(f"{module}.w", "parameter", (out, own), "float32", f"{module}.weight", grad=True)
        b.at(module, Source(module, "model.py:1"))
        return b.op("linear", x, weight)

    x = linear(b.leaf("x", "input", (batch, width), "float32", "x"), "first", width, width)
    for block in (f"layers.{i}" for i in range(num_blocks)):
        total = x
        for k in range(num_branches):
            y, own = x, width
            for name in "abcdefgh"[:depth]:
                y, own = b.op("tanh", linear(y, f"{block}.p{k}.{name}", width + k, own)), width + k
            y = linear(y, f"{block}.q{k}", width, own)
            b.at("a", Source(block, "model.py:2"))
            total = b.op("add", total, y)
        x = total
    b.at("l", Source("", "model.py:3"))
    return b.graph([("loss", b.op("sum", b.op("mul", x, x), dims=(0, 1), keepdim=False))])


def num_made(interner: Interner, kind: Hashable) -> int:
    """How many objects of a kind were made: by `call` of this function, or for keys that begin with it."""
    return sum(key[0] == kind for key in interner.made if isinstance(key, tuple))


def recurrent(steps: int = 8, batch: int = 16, width: int = 16) -> Graph:
    """A cell that reads its own state: every step shares the weights, so each weight has a neighbour in all of them."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (batch, width), "float32", "x")
    weights = [b.leaf(f"w{i}", "parameter", (width, width), "float32", f"w{i}", grad=True) for i in range(4)]
    h = c = x
    for _ in range(steps):
        forget, add, out = (b.op("add", b.op("linear", x, weights[i]), b.op("linear", h, weights[3])) for i in range(3))
        c = b.op("add", b.op("mul", c, b.op("sigmoid", forget)), b.op("tanh", add))
        h = b.op("mul", b.op("sigmoid", out), b.op("tanh", c))
    return b.graph([("loss", b.op("sum", b.op("mul", h, h), dims=(0, 1), keepdim=False))])


def dense(layers: int = 14, batch: int = 16, width: int = 16) -> Graph:
    """A dense block: every layer reads the results of all before it."""
    b = GraphBuilder()
    results = [b.leaf("x", "input", (batch, width), "float32", "x")]
    for i in range(layers):
        w = b.leaf(f"w{i}", "parameter", (width, width * len(results)), "float32", f"w{i}", grad=True)
        read = b.op("concat", *results, dim=1) if len(results) > 1 else results[0]
        results.append(b.op("relu", b.op("linear", read, w)))
    return b.graph([("loss", b.op("sum", b.op("concat", *results, dim=1), dims=(0, 1), keepdim=False))])
