"""Every ATen handler against torch: what torch.export makes of a call, lifted, computes what the call computes.

The lifted graph is run twice: by the NumPy interpreter, which gives its meaning, and by the rows' torch expressions,
which give its gradients. A new handler is tested as soon as it has a case in `tests/pcg/aten_cases`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.pcg.aten import HANDLERS, Ref, dtype_name, find_handler, lift
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.capture.exporting import export
from shardwright.pcg.capture.importing import Importer
from shardwright.pcg.errors import GraphError
from shardwright.pcg.graph import OPAQUE, Graph
from shardwright.pcg.interpret import run_serial
from tests.each import each
from tests.pcg.aten_cases.catalogue import CASES, TOPICS, UNCOVERED, Case
from tests.pcg.run_torch import run_torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Call(nn.Module):
    """One case. Floating-point operands are parameters, the others buffers."""

    def __init__(self, one: Case) -> None:
        super().__init__()
        self.run = one.run
        for i, operand in enumerate(one.operands):
            if operand.is_floating_point():
                self.register_parameter(f"x{i}", nn.Parameter(operand.clone()))
            else:
                self.register_buffer(f"x{i}", operand.clone())
        self.num_operands = len(one.operands)

    def forward(self) -> list[Tensor]:
        return tree_leaves(self.run(*(getattr(self, f"x{i}") for i in range(self.num_operands))))


class Calls(nn.Module):
    """Many cases, run one after the other."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.calls = nn.ModuleList(map(Call, cases))

    def forward(self) -> list[list[Tensor]]:
        return [call() for call in self.calls]


@dataclass(frozen=True)
class Lifted:
    """Calls of one operator, lifted: their graph, and what they are and become in torch.

    `calls` maps the module path of each to the nodes of its results and the results in torch; `targets` says which
    operators torch.export makes of it. `after` are the modules after the calls, with their statistics.
    """

    graph: Graph
    leaves: Mapping[str, Tensor]
    calls: Mapping[str, tuple[list[str], list[Tensor]]]
    targets: Mapping[str, list[str]]
    after: nn.Module

    @property
    def results(self) -> Iterator[tuple[str, Tensor, str]]:
        """Node, value in torch and where it comes from, of every result."""
        for path, (names, values) in self.calls.items():
            for i, (name, value) in enumerate(zip(names, values, strict=True)):
                yield name, value, f"{path}, result {i}"

    def opaque(self) -> set[object]:
        return {
            node.attr("target")
            for node in self.graph.nodes
            if node.op == OPAQUE and call_of(node.source.module) in self.calls
        }


def call_of(path: str) -> str:
    """`calls.3.run.inner` -> `calls.3`."""
    return ".".join(path.split(".")[:2])


def lift_all(catalogue: Mapping[str, Sequence[Case]]) -> dict[str, Lifted]:
    """One export for all, because an export takes its time whatever is in it."""
    probe = Calls([one for cases in catalogue.values() for one in cases])
    exported = export(probe, probe, {}, None)
    results = ["loss"] * len(exported.graph_signature.user_outputs)
    graph, constants = Importer(probe, exported, {}, 1, lambda module: False, results=results).run()
    named = dict(probe.named_parameters()) | dict(probe.named_buffers()) | constants
    leaves = {node.name: named[str(node.attr("target"))] for node in graph.nodes if node.is_leaf}
    after = copy.deepcopy(probe)
    values, names = after(), iter([name for key, name in graph.outputs if key == "loss"])
    made: dict[str, list[str]] = {}
    for node in exported.graph.nodes:
        if node.op == "call_function" and (stack := list((node.meta.get("nn_module_stack") or {}).values())):
            path = stack[-1][0].removeprefix("L['self']").lstrip(".")
            made.setdefault(call_of(path), []).append(str(node.target))
    calls = {f"calls.{i}": ([next(names) for _ in results], results) for i, results in enumerate(values)}
    paths = iter(calls)
    return {
        name: Lifted(
            graph,
            leaves,
            own := {p: calls[p] for p in islice(paths, len(cases))},
            {p: made.get(p, []) for p in own},
            after,
        )
        for name, cases in catalogue.items()
    }


