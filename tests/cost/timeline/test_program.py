"""Programs of typed graphs: conservation, bounds, what repeats, what each way of running does to time and memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.cost.clusters.cluster import Cluster, Level
from shardwright.cost.collectives.communication import Communication
from shardwright.cost.collectives.resharding import StageMesh, resharding_s
from shardwright.cost.predict import details, predict
from shardwright.cost.timeline.clock import Sharing
from shardwright.cost.timeline.passes import COPY_START_S
from shardwright.cost.timeline.program import Programs, crossing_s, program
from shardwright.cost.timeline.segments import StepProgram
from shardwright.cost.timeline.tasks import COPY, Segment
from shardwright.cost.timeline.timeline import SLACK, Timeline, simulate
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.graph import Graph, Source
from shardwright.pcg.layout import C, Layout, P, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.pieces import Tensor
from shardwright.pcg.precision import Precision
from shardwright.pcg.stages import STAGES
from shardwright.pcg.step.chunk import whole_chunk
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.lifetimes import Zero, lifetimes, with_lifetimes
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.parameters import blocks_of
from shardwright.pcg.types import TensorType
from shardwright.search.tree.planner import Planner
from tests.cost.programs import blocks, planned
from tests.each import each
from tests.search.graphs import cluster, every_choice

ROLES = ("data", "zero", "tensor")
PLAIN = Execution()
WAYS = [
    PLAIN,
    Execution.of(overlap=False),
    Execution.of(num_microbatches=3),
    Execution.of(num_microbatches=3, overlap=False),
    Execution(recompute="full"),
    Execution.of(recompute="full", num_microbatches=2),
    Execution.of("amp_bf16", shard_optimizer=True, num_microbatches=2),
    Execution.of("bf16", optimizer="sgd"),
    Execution.of("amp_bf16", late_gathers=True, num_microbatches=2),
    Execution.of(late_gathers=True, recompute="full"),
    Execution.of(num_stages=2, num_microbatches=4),
    Execution.of(num_stages=2, num_microbatches=4, overlap=False),
    Execution.of(num_stages=4, num_microbatches=4, schedule="gpipe", recompute="full"),
    Execution.of(num_stages=2, num_microbatches=4, schedule="zero-bubble"),
    Execution.of(num_stages=2, num_microbatches=4, schedule="interleaved", chunks_per_stage=2),
]
ways = each("run", WAYS, ids=[str(i) for i in range(len(WAYS))])
roles = each("role", ROLES)


def simulated(graph: Graph, run: Execution, **options: object) -> Timeline:
    return simulate(program(graph, cluster(4 * run.schedule.num_stages), run, **options))  # type: ignore[arg-type]


@ways
@roles
def test_what_a_step_takes_it_gives_back_and_memory_is_never_negative(role: str, run: Execution) -> None:
    for stage in simulated(planned(role, 6), run).stages:
        left = defaultdict[str, float](float)
        for place in stage.placed:
            before = sum(left.values())
            assert before + min(place.timeline.memory.values, default=0.0) >= -1e-6
            for category, num_bytes in place.timeline.net.items():
                left[category] += num_bytes
                assert left[category] >= -1e-6
        assert all(abs(num_bytes) < 1e-6 for num_bytes in left.values())


@ways
@roles
def test_a_stage_is_never_faster_than_its_streams_nor_slower_than_all_in_turn(role: str, run: Execution) -> None:
    made = program(planned(role, 6), cluster(4 * run.schedule.num_stages), run)
    found = simulate(made)
    for stage in found.stages:
        assert stage.compute_s + stage.exposed_s + stage.bubble_s == pytest.approx(found.step_s)
        assert all(seconds <= found.step_s * (1 + 1e-9) for seconds in stage.busy_s.values())
    assert found.busiest.at_work_s <= made.serial_s * (1 + 1e-9)
    if not run.assumed.overlap and run.schedule.num_stages == 1:
        assert found.step_s == pytest.approx(made.serial_s)


@roles
def test_undisturbed_streams_only_gain(role: str) -> None:
    made = program(planned(role, 6), cluster(4))
    free = simulate(made, {"cpu": Sharing(1.0, 1.0), "cuda": Sharing(1.0, 1.0)})
    assert free.step_s <= simulate(made).step_s * (1 + 1e-9)
    if role == "zero":  # the collectives of "tensor" block, the small gradients of "data" are one bucket at the end
        assert free.step_s < 0.95 * made.serial_s


@roles
def test_the_parts_are_those_of_the_nodes(role: str) -> None:
    """Buckets and blocks join collectives; nothing else differs from the sum over the nodes."""
    graph = planned(role, 6)
    predicted, made = predict(graph, cluster(4)), program(graph, cluster(4), Execution.of(overlap=False))
    assert made.serial_s <= predicted.serial_s * (1 + 1e-9)
    compute_s = predicted.compute_s + predicted.optimizer_s
    assert compute_s - 1e-12 <= simulate(made).busiest.compute_s <= compute_s + predicted.communication_s  # slices
    if role == "tensor":
        assert made.serial_s == pytest.approx(predicted.serial_s)


# ---- repeats ----


@each("num", [3, 4, 9])
@each("run", [w for w in WAYS if w.schedule.num_stages == 1], ids=lambda w: str(WAYS.index(w)))
@roles
def test_a_repeated_block_costs_what_so_many_blocks_cost(role: str, run: Execution, num: int) -> None:
    """The repeated block is the middle one of three; gathers and sums meet at its ends as they do between others."""
    three, many = planned(role, 3), planned(role, num + 2)
    folded, whole = simulated(three, run, repeats={"layers.1": num}), simulated(many, run)
    assert folded.step_s == pytest.approx(whole.step_s, rel=0.02)
    assert folded.fullest.memory.total_bytes == pytest.approx(whole.fullest.memory.total_bytes, rel=0.02)
    for category in ("parameters", "optimizer", "buffers"):
        ours, theirs = (t.fullest.memory.by_category()[category] for t in (folded, whole))
        assert ours == theirs


def test_repeated_blocks_share_what_they_compute_once() -> None:
    """Every block makes a table of positions; a graph has it once."""
    batch = table = 32 * 4
    four = simulate(program(with_tables(4), cluster(1), PLAIN)).fullest.memory.buffers_bytes
    assert four == batch + table
    repeated = simulate(program(with_tables(1), cluster(1), PLAIN, repeats={"blocks.0": 4}))
    assert repeated.fullest.memory.buffers_bytes == four


@each("num", [1, 3])
def test_the_first_of_each_operator_takes_longer_once_a_step(num: int) -> None:
    """Not those that are computed once; backward only where there is one."""
    machine, graph = cluster(1), with_tables(num)
    first_uses = {"add": (1e-3, 2e-3), "mul": (1e-2, 2e-2), "sum": (0.1, 0.2), "cast": (1.0, 2.0), "neg": (9.0, 9.0)}
    cold = replace(machine, device=replace(machine.device, first_uses=first_uses))
    for run in (PLAIN, PLAIN.having(num_microbatches=2)):
        step_s = simulate(program(graph, cold, run)).step_s - simulate(program(graph, machine, run)).step_s
        assert step_s == pytest.approx(0.333 if num > 1 else 0.331)


def with_tables(num: int) -> Graph:
    """Blocks that add a table to their input and multiply it with a parameter."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (32,), "float32", "x")
    for block in range(num):
        b.at("table", Source(f"blocks.{block}"))
        table = b.op("cast", b.op("arange", start=0, stop=32, step=1, dtype="int64"), dtype="float32")
        w = b.leaf(f"w{block}", "parameter", (32,), "float32", f"blocks.{block}.w", grad=True)
        x = b.op("mul", b.op("add", x, table), w)
    b.at("loss", Source())
    return b.graph([("loss", b.op("sum", x, dims=(0,), keepdim=False))])


