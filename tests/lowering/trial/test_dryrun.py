"""The dry run: it sends what ranks send, holds what they hold, and what differs from the prediction is told."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from shardwright.cli.dryrun import DryRunReport
from shardwright.cost.predict import predict
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime import runner
from shardwright.lowering.text.outside import Outside
from shardwright.lowering.trial.dryrun import dry_run
from shardwright.lowering.trial.tape import Tape
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import DistributedError, PlanError
from shardwright.pcg.graph import Graph, Source
from shardwright.pcg.layout import Layout, Layouts, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.lifetimes import Zero, with_lifetimes
from shardwright.search.plan import Plan, SearchReport
from tests.each import each
from tests.lowering.parallelize import follow, parallelize
from tests.lowering.runs import of_zoo, peak_on_rank
from tests.lowering.test_zoo import graphs
from tests.models import zoo
from tests.search.graphs import cluster, mlp

GRID = Mesh.of(dp=2, tp=2)


def planned(graph: Graph, execution: Execution = DEFAULT) -> Plan:
    """A plan for the graph, with its prediction."""
    where, searched = cluster(graph.mesh.num_devices), SearchReport(0.0, 1, 0.0, 1 << 60)
    return Plan(graph, where, "test", "", predict(graph, where, execution), (), searched, execution)


def report(graph: Graph, rank: int = 0, execution: Execution = DEFAULT) -> DryRunReport:
    return DryRunReport(planned(graph, execution), dry_run(graph, rank, execution))


def layered(mesh: Mesh, *, zero: str = "", tensor: str = "") -> Graph:
    """Four layers: the batch along all axes but `tensor`, along which weights are split; stored in slices on `zero`."""
    serial = mlp(batch=1024, width=512, hidden=2048, layers=4, residual=True)

    def stored(name: str, own: Layout) -> Layouts:
        """Along each axis; a weight that is split both ways is so along two dimensions."""
        other = S(1 - own.dim if tensor else 0)
        return tuple(own if axis == tensor else other if axis == zero else R for axis in mesh.names)

    leaves = [str(leaf.attr("target")) for leaf in serial.leaves("parameter")]
    storage = {name: stored(name, S(0) if name.endswith("up") else S(1)) for name in leaves}
    data = tuple(i for i, axis in enumerate(mesh.names) if axis != tensor)
    storage["x"] = tuple(S(0, prod(mesh.sizes[:i])) if i in data else R for i in range(len(mesh)))
    return parallelize(serial, mesh, follow(serial, mesh, data), storage)


PLANS: dict[str, Callable[[], Graph]] = {
    "data": lambda: layered(Mesh.of(dp=4)),
    "zero": lambda: layered(Mesh.of(dp=8), zero="dp"),
    "data and tensor": lambda: layered(Mesh.of(dp=8, tp=8), tensor="tp"),
    "hybrid": lambda: layered(Mesh.of(dp=8, zero=8), zero="zero"),
    "zero and tensor": lambda: layered(Mesh.of(dp=8, tp=8), zero="dp", tensor="tp"),
}


@each("name", PLANS)
def test_the_prediction_is_what_runs(name: str) -> None:
    found = report(PLANS[name]())
    assert found.findings == [], str(found)
    assert sum(found.run.messages.values()) > 3, str(found)
    assert not dist.is_initialized()


def test_every_message_says_what_it_sends() -> None:
    """By the row of the verb whose executor sends it: blocks, gradients, and what the program and autograd send."""
    run = dry_run(PLANS["zero and tensor"]())
    found = {(m.collective, m.axis, m.kind) for m in run.messages}
    assert found == {
        ("all_gather", "dp", "weights"), ("reduce_scatter", "dp", "gradients"), ("all_reduce", "tp", "activations"),
        ("all_reduce", "dp", "activations"),
    }  # fmt: skip


@each("name", PLANS)
def test_gradients_are_sent_in_another_dtype(name: str) -> None:
    """What is summed of them is half of what it was, all else as it was; predicted to the byte, and so is memory."""
    graph = PLANS[name]()
    own, found = report(graph), report(graph, execution=Execution(reduce_dtype="bfloat16"))
    assert found.findings == [], str(found)
    one, other = Counter(own.run.messages), Counter(found.run.messages)
    before, after = one - other, other - one
    assert after
    assert after == Counter({m._replace(num_bytes=m.num_bytes // 2): times for m, times in before.items()})


@each("name", ["data and tensor", "zero and tensor"])
def test_moves_in_pieces(name: str) -> None:
    """Four messages of a quarter each, and the memory of what is put together, and of gradients that are added up."""
    graph = PLANS[name]()
    own, found = report(graph), report(graph, execution=Execution(pieces=4))
    assert found.findings == [], str(found)
    one, other = Counter(own.run.messages), Counter(found.run.messages)
    before, after = one - other, other - one
    assert {message.axis for message in before} == {"tp"}
    assert after == Counter({m._replace(num_bytes=m.num_bytes // 4): 4 * times for m, times in before.items()})


def routed(layers: int = 3) -> Graph:
    """Networks of experts, each with its two matrices in blocks of their own, which are stored in slices."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (8192, 512), "float32", "x")
    given = [b.leaf(name, "input", (8192, 2), dtype, name) for name, dtype in (("index", "int64"), ("w", "float32"))]
    y = x
    for number in range(layers):
        b.at(f"y{number}", Source(f"layers.{number}.experts"))
        shapes = {"up": (8, 8192, 512), "down": (8, 512, 8192)}
        held = [
            b.leaf(f"{name}{number}", "parameter", shape, "float32", f"layers.{number}.experts.{name}", grad=True)
            for name, shape in shapes.items()
        ]
        turned = [b.op("permute", name, dims=(0, 2, 1)) for name in held]
        y = b.op("add", y, b.op("experts", y, *given, *turned, activation="relu"))
    graph = b.graph([("loss", b.op("sum", b.op("mul", y, y), dims=(0, 1), keepdim=False))])
    mesh = Mesh.of(dp=8)
    storage = {str(n.attr("target")): (S(0),) for n in (*graph.leaves("parameter"), *graph.leaves("input"))}
    return parallelize(graph, mesh, follow(graph, mesh, (0,)), storage)