@cache
def lifted_topic(number: int) -> dict[str, Lifted]:
    return lift_all((*TOPICS, UNCOVERED)[number])


def topic_of(name: str) -> int:
    return next(i for i, topic in enumerate((*TOPICS, UNCOVERED)) if name in topic)


def lifted(name: str) -> Lifted:
    """The calls of a handler, or those that an operator's row does not express."""
    return lifted_topic(topic_of(name))[name]


@cache
def in_numpy(topic: int) -> Mapping[str, np.ndarray]:
    """Every value of the graph that all handlers of a topic share."""
    one = next(iter(lifted_topic(topic).values()))
    return run_serial(one.graph, {k: to_numpy(v) for k, v in one.leaves.items()})


@cache
def in_torch(topic: int) -> Mapping[str, Tensor]:
    one = next(iter(lifted_topic(topic).values()))
    return run_torch(one.graph, one.leaves)


def to_numpy(value: Tensor) -> np.ndarray:
    value = value.detach()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def assert_close(got: Any, want: Tensor, where: str) -> None:
    """Equal up to rounding: tightly in double precision, bit by bit where there is none."""
    double = 1e-6 if where.startswith("celu") else 1e-12  # torch 2.13 takes 1 / alpha in float32 in its gradient
    tolerance = {torch.float64: double, torch.float32: 1e-5, torch.bfloat16: 2e-2}.get(want.dtype, 0)
    np.testing.assert_allclose(got, to_numpy(want), rtol=tolerance, atol=tolerance, err_msg=where)


# ---- gradients ----