@each("run", [w for w in WAYS if w.schedule.num_stages > 1], ids=lambda w: str(WAYS.index(w)))
@roles
def test_stages_of_repeated_blocks_are_those_of_so_many_blocks(role: str, run: Execution) -> None:
    num_chunks = run.schedule.num_stages * run.schedule.chunks_per_stage
    split = [*([4] * (num_chunks - 1)), 5]
    num = sum(split) - 4
    three, many = planned(role, 3), planned(role, num + 2)
    folded = simulated(three, run.having(split=tuple(split)), repeats={"layers.1": num})
    whole = simulated(many, run.having(split=tuple(split)))
    assert folded.step_s == pytest.approx(whole.step_s, rel=0.05)
    for ours, theirs in zip(folded.stages, whole.stages, strict=True):
        assert ours.memory.total_bytes == pytest.approx(theirs.memory.total_bytes, rel=0.1)


@each("late", [False, True])
def test_repeated_blocks_give_back_what_they_take(late: bool) -> None:
    """Also where what comes before them in backward is of another size, and is freed after a block of theirs."""
    run = Execution.of(late_gathers=late, num_microbatches=4)
    where = Cluster.preset("dgx-h100", 1, 4)
    left = defaultdict[str, float](float)
    for place in simulate(program(planned("zero", 3), where, run, {"layers.2": 20})).stages[0].placed:
        for category, num_bytes in place.timeline.net.items():
            left[category] += num_bytes
    assert left == pytest.approx(dict.fromkeys(left, 0.0), abs=1e-6)


