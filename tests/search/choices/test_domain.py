"""What operators can choose: shared by all sizes that the same degrees divide."""

from __future__ import annotations

from itertools import product

from shardwright.cost.collectives.moves import MoveCosts
from shardwright.cost.compute.compute import compute_on
from shardwright.cost.compute.operators import Option
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.choice import Split, indivisible
from shardwright.pcg.mesh import Mesh
from shardwright.search.choices import domain
from shardwright.search.choices.domain import axis_options, node_options, options_along
from shardwright.search.choices.reshard import can_hold
from tests.search.graphs import cluster, every_choice


def test_what_divides_the_sizes_decides_what_can_be_combined() -> None:
    """As if every size were looked at by itself; blocks of a fused dimension, and of none, included."""
    domain.combined.cache_clear()
    for sizes, batch, heads, width in product(((2, 4), (4, 2), (3,)), (1, 8, 24), (3, 4, 12), (5, 12, 20)):
        b = GraphBuilder()
        x = b.leaf("x", "input", (batch, heads * width), "float32", "x")
        w = b.leaf("w", "parameter", (width, heads * width), "float32", "w", grad=True)
        b.op("linear", x, w)
        b.op("reshape", x, shape=(batch, heads, width))
        for node in b.nodes.values():
            if node.is_leaf:
                continue
            operands = [b.types[i] for i in node.inputs]
            signature = node.row.signature([t.shape for t in operands], dict(node.attrs)) if node.row else None
            assert signature is not None
            certified = every_choice(node, operands, (Split("i", 3),) if node.op == "linear" else ())
            shapes = (*(t.shape for t in operands), b.types[node.name].shape)
            options = tuple(
                options_along(node.op, node.attrs, shapes, size, certified, sending=True, copied=True) for size in sizes
            )
            choices, numbers = domain.combine(options, signature, shapes, sizes)
            alone, its_numbers = domain.combined.__wrapped__(options, signature, shapes, sizes)
            assert (choices, numbers.tolist()) == (alone, its_numbers.tolist())
            for (names, needs, made), of in zip(choices, numbers, strict=True):
                along = (own.options[i] for own, i in zip(options, of, strict=True))
                assert list(along) == list(zip(names, zip(*needs, strict=True), made, strict=True))
    info = domain.combined.cache_info()
    assert info.hits > info.misses / 4


def test_choices_are_those_that_all_shapes_can_hold() -> None:
    """Also where two axes split one factor, or one dimension by two; what each leaves a device is what it is alone."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (8, 24), "float32", "x")
    w = b.leaf("w", "parameter", (12, 24), "float32", "w", grad=True)
    b.op("linear", x, w)
    b.op("reshape", x, shape=(8, 4, 6))
    mesh = Mesh(("a", "b"), (2, 4))
    costs, compute = MoveCosts(cluster(8), mesh), compute_on(cluster(8).device)
    for node in (n for n in b.nodes.values() if not n.is_leaf):
        operands, result = [b.types[i] for i in node.inputs], b.types[node.name]
        certified = every_choice(node, operands, (Split("i", 3),) if node.op == "linear" else ())
        options = node_options(node, operands, result, mesh, (certified,) * 2, costs, compute, "")
        assert node.row is not None
        signature = node.row.signature([t.shape for t in operands], dict(node.attrs))
        per_axis = [axis_options(node.row, signature, size, certified) for size in mesh.sizes]
        wanted = list[Option]()
        for combination in product(*([o for o in own if o[0] != "C" or result.grad] for own in per_axis)):
            names, needs, made = zip(*combination, strict=True)
            laid_out = [made, *zip(*needs, strict=True)]
            shapes = [result.shape, *(t.shape for t in operands)]
            if indivisible(signature, names, mesh.sizes) is None and all(
                can_hold(shape, own, mesh.sizes) for shape, own in zip(shapes, laid_out, strict=True)
            ):
                wanted.append((names, tuple(laid_out[1:]), made))
        assert list(options.choices) == wanted
        assert [options.parts[i] for i in options.of] == [options.cost.part(*choice) for choice in wanted]
        assert len(options.parts) == len(set(options.parts)) < len(wanted)
