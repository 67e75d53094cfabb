"""Published runs as plans, and constants fitted to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.fitting import Constants, fit, fit_each, predicted, timeline
from bench.published import Run, fitted, llm_foundry, megatron_bridge
from bench.published_plans import Planned, cluster, execution, mesh_and_roles, planned
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.verifier.choices import Certified

SMALL = Run("llm-foundry", "125m", "a100-80", 8, 512, 8, 1, "amp_bf16", False, "FULL_SHARD", (1e5,))
RUNS = (
    SMALL,
    replace(SMALL, seq=4096, microbatch=2, recompute=True),
    replace(SMALL, model="350m", seq=2048, microbatch=4, num_microbatches=2),
)


@pytest.fixture(scope="module")
def plans() -> list[Planned]:
    certified = Certified()
    return [planned(run, certified) for run in RUNS]


def test_meshes_and_roles_of_every_published_run() -> None:
    """One stage's mesh, tensor parallelism innermost, within whole machines."""
    for run in [*llm_foundry(), *megatron_bridge()[0]]:
        mesh, roles = mesh_and_roles(run)
        assert mesh.num_devices * run.stages == run.num_gpus
        assert cluster(run.gpu, run.num_gpus).num_devices == run.num_gpus
        assert len(roles) == len(mesh)
    (wide,) = (r for r in megatron_bridge()[0] if r.model == "llama3-405b" and r.num_microbatches == 64)
    assert mesh_and_roles(wide) == (Mesh.of(dp=8, cp=2, tp=8), ("data", "context", "tensor"))
    assert execution(wide) == Execution.of(
        precision="fp8", compiled=True, num_microbatches=64, num_stages=8, chunks_per_stage=8, schedule="interleaved",
        shard_optimizer=True,
    )  # fmt: skip


def test_a_plan_is_zero_3_with_the_batch_split(plans: list[Planned]) -> None:
    graph = plans[0].graph
    assert graph.mesh == Mesh.of(dp=8)
    large = [p for p in graph.leaves("parameter") if graph.types[p.name].num_elements > 8]
    assert all(graph.types[p.name].layouts[0].is_shard for p in large)
    (attention,) = (n for n in graph.nodes if n.op == "sdpa")
    assert attention.split == ("b0",)
    assert plans[0].repeats == {"blocks.0": 12}


def test_faster_rates_make_shorter_steps(plans: list[Planned]) -> None:
    slow = Constants(0.5, 0.5, 0.5, 0.5)
    base = timeline(plans[1], slow).step_s
    for name in ("matmul", "attention", "memory", "beside"):
        assert timeline(plans[1], replace(slow, **{name: 0.9})).step_s < base


def test_a_fit_recovers_what_made_the_times(plans: list[Planned]) -> None:
    """Times made with known rates are predicted well again, though the rates trade off and priors draw them away."""
    made = replace(Constants.known("a100-80"), matmul=0.75, memory=0.72)
    times = [timeline(p, made).step_s for p in plans]
    runs = [replace(p.run, published=(p.run.tokens_per_step / t / 8,)) for p, t in zip(plans, times, strict=True)]
    given = [replace(p, run=run) for p, run in zip(plans, runs, strict=True)]
    found = fit(given)
    assert found == fit(given)
    assert [row.error for row in predicted(given, {"a100-80": found})] == pytest.approx([0, 0, 0], abs=0.02)


def test_every_gpu_type_needs_a_fitted_row(plans: list[Planned]) -> None:
    with pytest.raises(ValueError, match="fit_each: no row of a100-80 is fitted; choose another offset"):
        fit_each(plans, frozenset())


def test_predictions_say_what_was_fitted(plans: list[Planned]) -> None:
    names = fitted(RUNS, 1)
    rows = predicted(plans, names=names)
    assert [row.fitted for row in rows] == [run.name in names for run in RUNS]
    assert sum(row.fitted for row in rows) == 1