@each(
    "run",
    [PLAIN, Execution.of(late_gathers=True), Execution.of(num_stages=2, num_microbatches=4, schedule="zero-bubble")],
    ids=["1f1b", "late", "zero-bubble"],
)
def test_a_whole_gradient_stays_until_it_is_scattered(run: Execution) -> None:
    """Something that is there when a scatter begins is freed when it has ended, not before; also at the very end."""
    (stage, *_) = program(planned("zero", 6), cluster(4 * run.schedule.num_stages), run).stages
    for segment in (part for piece in stage.pieces for part in (piece.backward, piece.weights)):
        for scatter, task in enumerate(segment.tasks):
            if task.name.startswith("gradients of "):
                assert any(b.category == "temporary" and max(b.freed, default=-1) >= scatter for b in segment.buffers
                           if b.taken is not None and b.taken <= scatter)  # fmt: skip


def test_the_cost_of_a_program_does_not_grow_with_repeats() -> None:
    graph = planned("zero", 3)
    few, many = (program(graph, cluster(4), PLAIN, {"layers.1": n}) for n in (3, 10_000))
    assert len(few.stages[0].pieces[0].forward.tasks) == len(many.stages[0].pieces[0].forward.tasks)
    assert simulate(many).step_s > 1000 * simulate(few).step_s


@roles
@each("run", WAYS[-5:], ids=[str(i) for i in range(5)])
def test_blocks_that_differ_in_names_alone_are_measured_once(role: str, run: Execution) -> None:
    """And others are not: blocks that gather their weights for longer, or that are made again."""
    graph = planned(role, 8)
    longer: dict[str, Zero] = {leaf: "zero-1" for leaf in lifetimes(graph) if leaf.endswith("2")}
    again = replace(run, recompute=((blocks_of(graph)[5], "full"),))
    for own, way, most in ((graph, run, 4), (with_lifetimes(graph, longer), run, 5), (graph, again, 5)):
        maker = Programs(own, cluster(4 * run.schedule.num_stages))._makers_of(way)[0]
        found = maker.units(way)
        assert found == tuple(maker._one_more(((number, 1),), way) for number in range(len(maker.cut)))
        assert len({id(unit) for unit in found}) <= most


# ---- ways to run ----


def peak(run: Execution, role: str = "tensor", layers: int = 6, graph: Graph | None = None) -> dict[str, int]:
    return simulated(graph or planned(role, layers), run).fullest.memory.by_category()


def test_full_recomputation_keeps_block_inputs_and_runs_forward_again() -> None:
    graph = planned("tensor", 12)
    plain, full = simulated(graph, PLAIN), simulated(graph, Execution(recompute="full"))
    inputs = (12 + 1 / 4) * 8 * 8 * 64 * 4  # of 12 blocks, [batch, seq, width] in fp32; the loss's is gathered again
    forward = next(p.timeline for p in full.stages[0].placed)
    assert forward.net["activations"] == pytest.approx(inputs, rel=0.02)
    assert full.fullest.memory.total_bytes < plain.fullest.memory.total_bytes
    again = [t for t in program(graph, cluster(4), Execution(recompute="full")).stages[0].pieces[0].backward.tasks
             if t.name.endswith(" again")]  # fmt: skip
    assert full.step_s - plain.step_s == pytest.approx(sum(t.seconds for t in again))
    assert sum(t.seconds > 0 for t in again) == 12 * 3 + 1  # norm, product, relu: what backward reads; and the gather


def with_attention(num_devices: int = 2) -> Graph:
    b = GraphBuilder()
    x = b.leaf("x", "input", (4, 4, 32, 8), "float32", "x")
    for i in range(3):
        w = b.leaf(f"w{i}", "parameter", (8, 8), "float32", f"layers.{i}.w", grad=True)
        b.at("h", Source(f"layers.{i}", "model.py:1"))
        h = b.op("linear", x, w)
        x = b.op("sdpa", h, h, h, causal=True, scale=None)
    graph = b.graph([("loss", b.op("sum", b.op("mul", x, x), dims=(0, 1, 2, 3), keepdim=False))])
    return Planner(cluster(num_devices), every_choice).solve(graph, Mesh.of(x=num_devices), ("data",), "t").graph


