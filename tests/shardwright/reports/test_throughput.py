"""Steps in the field's words, and plans by hand as settings of other tools."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import shardwright as sw
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.recompute import OFFLOAD, RECOMPUTE
from shardwright.reports.byhand import ByHandReport
from shardwright.reports.comparison import ComparisonReport
from shardwright.reports.facts import PlanFacts
from shardwright.reports.plan import PlanReport
from shardwright.reports.running import away, running_data, text_of, way
from shardwright.reports.throughput import model_work, throughput
from shardwright.search.plan import Plan
from shardwright.search.request.spaces import sequence_length
from tests.search.graphs import blocks, mixed, mixture, mlp, planner


class Parts(nn.Module):
    """Products with one trained operand and with two, a convolution, products of batches, frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.conv = nn.Linear(8, 16), nn.Linear(16, 16), nn.Conv1d(4, 6, 3, padding=1)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(F.relu(self.first(x)))
        y = self.conv(y)
        return (y @ y.transpose(1, 2)).square().sum()


def test_model_flops_are_those_that_torch_counts() -> None:
    model, x = Parts(), torch.randn(3, 4, 8)
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    assert model_work(capture(model, {"x": x}).graph).flops == counter.get_total_flops()


def test_attention_counts_all_keys_and_two_passes_back() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x * self.w
            return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()

    work = model_work(capture(Attention(), {"x": torch.randn(2, 3, 8, 8)}).graph)
    assert work.flops == 3 * (2 * 2 * 2 * 3 * 8 * 8 * 8)


def test_a_step_in_the_fields_words() -> None:
    plan = planner(4).plan(blocks(batch=8, seq=4), "Net")
    own, step_s = throughput(plan), plan.prediction.step_s
    linear = 3 * 2 * 2 * (8 * 4) * 16 * 64  # three layers, up and down
    assert model_work(plan.graph).flops == 3 * linear
    assert own.utilization == pytest.approx(3 * linear / (step_s * 4 * 1e11))
    assert own.tokens_per_s == pytest.approx(8 * 4 / step_s / 4)
    assert own.days == pytest.approx(1e12 / 32 * step_s / 86400)
    text = str(PlanReport(plan))
    assert f"throughput      {own.line}" in text
    assert f" MFU (of {own.peak_flops_per_s / 1e12:.3g} TFLOP/s in float32), " in own.line
    assert own.line.endswith(" days for 10¹² tokens")
    slower = throughput(plan, replace(plan.prediction, step_s=2 * step_s))
    assert slower.utilization == pytest.approx((own.utilization or 0) / 2)
    assert json.loads(json.dumps(PlanReport(plan).data()))["throughput"]["days"] == own.days
    table = next(p for p in ComparisonReport({"a": plan}).paragraphs() if ">MFU" in p.columns)
    assert all(row[table.columns.index(">MFU")].endswith("%") for row in table.rows)


def test_a_model_without_tokens_has_examples() -> None:
    own = throughput(planner(2).plan(mlp(batch=8), "Net"))
    assert (own.tokens_per_s, own.days) == (None, None)
    assert own.line.split(" ")[1] == "examples/s/device,"


def test_classes_of_pixels_are_no_tokens() -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 1)
            self.register_buffer("rates", torch.rand(5))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.conv(x), y, weight=self.get_buffer("rates"))

    batch = {"x": torch.randn(4, 3, 8, 8), "y": torch.randint(5, (4, 8, 8))}
    graph = capture(Segments(), batch).graph
    work = model_work(graph)
    assert (work.num_tokens, work.num_examples, sequence_length(graph)) == (None, 4, None)


def test_devices_of_two_kinds_have_their_mean_as_the_peak() -> None:
    cluster = mixed(times=3.0)
    plan = sw.plan(Parts(), cluster, kwargs={"x": torch.randn(4, 4, 8)})
    assert throughput(plan).peak_flops_per_s == pytest.approx(2e11)


def by_hand(plan: Plan) -> dict[str, str]:
    """Its paragraphs by title."""
    return {p.title.partition(":")[0]: "\n".join(p.lines) for p in ByHandReport(plan).paragraphs()}


def only(plan: Plan, name: str, **fields: object) -> Plan:
    """The plan beside this one alone."""
    own = next(a for a in plan.alternatives if a.name.startswith(name))
    return replace(plan, alternatives=(replace(own, **fields),))