@each("zero", ["kept", "zero-3"])
def test_experts(zero: Zero) -> None:
    """Backward gathers first what it needs first, and nothing twice: the second matrices before the first."""
    graph = routed()
    found = report(with_lifetimes(graph, {leaf.name: zero for leaf in graph.leaves("parameter")}))
    assert found.messages == found.run.messages, str(found)


@each(("split", "execution"), [(("e>_0",), DEFAULT), (("e>_0", "e>_0"), Execution(recompute="full"))])
def test_rows_that_are_sent(split: tuple[str, ...], execution: Execution) -> None:
    """One expert for each row, so that a rank gets as many as expected; all of it again where it is made again."""
    b = GraphBuilder()
    y = b.leaf("x", "input", (4096, 64), "float32", "x")
    index = b.leaf("index", "input", (4096, 1), "int64", "index")
    mesh = Mesh(("a", "b")[: len(split)], (4, 2)[: len(split)])
    for number in range(2):
        b.at(f"y{number}", Source(f"layers.{number}.experts"))
        shapes = {"router": (1, 64), "up": (8, 64, 256), "down": (8, 256, 64)}
        router, up, down = (
            b.leaf(f"{name}{number}", "parameter", shape, "float32", f"layers.{number}.{name}", grad=True)
            for name, shape in shapes.items()
        )
        y = b.op("add", y, b.op("experts", y, index, b.op("linear", y, router), up, down, activation="gelu"))
    graph = b.graph([("loss", b.op("sum", b.op("mul", y, y), dims=(0, 1), keepdim=False))])
    others = follow(graph, mesh, tuple(range(len(mesh))))
    whole, held = (R,) * len(mesh), tuple(S(0) if ">" in choice else R for choice in split)
    targets = (str(leaf.attr("target")) for leaf in graph.leaves("parameter"))
    storage = {target: whole if "router" in target else held for target in targets}
    storage |= dict.fromkeys(("x", "index"), (S(0),) * len(mesh))
    found = parallelize(graph, mesh, lambda n, a, o: split[a] if n.op == "experts" else others(n, a, o), storage)
    compared = report(found, execution=execution)
    assert compared.findings == [], str(compared)
    sent = sum(times for message, times in compared.run.messages.items() if message.collective == "all_to_all")
    assert sent == 2 * sum(">" in choice for choice in split) * (5 if execution == DEFAULT else 8)


def test_ranks_stand_for_each_other() -> None:
    graph = layered(GRID, tensor="tp")
    first, *others = (replace(dry_run(graph, rank), rank=0, seconds=0.0) for rank in range(4))
    assert others == [first] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo("gpt", "dlrm"))
def test_models_of_the_zoo(name: str) -> None:
    for graph in graphs(of_zoo(name)):
        found = report(graph)
        assert found.findings == [], str(found)


@pytest.mark.slow
def test_memory_is_what_two_ranks_measure() -> None:
    case = of_zoo("gpt")
    data, _, split = graphs(case)

    for graph in (data, split):
        (found, _) = run_ranks(lambda graph=graph: peak_on_rank(case, graph, steps=3), 2, 60)
        assert dry_run(graph).peak_bytes == pytest.approx(found, rel=0.05)