def test_selective_recomputation_runs_attention_again_and_keeps_less() -> None:
    graph = with_attention()
    plain, selective = (program(graph, cluster(2), Execution(recompute=r)) for r in ("none", "selective"))
    names = [t.name for t in selective.stages[0].pieces[0].backward.tasks if t.name.endswith(" again")]
    attention = [n.name for n in graph.nodes if n.op == "sdpa"]
    assert names == [f"{name} again" for name in reversed(attention)]
    assert not any(t.name.endswith(" again") for t in plain.stages[0].pieces[0].backward.tasks)
    kept = [simulate(p).stages[0].placed[0].timeline.net["activations"] for p in (plain, selective)]
    again = 3 * 4 * 4 * 32 * (8 + 1) * 4 / 2  # every layer's result, and one number for each of its rows
    assert kept[0] - kept[1] == pytest.approx(again)


def on_gpus(num_devices: int = 4) -> Cluster:
    slow = cluster(num_devices)
    return replace(slow, device=replace(slow.device, kind="cuda", host_bytes_per_s=25e9), backend="nccl")


def test_offloaded_activations_leave_and_come_back_by_the_copy_stream() -> None:
    graph = planned("tensor", 12)
    plain, away = (simulate(program(graph, on_gpus(), Execution.of(offload=o))) for o in ("none", "full"))
    assert away.fullest.memory.activations_bytes < 0.5 * plain.fullest.memory.activations_bytes
    chunk = whole_chunk(Operations(graph, Execution(offload="full")))
    copies = [memory.num_bytes for memory in chunk.allocations if memory.fate is Fate.HOST]
    assert away.stages[0].busy_s[COPY] == pytest.approx(2 * sum(copies) / 25e9 + 2 * len(copies) * COPY_START_S)
    assert away.step_s >= plain.step_s


@roles
def test_mixed_precision_halves_activations_and_keeps_a_master_copy(role: str) -> None:
    plain, mixed = peak(PLAIN, role), peak(Execution("amp_bf16"), role)
    kept = [
        simulated(planned(role, 6), run).stages[0].placed[0].timeline.net["activations"]
        for run in (PLAIN, Execution("amp_bf16"))
    ]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.1)
    if role == "zero":
        assert mixed["parameters"] == plain["parameters"]
        assert mixed["optimizer"] == plain["optimizer"]
    else:
        assert mixed["parameters"] == plain["parameters"] / 2
        assert mixed["optimizer"] == plain["optimizer"] * 12 / 8


def in_dtype(graph: Graph, dtype: str) -> Graph:
    return replace(graph, nodes=tuple(
        replace(n, attrs=tuple((k, dtype if v == "float32" else v) for k, v in n.attrs)) for n in graph.nodes
    ))  # fmt: skip


def test_a_graph_in_16_bits_says_itself_what_stays_wide() -> None:
    """Captured in fp32 and run in bf16, or the other way round, it keeps the same bytes."""
    graph = planned("tensor", 3)
    narrow = in_dtype(graph, "bfloat16")
    assert peak(Execution("amp_bf16"), graph=graph) == peak(Execution("amp_bf16"), graph=narrow)


def test_late_gathers_wait_for_the_backward_of_the_block_before() -> None:
    """The same tasks; but what backward gathers ahead is launched after the block's last kernel, not its first."""
    early, late = (program(planned("zero", 6), cluster(4), Execution.of(late_gathers=on)) for on in (False, True))
    (soon,), (then,) = early.stages[0].pieces, late.stages[0].pieces
    assert soon.forward.tasks == then.forward.tasks
    assert sorted(t.name for t in soon.backward.tasks) == sorted(t.name for t in then.backward.tasks)
    names = [[task.name for task in piece.backward.tasks] for piece in (soon, then)]
    gathered = [name for name in names[0] if name.startswith("gather ")]
    assert len(gathered) > 2
    for block in gathered[2:]:
        assert names[1].index(block) > names[0].index(block)
    alone = Sharing(1.0, 1.0)
    slow, fast = (simulate(made, {"cpu": alone, "cuda": alone}).step_s for made in (late, early))
    assert slow > fast
    free = Execution.of(late_gathers=True, overlap=False), Execution.of(overlap=False)
    assert len({simulated(planned("zero", 6), run).step_s for run in free}) == 1


