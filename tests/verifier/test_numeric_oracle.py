"""Both sides of equations as torch programs in float64, forward and gradient, at random sizes.

It shares nothing with the proofs but the rule: values and gradients are torch's. Placement rules run on every device of
a mesh, with the adjoints of the parallel operators written out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.generation import generate_one
from shardwright.pcg.errors import LayoutError
from shardwright.pcg.graph import Graph
from shardwright.pcg.interpret import Array, denote, scatter
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.parallel import ADJOINT, COMBINE, PARALLEL_OPS, PARTITION, REDUCE, REPLICATE
from shardwright.pcg.types import TensorType
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.generator.sources import ContextSource, sources
from shardwright.substitutions.match import Match, replacement
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.terms import Apply, subterms
from shardwright.verifier.certificates import prove
from shardwright.verifier.falsifiers.devices import Devices
from shardwright.verifier.falsifiers.instances import instance as made_instance
from tests.each import each
from tests.pcg.run_torch import run_torch
from tests.verifier import devices_torch

POSITIVE = {"log", "sqrt", "rsqrt", "pow", "div", "reciprocal"}
"""Rules with these run on positive numbers, away from poles."""


def assert_close(want: Tensor, got: np.ndarray[Any, Any], what: str) -> None:
    """Close in float64; functions of integer constants, such as 1/√n, are float32."""
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-5, atol=1e-7, err_msg=what)


def instance(rule: Equation, seed: int) -> tuple[Graph, Match]:
    """The left side at random sizes that satisfy the guard; no tensor is empty."""
    rng = random.Random(seed)
    tried = (made_instance(rule, rng) for _ in range(4000))
    found = next((made for made in tried if made is not None and not _is_empty(made[0])), None)
    assert found is not None, f"{rule.name}: no small sizes satisfy its left side and guard"
    return found


def _is_empty(graph: Graph) -> bool:
    return any(extent < 1 for kind in graph.types.values() for extent in kind.shape)


def operands(rule: Equation, graph: Graph, seed: int) -> dict[str, Tensor]:
    """Real operands without ties or kinks, positive where the rule asks for it; indices fit into any size."""
    rng = np.random.default_rng(seed)
    ops = {t.op for root in (*rule.left, *rule.right) for t in subterms(root) if isinstance(t, Apply)}
    found: dict[str, Tensor] = {}
    for node in graph.leaves("input"):
        kind = graph.types[node.name]
        if kind.dtype == "float64":
            real = rng.standard_normal(kind.shape)
            real = np.abs(real) + 0.5 if ops & POSITIVE else real
            found[node.name] = torch.from_numpy(np.asarray(real)).requires_grad_()
        else:
            found[node.name] = torch.from_numpy(np.asarray(rng.integers(0, 2, kind.shape)))
    return found


def values_and_gradients(graph: Graph, leaves: dict[str, Tensor], roots: Sequence[str], seed: int) -> list[Tensor]:
    """The roots, and the gradient of Σ ⟨dy, root⟩ for every real leaf."""
    found = run_torch(graph, leaves)
    generator = torch.Generator().manual_seed(seed)
    results = [found[root] for root in roots]
    loss = torch.zeros(())
    for result in results:
        loss = loss + (result * torch.randn(result.shape, generator=generator, dtype=torch.float64)).sum()
    real = [x for x in leaves.values() if x.requires_grad]
    if not loss.requires_grad:
        return [*results, *map(torch.zeros_like, real)]
    return [*results, *torch.autograd.grad(loss, real, materialize_grads=True)]


def assert_equal_with_gradients(rule: Equation, seed: int) -> None:
    graph, match = instance(rule, seed)
    leaves = operands(rule, graph, seed)
    nodes, results = replacement(graph, rule, match)
    kept = tuple(node for node in graph.nodes if node.is_leaf)
    other = Graph((*kept, *nodes), tuple((f"out{i}", results[root]) for i, root in enumerate(match.roots))).validate()
    left = values_and_gradients(graph, leaves, match.roots, seed)
    right = values_and_gradients(other, leaves, [results[root] for root in match.roots], seed)
    for a, b in zip(left, right, strict=True):
        assert_close(a, b.detach().numpy(), f"{rule.equation} at {match.sizes}")


@each("name", CATALOGUE)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_both_sides_have_equal_values_and_gradients(name: str, seed: int) -> None:
    assert_equal_with_gradients(CATALOGUE[name], seed)


def test_a_rule_that_is_true_forward_alone_is_found_out() -> None:
    wrong = equation("detached", {"x": "*b i", "w": "o i"}, "linear(x, w)", "linear(detach(x), w)")
    with pytest.raises(AssertionError, match=r"linear\(x, w\) = linear\(detach\(x\), w\)"):
        assert_equal_with_gradients(wrong, 1)


# ---- placement rules, device by device ----

X, W = {"x": "m i"}, {"w": "o i"}
PLACED = [
    equation("split_the_sum", X | W, "linear(combine(x, axis=a), combine(w, axis=a))", "reduce(linear(x, w), axis=a)",
             guard=("i % a == 0",), axes=("a",), layouts={"x": ["S(1)"], "w": ["S(1)"]}),
    equation("megatron_mlp", X | {"w": "h i", "v": "o h"},
             "linear(relu(linear(x, combine(w, axis=a))), combine(v, axis=a))",
             "reduce(linear(relu(linear(replicate(x, axis=a), w)), v), axis=a)",
             guard=("h % a == 0",), axes=("a",), layouts={"x": ["R"], "w": ["S(0)"], "v": ["S(1)"]}),
    equation("data_parallel", X | W, "linear(x, w)",
             "combine(linear(partition(x, axis=a, dim=0), replicate(w, axis=a)), axis=a)",
             guard=("m % a == 0",), axes=("a",), layouts={"x": ["R"], "w": ["R"]}),
    equation("two_axes", X | W, "linear(x, w)",
             "combine(reduce(linear(partition(partition(x, axis=a, dim=0), axis=b, dim=1),"
             " replicate(partition(w, axis=b, dim=1), axis=a)), axis=b), axis=a)",
             guard=("m % a == 0", "i % b == 0"), axes=("a", "b"), layouts={"x": ["R", "R"], "w": ["R", "R"]}),
    equation("blocks_of_a_fused_weight", {"x": "m"}, "partition(x, axis=a, dim=0, blocks=2)",
             "partition(combine(partition(x, axis=a, dim=0), axis=a), axis=a, dim=0, blocks=2)",
             guard=("m % (2 * a) == 0",), axes=("a",), layouts={"x": ["R"]}),
    equation("vocabulary_in_parts", {"w": "v h", "t": "n"},
             "embedding(combine(w, axis=a), t, padding_idx=None, offset=0)",
             "reduce(embedding(w, replicate(t, axis=a), padding_idx=None, offset=0), axis=a)",
             guard=("v % a == 0",), axes=("a",), layouts={"w": ["S(0)"], "t": ["R"]}),
]  # fmt: skip


def sides(rule: Equation, mesh: Mesh, seed: int) -> tuple[Devices, Graph, list[tuple[str, str]]]:
    devices = Devices(mesh, np.random.default_rng(seed))
    pairs = devices.add(rule)
    return devices, devices.graph(), pairs


def assert_placed(rule: Equation, mesh: Mesh, seed: int = 0, adjoint: Mapping[str, str] = ADJOINT) -> None:
    """Both sides and their gradients, denoted, equal those of the erased left side."""
    devices, graph, pairs = sides(rule, mesh, seed)
    rng = np.random.default_rng(seed + 1)
    drawn = {name: _without_kinks(data, rng) for name, data in devices.data.items()}
    held, serial = devices_torch.run(graph, drawn), graph.erased()
    leaves = {name: torch.from_numpy(data.copy()).requires_grad_(data.dtype.kind == "f")
              for name, data in drawn.items()}  # fmt: skip
    whole = run_torch(serial, leaves)
    alias = erased_names(graph)
    for left, right in pairs:
        kind = graph.types[left]
        dy = rng.standard_normal(kind.shape)
        expected = whole[alias[left]]
        real = {name: x for name, x in leaves.items() if x.requires_grad}
        slopes = dict(zip(real, torch.autograd.grad(expected, list(real.values()), torch.from_numpy(dy),
                                                    allow_unused=True, retain_graph=True), strict=True))  # fmt: skip
        for side in (left, right):
            assert graph.types[side] == kind
            got = denote([x.numpy() for x in held[side]], kind, mesh)
            assert_close(expected, got, rule.equation)
            duals = tuple(x.dual for x in kind.layouts)
            start = devices_torch.tensors(scatter(dy, duals, mesh, seed))
            found = devices_torch.gradients(graph, held, side, start, adjoint)
            for name, slope in slopes.items():
                if name in found:
                    assert slope is not None
                    assert_gradient(found[name], slope, graph.types[name], mesh)


def _without_kinks(data: Array, rng: np.random.Generator) -> Array:
    """Where an operator has a kink both sides may take another subgradient: relu(-x) and relu(x) - x at 0."""
    return rng.standard_normal(data.shape) if data.dtype.kind == "f" else data


def assert_gradient(held: list[Tensor], slope: Tensor, kind: TensorType, mesh: Mesh) -> None:
    dual = TensorType(kind.shape, kind.dtype, tuple(x.dual for x in kind.layouts), kind.grad)
    assert_close(slope, denote([x.detach().numpy() for x in held], dual, mesh), "a gradient")


def erased_names(graph: Graph) -> dict[str, str]:
    """The node of the erased graph that each node denotes."""
    alias: dict[str, str] = {}
    for node in graph.nodes:
        alias[node.name] = alias[node.inputs[0]] if node.is_parallel else node.name
    return alias


def meshes(rule: Equation) -> list[Mesh]:
    return [Mesh(rule.axes, sizes) for sizes in (((2,), (3,)) if len(rule.axes) == 1 else ((2, 3), (3, 2)))]


@each("rule", PLACED, ids=lambda rule: rule.name)
def test_placement_rules_are_true_on_every_device_forward_and_backward(rule: Equation) -> None:
    for mesh in meshes(rule):
        assert_placed(rule, mesh)


GENERATED = sources()[3::14]


@each("source", GENERATED, ids=lambda source: source.name)
def test_generated_rules_are_true_by_torch(source: ContextSource) -> None:
    """A sample: a few certified rules of every fourteenth context of the generator."""
    rules = generate_one(source.function, source.context, 2, 0, lambda counts: None)
    for rule in rules[:: max(1, len(rules) // 5)]:
        if prove(rule).failure is not None:
            continue
        if rule.axes:
            assert_placed(rule, meshes(rule)[0])
        else:
            assert_equal_with_gradients(rule, 3)


@pytest.mark.parametrize("op", [PARTITION, COMBINE, REPLICATE, REDUCE])
def test_every_wrong_adjoint_gives_wrong_gradients(op: str) -> None:
    for wrong in set(PARALLEL_OPS) - {ADJOINT[op]}:
        with pytest.raises((AssertionError, LayoutError, RuntimeError, IndexError)):
            assert_all_placed({**ADJOINT, op: wrong})


def assert_all_placed(adjoint: Mapping[str, str]) -> None:
    for rule in PLACED:
        assert_placed(rule, Mesh(rule.axes, (2, 3)[: len(rule.axes)]), adjoint=adjoint)