def gradients(results: Iterable[Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a weighted sum of all results, in which no two elements weigh the same."""
    total = torch.zeros((), dtype=torch.float64)
    for result in results:
        if result.requires_grad:
            weights = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64).reshape(result.shape)
            total = total + (result.double().nan_to_num() * weights).sum()
    if not total.requires_grad:
        return {name: torch.zeros_like(value) for name, value in wanted.items()}
    found = torch.autograd.grad(
        total, list(wanted.values()), allow_unused=True, materialize_grads=True, retain_graph=True
    )
    return dict(zip(wanted, found, strict=True))


# ---- the catalogue ----


def key_of(target: str) -> str | None:
    """The handler's key for an exported operator."""
    namespace, name, overload = target.split(".") if target.count(".") == 2 else ("", target, "")
    keys = (f"{name}.{overload}", name, f"{namespace}::{name}")
    return next((key for key in keys if key in HANDLERS), None)


def test_every_handler_has_cases() -> None:
    assert set(CASES) == set(HANDLERS)


@each("name", CASES)
def test_a_lifted_call_computes_what_torch_does(name: str) -> None:
    """In NumPy, with the dtypes of torch, and through the handler that the case is there for."""
    one = lifted(name)
    missed = {path: made for path, made in one.targets.items() if name not in map(key_of, made)}
    assert not missed, f"torch.export makes no {name} of these cases"
    assert not one.opaque()
    values = in_numpy(topic_of(name))
    for result, want, where in one.results:
        assert one.graph.types[result].dtype == dtype_name(want.dtype)
        assert_close(values[result], want, where)
    for target, result in one.graph.outputs:
        if call_of(target) in one.calls:
            assert_close(values[result], one.after.get_buffer(target), target)


@each("name", [*CASES, *UNCOVERED])
def test_a_lifted_call_has_torchs_gradients(name: str) -> None:
    """By the rows' torch expressions, as lowered programs have them."""
    one, values = lifted(name), in_torch(topic_of(name))
    parameters = {k: v for k, v in one.after.named_parameters() if call_of(k) in one.calls}
    leaves = {str(n.attr("target")): one.leaves[n.name] for n in one.graph.leaves("parameter")}
    got = gradients([values[result] for result, _, _ in one.results], {k: leaves[k] for k in parameters if k in leaves})
    for parameter, want in gradients([want for _, want, _ in one.results], parameters).items():
        assert_close(to_numpy(got.get(parameter, torch.zeros_like(want))), want, f"{name}: gradient of {parameter}")


@each("target", UNCOVERED)
def test_arguments_that_no_row_expresses_make_it_opaque(target: str) -> None:
    one = lifted(target)
    assert one.opaque() == {target}
    assert all(made.count(target) == 1 for made in one.targets.values())
    values = in_torch(topic_of(target))
    for result, want, where in one.results:
        assert_close(to_numpy(values[result]), want, where)


# ---- how a handler is called ----


def builder(*types: tuple[tuple[int, ...], str]) -> tuple[GraphBuilder, list[Ref]]:
    """A builder with one parameter per type, and references to them."""
    b = GraphBuilder()
    return b, [Ref(b.leaf(f"x{i}", "parameter", *kind, f"x{i}", grad=True)) for i, kind in enumerate(types)]


def ops(b: GraphBuilder) -> list[str]:
    return [node.op for node in b.nodes.values() if not node.is_leaf]


def test_a_handler_of_an_overload_goes_first() -> None:
    assert find_handler("aten.max.dim") is HANDLERS["max.dim"]
    assert find_handler("aten.sum.dim_IntList") is HANDLERS["sum"]
    assert find_handler("aten.no_such.default") is None


def test_operators_of_other_libraries_are_not_atens() -> None:
    assert find_handler("mine.add.default") is None
    assert find_handler("transformers.grouped_mm_fallback.default") is HANDLERS["transformers::grouped_mm_fallback"]


@pytest.mark.parametrize(("args", "kwargs"), [((1, 2, 3, 4), {}), ((), {"unheard_of": 1})])
def test_arguments_outside_the_signature_make_it_opaque(args: tuple[int, ...], kwargs: dict[str, int]) -> None:
    b, (x,) = builder(((3,), "float32"))
    lift(b, "aten.relu.default", [x, *args], kwargs, [((3,), "float32")], {0})
    assert ops(b) == [OPAQUE]


def test_placement_is_not_an_argument() -> None:
    b, _ = builder()
    lift(b, "aten.zeros.default", [[3]], {"device": "cuda", "pin_memory": False}, [((3,), "float32")], {0})
    assert ops(b) == ["full"]


@pytest.mark.parametrize("mistake", [TypeError, ValueError, KeyError, ZeroDivisionError])
def test_a_mistake_inside_a_handler_is_not_hidden(mistake: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(b: GraphBuilder, x: str) -> str:
        raise mistake("a bug")

    monkeypatch.setitem(HANDLERS, "relu", handler)
    b, (x,) = builder(((3,), "float32"))
    with pytest.raises(mistake, match="a bug"):
        lift(b, "aten.relu.default", [x], {}, [((3,), "float32")], {0})


def test_a_row_of_another_shape_is_an_error() -> None:
    b, (x,) = builder(((3,), "float32"))
    with pytest.raises(GraphError, match=r"expected shape \[4\], the op table gives \[3\]"):
        lift(b, "aten.relu.default", [x], {}, [((4,), "float32")], {0})


def test_a_dtype_that_no_value_can_have_is_an_error() -> None:
    b, (x,) = builder(((3,), "float32"))
    with pytest.raises(GraphError, match=r"a result is float128; expected one of bool, uint8, .*: compute with real"):
        lift(b, "aten._to_copy.default", [x], {}, [((3,), "float128")], {0})


def test_results_have_the_dtypes_of_torch() -> None:
    b, (x,) = builder(((3,), "float32"))
    (y,) = lift(b, "aten.relu.default", [x], {}, [((3,), "bfloat16")], {0})
    assert b.types[str(y)].dtype == "bfloat16"


def test_a_result_that_no_row_gives_may_be_missing_until_it_is_read() -> None:
    types = [((2, 3, 2, 2), "float32"), ((2, 3, 2, 2), "int64")]
    for read, expected in (
        ({0}, ["max_pool2d"]),
        ({1}, ["max_pool2d", OPAQUE, OPAQUE]),
        ({0, 1}, ["max_pool2d", OPAQUE, OPAQUE]),
    ):
        b, (x,) = builder(((2, 3, 4, 4), "float32"))
        names = lift(b, "aten.max_pool2d_with_indices.default", [x, [2, 2]], {}, types, read)
        assert ops(b) == expected
        assert (names[1] is None) == (1 not in read)


def test_opaque_operators_keep_their_arguments() -> None:
    b, (x, y) = builder(((3,), "float32"), ((2,), "float32"))
    args, kwargs = [x, [y, None, 2.5], "text"], {"dtype": torch.float32, "device": torch.device("cpu"), "z": x}
    (name,) = lift(b, "mine.op.default", args, kwargs, [((3,), "float32")], {0})
    node = b.nodes[str(name)]
    assert node.inputs == (x, y, x)
    assert node.attr("args") == (("$", 0), (("$", 1), None, 2.5), "text")
    assert node.attr("kwargs") == (("device", ("torch", "cpu")), ("dtype", ("torch", "torch.float32")), ("z", ("$", 2)))


# ---- what rows are chosen ----


def lifted_ops(
    target: str, *args: Any, types: Sequence[tuple[tuple[int, ...], str]], result: Any, **kwargs: Any
) -> list[str]:
    """The operators of a call; integers among `args` below the number of `types` are operands, written as "x0"."""
    b, refs = builder(*types)
    given = [refs[int(a[1:])] if isinstance(a, str) else a for a in args]
    lift(b, target, given, kwargs, result if isinstance(result, list) else [result], {0})
    return [f"{node.op}:{b.types[node.name].dtype}" for node in b.nodes.values() if not node.is_leaf]


def test_a_bag_of_equal_lengths_can_be_split_along_the_batch() -> None:
    one = lifted("embedding_bag")
    (path, *_), ragged = (
        one.calls,
        [p for p, (names, _) in one.calls.items() if one.graph.by_name[names[0]].op == "embedding_bag"],
    )
    assert one.graph.by_name[one.calls[path][0][0]].op == "sum"
    assert len(ragged) == 3


@pytest.mark.parametrize("target", ["aten.mean.default", "aten.var.correction"])
def test_sums_that_are_divided_do_not_overflow_in_half_precision(target: str) -> None:
    made = lifted_ops(target, "x0", types=[((4,), "float16")], result=((), "float16"))
    assert "sum:float32" in made
    assert "sum:float16" not in made


def test_cross_entropy_does_not_overflow_in_half_precision() -> None:
    types = [((4, 3), "float16"), ((4,), "int64")]
    made = lifted_ops("aten.cross_entropy_loss.default", "x0", "x1", types=types, result=((), "float16"))
    assert {"cross_entropy_sum:float32", "sum:float32"} <= set(made)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_batches_of_halves_are_normalized_in_single_precision(dtype: str) -> None:
    types = [((4, 3), dtype), *[((3,), "float32")] * 4]
    result = [((4, 3), dtype), None, None, ((3,), "float32"), ((3,), "float32")]
    made = lifted_ops("aten._native_batch_norm_legit_functional.default", "x0", "x1", "x2", "x3", "x4", True, 0.1, 1e-5,
                      types=types, result=result)  # fmt: skip
    assert [op for op in made if op.endswith(dtype)] == [f"cast:{dtype}"]


def test_the_usual_epsilon_of_rms_norm_is_that_of_the_precision_it_computes_in() -> None:
    for dtype, epsilon in (("float16", 2.0**-23), ("bfloat16", 2.0**-23), ("float32", 2.0**-23), ("float64", 2.0**-52)):
        b, (x,) = builder(((3, 4), dtype))
        (y,) = lift(b, "aten.rms_norm.default", [x, [4]], {}, [((3, 4), dtype)], {0})
        assert (
            b.nodes[str(y)].attr("eps")
            == epsilon
            == torch.finfo(torch.float32 if "16" in dtype else getattr(torch, dtype)).eps
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_hidden_scores_are_the_lowest_numbers_of_their_dtype(dtype: str) -> None:
    types = [((2, 4, 8, 16), dtype)] * 3
    b, refs = builder(*types)
    lift(b, "aten.scaled_dot_product_attention.default", [*refs, None, 0.1, True], {}, [types[0]], {0})
    (value,) = [
        n.attr("value")
        for n in b.nodes.values()
        if n.op == "full" and b.types[n.name].dtype == dtype and float(str(n.attr("value"))) < 0
    ]
    assert value == torch.finfo(getattr(torch, dtype)).min