@each("run", [Execution.of(num_stages=2, num_microbatches=4, schedule=s) for s in ("1f1b", "zero-bubble")])
def test_stages_sum_gradients_at_once_even_where_nothing_overlaps(run: Execution) -> None:
    """A stage sends its gradients of activations before it sums those of its parameters over devices."""
    many, alone = cluster(8), Sharing(1.0, 1.0)
    serial = blocks(batch=8, width=1024, layers=4, seq=8)
    graph = Planner(cluster(4, link_bytes_per_s=1e9), every_choice).solve(serial, Mesh.of(x=4), ("data",), "test").graph

    def timeline(execution: Execution) -> Timeline:
        made = replace(program(graph, many, execution), hops_s=(0.0,))  # a sender that does not overlap is held up
        return simulate(made, {"cpu": alone, "cuda": alone})

    beside, behind = (timeline(run.having(overlap=on)) for on in (True, False))
    assert behind.step_s >= beside.step_s * (1 - 1e-9)
    for with_sums, without in zip(behind.stages, beside.stages, strict=True):
        starts = [[place.start_s for place in stage.placed[:-1]] for stage in (with_sums, without)]
        assert starts[0] == pytest.approx(starts[1])
    assert [s.messages() for s in _backwards(graph, run.having(overlap=False))] == [
        s.messages() for s in _backwards(graph, run)
    ]


def _backwards(graph: Graph, run: Execution) -> list[Segment]:
    stages = program(graph, cluster(8), run).stages
    return [segment for stage in stages for piece in stage.pieces for segment in (piece.backward, piece.weights)]


def test_zero_1_shards_the_optimizer_and_gathers_the_weights_at_the_end() -> None:
    plain, sharded = (Execution.of("amp_bf16", shard_optimizer=s) for s in (False, True))
    assert peak(sharded, "data")["optimizer"] == peak(plain, "data")["optimizer"] / 4
    end = program(planned("data", 6), cluster(4), sharded).stages[0].end
    assert [task.name for task in end.tasks] == ["optimizer", "gather updated weights"]


def test_stages_send_the_residual_stream() -> None:
    graph, many = planned("tensor", 6), cluster(8)
    hops = program(graph, many, Execution.of(num_stages=2, num_microbatches=2)).hops_s
    assert hops == (Communication(many, (8,)).send_s(0, 4, 8 * 8 * 64 * 4),)


@each("run", [w for w in WAYS if w.schedule.num_stages > 1], ids=lambda w: str(WAYS.index(w)))
@roles
def test_stages_of_what_is_cut_into_microbatches_are_those_of_so_many_batches(role: str, run: Execution) -> None:
    """An axis of time says the same as the number of microbatches of the execution; 4 of 8 examples each."""
    serial, many = blocks(batch=32, width=64, layers=6, seq=8), cluster(4 * run.schedule.num_stages)
    whole = Planner(cluster(4), every_choice).solve(serial, Mesh.of(mb=4, x=4), (role,), "test").graph
    found = simulate(program(whole, many, run.having(num_microbatches=1)))
    expected = simulate(program(planned(role, 6), many, run))
    assert found.step_s == pytest.approx(expected.step_s, rel=0.01)
    for ours, theirs in zip(found.stages, expected.stages, strict=True):
        assert ours.bubble_s == pytest.approx(theirs.bubble_s, rel=0.05)
        assert ours.memory.total_bytes == pytest.approx(theirs.memory.total_bytes, rel=0.01)
    hops = (program(graph, many, run).hops_s for graph in (whole, planned(role, 6)))
    assert next(hops) == next(hops)


def two_blocks(kind: str) -> Graph:
    """Two blocks of a product; what the second reads too is named by `kind`.

    tied: the weight of the first; mask, bias: what depends on the batch alone, on a parameter alone; both: on both.
    """
    b = GraphBuilder()
    x = b.leaf("x", "input", (8, 16), "float32", "x")
    weights = [b.leaf(n, "parameter", (16, 16), "float32", f"{n}.w", grad=True) for n in ("layers.0", "layers.1")]
    b.at("h", Source("layers.0"))
    other = b.op("linear", x, weights[0])
    beside = {"mask": b.op("neg", x), "bias": b.op("exp", weights[0]), "both": other}
    y = b.op("add", b.op("relu", other), beside["mask"] if kind == "mask" else other)
    b.at("h", Source("layers.1"))
    y = b.op("linear", b.op("exp", y), weights[0 if kind == "tied" else 1])
    y = b.op("linear", y, beside["bias"]) if kind == "bias" else b.op("add", y, beside.get(kind, y))
    graph = b.graph([("loss", b.op("sum", b.op("mul", y, y), dims=(0, 1), keepdim=False))])
    return Planner(cluster(2), every_choice).solve(graph, Mesh.of(x=2), ("data",), "t").graph


