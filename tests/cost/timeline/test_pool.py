"""The pool of gathered weights: that of the lowering after a real step, to the byte; and there all the time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.plans import CERTIFIED
from shardwright.cost.clusters.local import default_cluster
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.segments import StepProgram
from shardwright.cost.timeline.timeline import simulate
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.buckets import PLACED_BYTES
from shardwright.pcg.step.execution import Execution
from shardwright.search.request.restrict import DATA, TENSOR, ZERO
from shardwright.search.tree.planner import Planner
from tests.cost.programs import planned
from tests.each import some
from tests.lowering.runs import entry_of, of_zoo
from tests.models import zoo
from tests.search.graphs import cluster


def really_pooled_bytes(module: ParallelModule) -> int:
    sets = [memory for free in entry_of(module).runner.blocks.pool.free.values() for memory in free]
    return sum(t.untyped_storage().nbytes() for m in sets for t in (m.send, m.receive, *m.buffers))


@pytest.mark.parametrize("name", zoo(*some(["gpt", "bert", "dlrm", "t5", "resnext", "mlp"], 2)))
def test_a_step_leaves_as_many_buffers_as_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both with slices that count as large and without."""
    case = of_zoo(name)
    plan = Planner(default_cluster(2), CERTIFIED).plan(case.captured.graph, name, mesh=Mesh.of(x=2), roles=(ZERO,))

    def rank() -> list[int]:
        module = case.lower(plan.graph)
        found = []
        for _ in range(2):
            module.forward_backward(**case.batch)
            found.append(really_pooled_bytes(module))
        return found

    for large_bytes in (PLACED_BYTES, 1 << 10):
        monkeypatch.setattr("shardwright.lowering.runtime.buffers.PLACED_BYTES", large_bytes)
        monkeypatch.setattr("shardwright.cost.timeline.pool.PLACED_BYTES", large_bytes)
        predicted = program(plan.graph, default_cluster(2)).stages[0].state["gathered"]
        assert run_ranks(rank, 2, 60) == [[predicted, predicted]] * 2


def gathered(made: StepProgram) -> float:
    return made.stages[0].state.get("gathered", 0.0)


@pytest.mark.parametrize("run", [Execution(), Execution.of(num_microbatches=3), Execution(recompute="full")])
def test_the_pool_counts_in_every_moment(run: Execution) -> None:
    made = program(planned("zero", 6), cluster(4), run)
    assert gathered(made) > 0
    memory = simulate(made).fullest.memory
    assert memory.gathered_bytes == round(gathered(made))
    assert memory.total_bytes >= sum(made.stages[0].state.values())


def test_gloo_gathers_by_way_of_memory_of_its_own() -> None:
    slow = cluster(4)
    fast = replace(slow, device=replace(slow.device, kind="cuda"), backend="nccl")
    staged = [
        {b.category for b in program(planned("zero", 3), c).stages[0].pieces[0].forward.buffers} for c in (slow, fast)
    ]
    assert [("communication" in categories) for categories in staged] == [True, False]


def test_equal_blocks_share_their_sets() -> None:
    graphs = [planned("zero", layers) for layers in (3, 6, 12)]
    assert len({gathered(program(graph, cluster(4))) for graph in graphs}) == 1


def test_chunks_of_one_stage_share_their_sets() -> None:
    """Two stages of one chunk have what two stages of two chunks have, but for what lies in the chunks' ends."""
    graph = planned("zero", 12)
    one = Execution.of(num_stages=2, num_microbatches=4)
    two = one.having(schedule="interleaved", chunks_per_stage=2)
    plain, interleaved = (program(graph, cluster(8), run) for run in (one, two))
    for ours, theirs in zip(plain.stages, interleaved.stages, strict=True):
        assert ours.state["gathered"] <= theirs.state["gathered"] * (1 + 1e-9) <= 2 * ours.state["gathered"]


@pytest.mark.parametrize("role", [DATA, TENSOR])
def test_what_is_stored_whole_needs_no_pool(role: str) -> None:
    assert gathered(program(planned(role, 3), cluster(4))) == 0