def test_plans_by_hand_as_settings() -> None:
    plan = planner(4).plan(blocks(batch=8, seq=4), "Net")
    zero = by_hand(only(plan, "ZeRO-3", mesh=Mesh.of(mb=2, dp=4)))
    assert zero["Best plan by hand"] == "blocks stands for the model's repeated layers"
    assert "mesh = init_device_mesh(\"cuda\", (4,), mesh_dim_names=('shard',))" in zero["In FSDP2"]
    assert "fully_shard(block, mesh=mesh['shard'], reshard_after_forward=True)" in zero["In FSDP2"]
    assert "# a step: 2 × a batch of 1 in each group" in zero["In FSDP2"]
    settings = (
        "global_batch_size = 8", "local_batch_size = 1", "seq_len = 4", "data_parallel_shard_degree = 4",
        'fsdp_reshard_after_forward = "always"', "tensor_parallel_degree = 1", 'mode = "none"',
    )  # fmt: skip
    assert all(setting in zero["In torchtitan"] for setting in settings)
    data = by_hand(only(plan, "data parallel"))
    assert "DistributedDataParallel(model)" in data["In FSDP2"]
    assert "data_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1" in data["In torchtitan"]
    again = Execution(recompute=(("layers.*", ("mlp",)),), precision="amp_bf16")
    tensor = by_hand(
        only(plan, "data 2 x tensor 2", execution=again, lifetimes=("zero-1",), mesh=Mesh.of(mb=2, dp=2, tp=2))
    )
    assert "chosen value by value here; memory_budget is torchtitan's nearest mode" in tensor["Best plan by hand"]
    assert "# make values again by a policy: torch.utils.checkpoint.create_selective" in tensor["In FSDP2"]
    assert "checkpoint(block" not in tensor["In FSDP2"]
    assert "set_requires_gradient_sync(False)" in tensor["Best plan by hand"]
    assert "mesh_dim_names=('shard', 'tp')" in tensor["In FSDP2"]
    assert (
        "reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16" in tensor["In FSDP2"]
    )
    assert "tensor_parallel_degree = 2" in tensor["In torchtitan"]
    assert 'mode = "memory_budget"' in tensor["In torchtitan"]
    by_block = Execution(recompute=(("layers.0", "full"), ("*", "none")))
    some = by_hand(only(plan, "ZeRO-3", execution=by_block, mesh=Mesh.of(dp=4)))
    assert "chosen block by block here; selective is torchtitan's nearest mode" in some["Best plan by hand"]
    assert "for block in some_blocks:\n    checkpoint(block)" in some["In FSDP2"]
    assert 'mode = "selective"' in some["In torchtitan"]
    staged = Execution.of(num_stages=2, num_microbatches=4, schedule="1f1b", recompute="full")
    pipeline = by_hand(only(plan, "ZeRO-3", execution=staged, lifetimes=("zero-1",), mesh=Mesh.of(mb=4, dp=2)))
    assert "FSDP2 has no pipeline stages; torchtitan has" in pipeline["Best plan by hand"]
    assert 'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "1F1B"' in pipeline["In torchtitan"]
    assert "checkpoint(block)" in pipeline["In FSDP2"]
    with pytest.raises(PlanError, match="none of the plans by hand that this plan was compared with fits; `compare`"):
        ByHandReport(replace(plan, alternatives=()))


def test_what_is_made_again_is_printed_whole_and_taken_back() -> None:
    plan = planner(2).plan(blocks(), "Net", recompute={"layers.0": ["mlp", "norm"], "layers.*": "none"})
    text = text_of(plan, RECOMPUTE)
    assert json.loads(text)["layers.0"] == ["mlp", "norm"]
    assert Execution(recompute=json.loads(text)).recompute == plan.execution.recompute
    assert text_of(planner(2).plan(mixture(), "Net", recompute="none"), RECOMPUTE) == '"none"'


def test_what_waits_on_the_host_is_said_with_its_copies_and_taken_back(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="offload: device 'test' has no host_bytes_per_s, the rate of a link"):
        planner(2).plan(blocks(), "Net", offload="full")
    asked: Any = {"layers.0": ["mlp"], "layers.*": "none"}
    plan = planner(2, host_bytes_per_s=1e9).plan(blocks(), "Net", mesh={"x": 2}, recompute="none", offload=asked)
    plan.save(path := tmp_path / "plan.json")
    assert Plan.load(path).execution.offload == plan.execution.offload == (("layers.0", ("mlp",)), ("layers.*", "none"))
    assert Execution(offload=json.loads(text_of(plan, OFFLOAD))).offload == plan.execution.offload
    (row,) = (facts := PlanFacts(plan)).on_host
    assert (row.blocks, {place.partition(":")[0] for place in row.places}) == ("layers.0", {"mlp"})
    assert row.copies_s == pytest.approx(2 * (row.num_bytes / 1e9 + row.num_values * 1e-5))
    assert "waits on the host: values in mlp of layers.0 (" in way(facts)
    (paragraph,) = away(facts)
    assert paragraph.rows[0][:3] == ("layers.0", "mlp", str(row.num_values))
    assert running_data(facts)["on_host"][0]["text"] == "mlp"
    assert not PlanFacts(planner(2).plan(blocks(), "Net", mesh={"x": 2})).on_host