# ---- what differs is told ----


def changed(monkeypatch: pytest.MonkeyPatch, pattern: str, text: str) -> None:
    """From now on programs are written with this change of their first such line."""
    real = runner.emit

    def emit(graph: Graph, outside: Outside | None = None) -> str:
        source, count = re.subn(pattern, text, real(graph, outside), count=1, flags=re.MULTILINE)
        assert count == 1
        return source

    monkeypatch.setattr(runner, "emit", emit)


def test_a_collective_too_few_or_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layered(Mesh.of(tp=4), tensor="tp")
    assert report(graph).passed
    told = f"all_reduce of activations along tp of {1024 * 512 * 4:,} bytes"
    with monkeypatch.context() as patch:
        changed(patch, r"= reduce\((\w+), tp.*?\)", r"= \1")
        assert report(graph).findings == [f"{told}: predicted 7 times, the dry run has 6"]
    changed(monkeypatch, r"= (reduce\(\w+, tp.*?\))", r"= reduce(\1, tp)")
    found = report(graph)
    assert f"{told}: predicted 7 times, the dry run has 8" in found.findings
    assert "OFF" in str(found)
    assert found.data()["passed"] is False


def test_a_value_of_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layered(Mesh.of(dp=4))
    with monkeypatch.context() as patch:
        changed(patch, r"(= \w+\.relu\(\))", r"\1.double()")
        first, *_ = report(graph).findings
        assert re.fullmatch(r"\w+ \(.*\): expected float32\[256, 2048\], got float64\[256, 2048\]", first)
    changed(monkeypatch, r"(= \w+\.relu\(\))", r"\1[:, 1:]")
    first, then = report(graph).findings[:2]
    assert "got float32[256, 2047]" in first
    assert re.match(r"the program fails at `.*linear.*`: .*\[256, 2047\] X \[2048, 512\]", then)
    assert not dist.is_initialized()


def test_memory_that_is_not_as_predicted() -> None:
    graph = layered(Mesh.of(dp=4))
    plan, run = planned(graph), dry_run(graph)
    more = {name: int(1.1 * num_bytes) for name, num_bytes in run.memory.items()}
    (finding,) = DryRunReport(plan, replace(run, memory=more)).findings
    assert re.match(
        r"memory at the peak: predicted .* MB, the dry run has .* MB, which is more than 5.0 % off", finding
    )
    memory = replace(plan.prediction.memory, slack_bytes=plan.prediction.memory.total_bytes)
    old = replace(plan, prediction=replace(plan.prediction, memory=memory))
    (finding,) = DryRunReport(old, run).findings
    assert re.match(r"memory in all: the plan says .*, this Shardwright predicts .*; plan again", finding)


def test_bad_ranks() -> None:
    graph = layered(Mesh.of(dp=4))
    for rank in (-1, 4):
        with pytest.raises(PlanError, match=f"rank {rank}: the mesh .* has ranks 0 to 3"):
            dry_run(graph, rank)


def test_among_real_ranks_it_refuses() -> None:
    def body() -> str:
        with pytest.raises(DistributedError, match="needs a process of its own"):
            dry_run(layered(Mesh.of(dp=4)))
        return "refused"

    assert run_ranks(body, 1, 30) == ["refused"]


# ---- the tape ----


def test_a_tape_tells_what_is_alive_and_what_for() -> None:
    with FakeTensorMode() as mode, Tape(mode) as tape:
        weight, x = torch.empty(100, requires_grad=True), torch.empty(100)
        tape.begin()
        y = (weight * x).exp()
        y.sum().backward()
        tape.label("parameters", [weight])
    peak = tape.peak()
    assert peak.memory["parameters"] == 400
    assert peak.memory["gathered"] == 3 * 400  # x, y and weight.grad stay, and nobody says what for
    assert "mul" in peak.during or "exp" in peak.during
    assert tape.sent == {}


def test_a_dry_run_leaves_nothing_that_ranks_forked_later_trip_over() -> None:
    """DTensor keeps, by mesh, what it works out: of groups that were gone when a forked rank asked for them."""
    found = of_zoo("gpt")
    shapes = {name: p.shape for name, p in found.model.named_parameters()}
    storage = {name: (S(0), R) for name, shape in shapes.items() if shape[0] % 2 == 0}
    graph = found.graph(GRID, storage, data_axes=(0,))
    dry_run(graph, rank=1)

    def body(parallel: ParallelModule) -> bool:
        parallel.forward_backward(**found.batch)
        torch.optim.AdamW(parallel.parameters(), fused=True).step()
        return all(bool(whole(p.detach()).isfinite().all()) for p in parallel.parameters())

    assert found.on_ranks(graph, body) == [True] * 4


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x