@each(("kind", "sent", "held"), [("none", 1, 1), ("tied", 1, 1), ("mask", 1, 1), ("bias", 1, 2), ("both", 2, 1)])
def test_stages_compute_what_they_read_and_hold_what_they_share(kind: str, sent: int, held: int) -> None:
    """Sent is what depends on the batch and on parameters; all else is computed in each stage that reads it."""
    graph = two_blocks(kind)
    made = program(graph, cluster(4), Execution.of(num_stages=2, num_microbatches=2, split=(2, 1)))
    first, second = made.stages
    ends = (StageMesh(Mesh.of(x=2), first) for first in (0, 2))
    one_s = resharding_s(cluster(4), Tensor((8, 16), (S(0),)), 8 * 16 * 4 / 2, *ends)
    assert made.hops_s == (pytest.approx(sent * one_s),)
    assert [stage.state["parameters"] for stage in (first, second)] == [16 * 16 * 4, held * 16 * 16 * 4]
    summed = [[task.seconds for task in stage.end.tasks if task.stream == STAGES] for stage in (first, second)]
    if kind in ("tied", "bias"):
        gradient_s = Communication(cluster(4), (2, 2)).time_s("all_reduce", 0, 16 * 16 * 4)
        assert summed == [[pytest.approx(gradient_s)]] * 2
    else:
        assert summed == [[], []]
    copied = {"mask": "neg", "bias": "exp"}.get(kind, "")
    copies = [
        sum(graph.by_name[task.name].op == copied for task in stage.pieces[0].forward.tasks)
        for stage in (first, second)
    ]
    assert copies == {"mask": [1, 1], "bias": [0, 2]}.get(kind, [0, 0])


def test_a_stage_holds_once_what_several_of_its_chunks_share() -> None:
    """Chunks 0 and 2 of the first stage read the weight of the first block."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (8, 16), "float32", "x")
    weights = [b.leaf(f"w{i}", "parameter", (16, 16), "float32", f"layers.{i}.w", grad=True) for i in range(4)]
    for block in range(4):
        b.at("h", Source(f"layers.{block}"))
        x = b.op("relu", b.op("linear", x, weights[0 if block == 2 else block]))
    loss = b.op("sum", b.op("mul", x, x), dims=(0, 1), keepdim=False)
    graph = Planner(cluster(2), every_choice).solve(b.graph([("loss", loss)]), Mesh.of(x=2), ("data",), "t").graph
    run = Execution.of(num_stages=2, num_microbatches=2, chunks_per_stage=2, schedule="interleaved", split=(2, 1, 1, 1))
    stages = program(graph, cluster(4), run).stages
    assert [stage.state["parameters"] for stage in stages] == [16 * 16 * 4, 2 * 16 * 16 * 4]
    assert not any(task.stream == STAGES for stage in stages for task in stage.end.tasks)


SLOW_NETWORK = Cluster("slow", Cluster.preset("dgx-h100").device, (
    Level("nvlink", 8, 3.6e11, 1.25e-6, "nvlink"), Level("network", 4, 1e7, 3.35e-6),
), "nccl", "test")  # fmt: skip
HOPS = [
    (SLOW_NETWORK, 8),
    (Cluster.preset("dgx-h100", nodes=4), 8),
    (Cluster.preset("superpod-h100", nodes=64), 8),
    (Cluster.preset("l40s-box", nodes=4), 4),
    (cluster(32), 4),
]


@each(("machine", "num_ranks"), HOPS, ids=lambda x: getattr(x, "name", x))
@each("chunks", [1, 3])
@roles
def test_hops_are_reshardings(role: str, chunks: int, machine: Cluster, num_ranks: int) -> None:
    """The residual stream [8, 8, 64] in fp32: sharded by its batch, or replicated over tensor parallel ranks."""
    graph, num_stages = planned(role, 12, num_ranks), 4
    run = Execution.of(
        num_stages=num_stages, num_microbatches=4, chunks_per_stage=chunks,
        schedule="1f1b" if chunks == 1 else "interleaved",
    )  # fmt: skip
    layout = (R,) if role == "tensor" else (S(0),)
    links = Communication(machine, (machine.num_devices,))
    hops = program(graph, machine, run).hops_s
    assert len(hops) == num_stages * chunks - 1
    for number, hop_s in enumerate(hops):
        own = 8 * 8 * 64 * 4 / (num_ranks if layout[0].is_shard else 1)
        firsts = ((number + i) % num_stages * num_ranks for i in (0, 1))
        source, target = (StageMesh(Mesh.of(x=num_ranks), first) for first in firsts)
        assert hop_s == pytest.approx(resharding_s(machine, Tensor((8, 8, 64), layout), own, source, target))
        assert hop_s >= links.send_s(source.first_rank, target.first_rank, own) * (1 - 1e-12)


@each(("layout", "way", "share"), [(R, R, 1), (S(0), S(0), 8), (C, P, 1), (P, P, 1)], ids=str)
def test_the_slower_way_of_a_value_and_its_gradient_counts(layout: Layout, way: Layout, share: int) -> None:
    value = TensorType((64, 1024), "float32", (layout,), grad=True)
    graph = SimpleNamespace(mesh=Mesh.of(x=8), types={"v": value})
    steps: Any = SimpleNamespace(graph=graph, num_bytes={"v": 1e8 / share})
    there, back = (StageMesh(Mesh.of(x=8), first) for first in (0, 8))
    expected = resharding_s(SLOW_NETWORK, Tensor((64, 1024), (way,)), 1e8 / share, there, back)
    assert crossing_s(["v"], (0, 1), [steps] * 2, SLOW_NETWORK) == pytest.approx(expected)


def test_stages_on_equal_parts_of_a_mixed_cluster_are_built_once() -> None:
    mixed = Cluster.mixed([("dgx-h100", 4), ("dgx-a100", 4)])
    run = Execution.of(num_stages=8, num_microbatches=8)
    made = program(planned("tensor", 3, 8), mixed, run.having(split=(3, 2, 2, 2, 2, 2, 2, 3)), {"layers.1": 14})
    pieces = [stage.pieces[0] for stage in made.stages]
    assert pieces[1] is pieces[2] is pieces[3]
    assert pieces[4] is pieces[5] is pieces[6] is not pieces[3]


def test_a_slow_stage_leaves_bubbles_to_the_fast_one() -> None:
    slow = cluster(4)
    fast = replace(slow, device=replace(slow.device, name="fast", flops_per_s={"fp32": 1e13}, op_overhead_s=1e-8))
    mixed = Cluster.join([slow, fast], Level("net", 2, 1e9, 1e-6))
    run = Execution.of(num_stages=2, num_microbatches=8)
    first, second = simulate(program(planned("tensor", 6), mixed, run.having(split=(4, 4)))).stages
    assert second.compute_s < 0.8 * first.compute_s
    assert second.bubble_s > first.bubble_s


def test_uneven_stages_are_balanced() -> None:
    """The last one has the loss, and so fewer blocks; every other split is slower."""
    graph, run = planned("tensor", 6), Execution.of(num_stages=2, num_microbatches=8)
    best = simulated(graph, run).busiest.at_work_s
    for first in range(1, 8):
        assert best <= simulated(graph, run.having(split=(first, 8 - first))).busiest.at_work_s * (1 + 1e-3)


def test_stages_of_unlike_sizes_are_as_quick_and_as_full_as_their_own_meshes() -> None:
    """The larger one has more blocks, also as the second; what a stage keeps and sends is that of its own mesh."""
    graph, run = planned("data", 6), Execution.of(num_stages=2, num_microbatches=8)
    equal = program(graph, cluster(8), run)
    first, second = (program(graph, cluster(5), run.having(stage_sizes=sizes)) for sizes in ((4, 1), (1, 4)))
    assert first.execution.schedule.split[0] > equal.execution.schedule.split[0] > second.execution.schedule.split[0]
    split = (4, 4)
    alone, whole, small = (
        simulate(program(graph, cluster(8), run.having(split=split, stage_sizes=sizes)))
        for sizes in ((), (4, 1), (1, 4))
    )
    assert whole.stages[0].memory == alone.stages[0].memory
    assert small.stages[1].memory == alone.stages[1].memory
    for number, found in ((1, whole), (0, small)):
        assert found.stages[number].compute_s > 2 * alone.stages[number].compute_s
        assert found.step_s > alone.step_s
    only = Programs(replace(graph, mesh=Mesh.of(x=1)), cluster(2)).program(run.having(split=split))
    assert simulate(only).stages[1].memory == whole.stages[1].memory


def test_allocators_hold_more_than_is_used_on_gpus() -> None:
    memory = simulate(program(planned("tensor", 3), on_gpus())).fullest.memory
    used = memory.total_bytes - memory.slack_bytes - memory.communication_bytes
    assert memory.slack_bytes == pytest.approx(SLACK["cuda"] * used, abs=1)
    assert peak(PLAIN)["slack"] == 0


# ---- what is refused ----


@each(
    ("run", "options", "message"),
    [
        (Execution.of(num_stages=3), {}, "3 stages of mesh [x=4] need 12 devices, cluster 'test' has 8; ch"),
        (Execution.of(num_stages=3, stage_sizes=(4, 4, 2)), {},
         "stages of meshes [x=4], [x=4] and [x=2] need 10 devices"),
        (Execution.of(num_stages=2, stage_sizes=(4, 3)), {}, "stage_sizes [4, 3]: expected divisors of the 4 devices"),
        (Execution.of(offload="full"), {}, "offload: device 'test' has no host_bytes_per_s, the rate"),
        (PLAIN, {"repeats": {"layers.7": 2}}, "repeats: 'layers.7': no operator lies in it; name one of the"),
        (PLAIN, {"repeats": {"layers.1": 0}}, "repeats.'layers.1': expected a positive integer, got 0; it is how"),
        (Execution.of(num_stages=2, split=(1, 1)), {},
         "split: expected 2 positive numbers that add up to 5, got [1, 1"),
        (Execution.of(num_stages=2, chunks_per_stage=3, num_microbatches=2, schedule="interleaved"), {},
         "6 virtual stages, but the model has only 5 sections to put on them; choose fewer stages or chunks"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(run: Execution, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardwrightError) as error:
        program(planned("tensor", 3), cluster(8), run, **options)
    assert str(error.value).startswith(message)


def test_blocks_that_are_interleaved_cannot_repeat() -> None:
    graph = planned("tensor", 3)
    moved = {"layers.2.mlp": "layers.0.mlp"}
    nodes = tuple(
        replace(n, source=Source(moved.get(n.source.module, n.source.module), n.source.line)) for n in graph.nodes
    )
    with pytest.raises(PlanError, match=r"repeats: 'layers.0': its operators lie between those of another"):
        program(replace(graph, nodes=nodes), cluster(4), PLAIN, {"layers.0": 2, "layers.1": 2})


@each("run", WAYS[:9], ids=lambda w: str(WAYS.index(w)))
def test_programs_that_share_pieces_are_those_made_alone(run: Execution) -> None:
    shared = Programs(planned("zero", 6), cluster(8))
    for schedule in ("1f1b", "gpipe", "zero-bubble"):
        for num_microbatches in (1, 2, 5):
            own = run.having(schedule=schedule, num_microbatches=num_microbatches)
            alone = simulate(program(shared.graph, shared.cluster, own))
            found = simulate(shared.program(own))
            assert found.step_s == alone.step_s
            assert [s.memory for s in found.stages] == [s.memory for s in alone.stages]


@each("precision", [None, "amp_bf16", "fp8"])
@each("stages", [1, 2])
def test_programs_of_what_is_made_again_are_those_made_alone(precision: Precision | None, stages: int) -> None:
    """Stages that make the same again are one piece, whatever others do; all else is as if there were no other."""
    graph, gpus = planned("zero", 6), Cluster.preset("dgx-h100", 1)
    shared, run = Programs(graph, gpus), Execution.of(precision, num_stages=stages, num_microbatches=4)
    front, back, single = {"layers.0-2": "full"}, {"layers.4-5": "full"}, {"layers.*": ["mlp:relu", "*:linear"]}
    made = list[StepProgram]()
    for recompute in ("none", front, "full", back, single, "none"):
        own = replace(run, recompute=recompute)
        alone, found = (details(programs, own) for programs in (Programs(graph, gpus), shared))
        assert found.prediction == alone.prediction
        assert found.costs == alone.costs
        assert [s.memory for s in found.timeline.stages] == [s.memory for s in alone.timeline.stages]
        assert found.program.messages() == alone.program.messages()
        made.append(found.program)
    first, *_, last = made
    assert first.stages[0].pieces == last.stages[0].pieces
    if stages > 1 and precision != "fp8":
        plain, early, _, late, *_ = (program.stages for program in made)
        assert plain[1].pieces == early[1].pieces != late[1].pieces
        assert plain[0].pieces == late[0].pieces != early[0].pieces


def test_the_first_stage_has_a_backward_of_one_part_and_others_pay_for_two() -> None:
    graph, run = planned("data", 6), Execution.of(num_stages=2, num_microbatches=4, schedule="zero-bubble")
    free = cluster(8)
    dear = replace(free, device=replace(free.device, put_off_s=1e-3))
    (first, last), paid = program(graph, free, run).stages, program(graph, dear, run).stages
    assert not first.pieces[0].weights.tasks
    whole = program(graph, free, run.having(schedule="1f1b")).stages[0].pieces[0]
    assert first.pieces[0].backward.tasks == whole.backward.tasks == paid[0].pieces[0].backward.tasks
    products = [task.name for task in last.pieces[0].weights.tasks if task.name.endswith(" weights")]
    for way in ("backward", "weights"):
        before, after = (getattr(stage.pieces[0], way).tasks for stage in (last, paid[1]))
        longer_s = sum(task.seconds for task in after) - sum(task.seconds for task in before)
        assert longer_s == pytest.approx(len(products) * 0.5e-3)
    assert len(products) >= 2
