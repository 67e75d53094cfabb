"""`plan` and `compile`: what they give, what they refuse, and that all ranks agree."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shardwright as sw
from shardwright.api import compile, plan
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.trial.dryrun import dry_run
from shardwright.pcg.errors import BatchError, CaptureError, ClusterError, DistributedError, PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.optable import ROWS
from shardwright.pcg.step.precisions import shown
from shardwright.reports.plan import PlanReport
from shardwright.search.plan import Plan
from shardwright.substitutions.rules.pattern import Pattern
from shardwright.substitutions.rules.rowrules import choices, derive
from tests.each import each
from tests.shardwright.command import Run

Batch = Mapping[str, Tensor]


class Tied(nn.Module):
    """A token model with dropout whose head is its embedding; a buffer counts the calls."""

    calls: Tensor

    def __init__(self, vocab: int = 16, hidden: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, hidden)
        self.up = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.calls.add_(1)
        hidden = F.dropout(torch.tanh(self.up(self.table(ids))), 0.2, self.training)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def example(seed: int = 0, batch: int = 4, seq: int = 6) -> tuple[Tied, dict[str, Tensor]]:
    torch.manual_seed(seed)
    ids = torch.randint(16, (batch, seq))
    return Tied(), {"ids": ids, "labels": ids.clone()}


def forced(num_devices: int = 2, role: str = "zero") -> dict[str, Any]:
    """A layout that the search would not take for a model this small."""
    return {"mesh": {"dp": num_devices}, "roles": [role]}


# ---- plan ----


def test_public_names_are_these() -> None:
    assert sw.plan is plan
    assert sw.compile is compile


def test_a_plan_names_the_model_and_can_be_forced() -> None:
    model, batch = example()
    lines: list[str] = []
    made = plan(
        model, sw.Cluster.local(4), kwargs=batch, mesh={"a": 2, "b": 2}, roles={"b": "tensor"}, progress=lines.append
    )
    assert made.model == "Tied"
    assert made.mesh == Mesh.of(a=2, b=2)
    assert lines[0] == "capturing Tied"
    assert any("data parallel" in line for line in lines)
    in_text = plan(model, sw.Cluster.local(4), kwargs=batch, mesh={"a": 2, "b": 2}, roles="free, tensor")
    assert in_text.asked.roles == ("free", "tensor")


def test_positional_inputs_are_the_same() -> None:
    model, batch = example()
    cluster = sw.Cluster.local(2)
    assert plan(model, cluster, tuple(batch.values())).fingerprint == plan(model, cluster, kwargs=batch).fingerprint


def test_fake_models_are_planned_without_memory() -> None:
    with FakeTensorMode():
        model = Tied(vocab=1 << 20, hidden=1 << 12)
        ids = torch.randint(16, (8, 16))
    made = plan(model, sw.Cluster.preset("dgx-h100"), kwargs={"ids": ids, "labels": ids})
    assert made.graph.mesh.num_devices == 8


@each(
    ("options", "message"),
    [
        ({"roles": ["data"]}, r"roles=\['data'\] without a mesh; say which axes"),
        ({"mesh": {"dp": 2}, "roles": {"tp": "data"}}, r"axis 'tp' is not in the mesh \[dp=2\]; choose among \['dp'\]"),
        ({"mesh": {"dp": 2}, "roles": ["fast"]}, "unknown axis role 'fast'; choose one of"),
        ({"mesh": {"dp": 2}, "roles": ["data", "zero"]}, "2 axis roles for mesh"),
        ({"mesh": [2]}, r"mesh=\[2\]: expected the size of each axis by its name; give e.g. mesh=\{'dp': 2, 'tp': 4\}"),
        ({"mesh": "dp=2"}, "mesh='dp=2': expected the size of each axis by its name"),
        ({"mesh": {2: 1}}, r"mesh=\{2: 1\}: expected the size of each axis by its name"),
        ({"mesh": {"dp": 3}}, r"mesh \[dp=3\] has 3 devices, cluster local-2 has 2"),
    ],
)
def test_meshes_and_roles_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    model, batch = example()
    with pytest.raises(PlanError, match=message):
        plan(model, sw.Cluster.local(2), kwargs=batch, **options)


def test_ranks_that_a_plan_leaves_idle_are_told_how_many_to_start() -> None:
    """Every rank raises, so that none waits; with a plan, as many as it uses run on the cluster that it was for."""
    model, batch = example()
    found = plan(model, sw.Cluster.local(2), kwargs=batch, mesh={"x": 1})
    assert "not all used    1 of 2 devices idle: a mesh of 1 was asked for" in str(PlanReport(found))
    whole = sw.Cluster.local(2)
    assert run_ranks(lambda: bool(compile(model, whole, plan=found, kwargs=batch)(**batch) > 0), 1) == [True]
    for error in run_ranks(_idle, 2):
        assert error.startswith("the plan is for 1 ranks and leaves 1 of 2 devices idle: a mesh of 1 was asked for, ")
        assert error.endswith("`shardwright run --cluster local:1`, or use all with a mesh of 2, such as mesh={'x': 2}")
    with pytest.raises(PlanError, match=r"the plan is for 1 devices .*, the cluster local-3 has 3; plan for this"):
        compile(model, sw.Cluster.local(3), plan=found, kwargs=batch)


def _idle() -> str:
    model, batch = example()
    with pytest.raises(DistributedError) as caught:
        compile(model, sw.Cluster.local(2), kwargs=batch, mesh={"x": 1})
    return str(caught.value)


def test_a_plan_is_for_a_precision() -> None:
    model, batch = example()
    found = plan(model, sw.Cluster.local(2), kwargs=batch, precision="amp_bf16", **forced())
    assert found.precision == "amp_bf16"
    assert {"bfloat16", "float32"} <= {t.dtype for t in found.graph.types.values()}
    text = str(PlanReport(found))
    assert "precision       amp_bf16: " in text
    assert "rounded to bfloat16: what products read and give; kept in float32: weights" in text
    with pytest.raises(PlanError, match="precision='amp_fp16' was given with a plan for 'amp_bf16'; leave it out"):
        compile(model, plan=found, precision="amp_fp16", kwargs=batch)
    with pytest.raises(PlanError, match="precision 'bf16': expected parameters in bfloat16, got float32; build the"):
        plan(model, sw.Cluster.local(2), kwargs=batch, precision="bf16")


def test_a_plan_is_for_precisions_by_module() -> None:
    """It keeps them, runs for them only, and of several the search chooses."""
    model, batch = example()
    policy: dict[str, Any] = {"head": "fp32", "*": "amp_bf16"}
    found = plan(model, sw.Cluster.local(2), kwargs=batch, precision=policy, **forced())
    loaded = Plan.from_json(json.loads(json.dumps(found.to_json())))
    assert (loaded, loaded.precision) == (found, policy)
    linears = {str(n.source.module): found.graph.types[n.name].dtype for n in found.graph.nodes if n.op == "linear"}
    assert linears == {"up": "bfloat16", "head": "float32"}
    assert "precision       amp_bf16, with head in fp32: " in str(PlanReport(found))
    assert dry_run(found.graph, execution=found.execution).misshapen == ()
    for other in ("amp_bf16", {"up": "fp32", "*": "amp_bf16"}):
        with pytest.raises(PlanError, match=r"was given with a plan for \{'head': 'fp32', .*\}; leave it out"):
            compile(model, plan=found, precision=other, kwargs=batch)  # pyright: ignore[reportArgumentType]
    assert (
        run_ranks(lambda: bool(compile(model, plan=found, kwargs=batch, precision=policy)(**batch) > 0), 2)
        == [True] * 2
    )
    otherwise = replace(found, execution=replace(found.execution, precision={"up": "fp32", "*": "amp_bf16"}))
    with pytest.raises(DistributedError, match="plan for 'Tied' has fingerprint"):
        run_ranks(lambda: compile(model, plan=otherwise, kwargs=batch), 2)
    several = plan(model, sw.Cluster.local(2), kwargs=batch, precision=[policy, "fp32", dict(policy)], **forced())
    names = ["amp_bf16, with head in fp32", "fp32"]
    others = [name for name in names if any(a.name.endswith(f"[dp=2], {name}") for a in several.alternatives)]
    assert sorted([*others, shown(several.execution.precision)]) == names
    with pytest.raises(PlanError, match=r"precision=\{\} names none; leave it out for the model's own"):
        plan(model, sw.Cluster.local(2), kwargs=batch, precision={})


def test_a_plan_says_what_gradients_are_sent_in() -> None:
    """By torch's dtype or its name, with a precision or without one, for a model in float32; it stays with the plan."""
    model, batch = example()
    known: dict[str, Any] = {"cluster": sw.Cluster.local(2), "kwargs": batch, **forced()}
    own, named = (plan(model, **known, reduce_dtype=d) for d in (None, "bfloat16"))
    found = plan(model, **known, reduce_dtype=torch.bfloat16)
    assert (found.graph, found.prediction) == (named.graph, named.prediction)
    assert (own.execution.reduce_dtype, found.execution.reduce_dtype) == (None, "bfloat16")
    assert found.prediction.communication_bytes < own.prediction.communication_bytes
    assert Plan.from_json(found.to_json()) == found
    assert "as one process rounds; gradients are sent in bfloat16" in str(PlanReport(found))
    with pytest.raises(PlanError, match="plan= was given together with reduce_dtype=, which guide the search"):
        compile(model, plan=found, reduce_dtype=torch.float32, kwargs=batch)
    for wrong in (torch.int32, "int32"):
        with pytest.raises(ClusterError, match="reduce_dtype: expected one of 'float32', 'bfloat16', 'float16', got"):
            plan(model, **known, reduce_dtype=wrong)  # pyright: ignore[reportArgumentType]


def test_16_bit_floats_without_a_gpu() -> None:
    """Training needs GPUs, planning for GPUs does not."""
    model, batch = example()
    with pytest.raises(PlanError, match="'amp_fp16': training in float16 needs a GPU, and this would run on cpu"):
        plan(model, sw.Cluster.local(2), kwargs=batch, precision=("fp32", "amp_fp16"))
    found = plan(model, sw.Cluster.preset("dgx-h100", 1, 2), kwargs=batch, precision="amp_fp16", **forced())
    assert {t.dtype for t in found.graph.types.values()} >= {"float16", "float32"}
    assert dry_run(found.graph, execution=found.execution).misshapen == ()
    for given in ({"plan": found}, {"cluster": sw.Cluster.preset("dgx-h100", 1, 2), "precision": "amp_fp16"}):
        for error in run_ranks(lambda given=given: _refusal(model, given, batch), 2):
            assert error.startswith("precision 'amp_fp16': training in float16 needs a GPU, and this would run on cpu")


def test_fp8_is_planned_and_not_run() -> None:
    model, batch = example()
    cluster = sw.Cluster.preset("dgx-h100", 1, 2)
    assert plan(model, cluster, kwargs=batch, precision="fp8", **forced()).precision == "fp8"
    for error in run_ranks(lambda: _refusal(model, {"cluster": cluster, "precision": ("fp32", "fp8")}, batch), 2):
        assert error == "precision 'fp8': it can be planned and costed, but not run; plan with 'amp_bf16' to train"


def _refusal(model: nn.Module, given: Mapping[str, Any], batch: Batch) -> str:
    """What `compile` says, with a batch and before it has one."""
    with pytest.raises(PlanError) as error:
        compile(model, kwargs=batch, **given)
    with pytest.raises(PlanError, match=re.escape(str(error.value))):
        compile(model, **given)
    return str(error.value)


def test_the_search_chooses_among_precisions() -> None:
    model, batch = example()
    cluster = sw.Cluster.preset("dgx-h100", 1, 4)
    each: dict[str, Plan] = {p: plan(model, cluster, kwargs=batch, precision=p) for p in ("fp32", "amp_bf16")}
    found = plan(model, cluster, kwargs=batch, precision=("fp32", "amp_bf16", "fp32"))
    best = min(each.values(), key=lambda plan: plan.prediction.step_s)
    (other,) = (plan for plan in each.values() if plan is not best)
    assert (found.graph, found.precision) == (best.graph, best.precision)
    added = {a.name: a.prediction for a in found.alternatives if a.name.endswith(str(other.precision))}
    assert added == {f"search on {other.mesh}, {other.precision}": other.prediction}
    assert Plan.from_json(found.to_json()).alternatives == found.alternatives
    with pytest.raises(PlanError, match=r"precision=\(\) names none; leave it out for the model's own"):
        plan(model, cluster, kwargs=batch, precision=())


def test_a_model_without_inputs_is_an_error() -> None:
    with pytest.raises(CaptureError, match="forward cannot take this batch"):
        plan(Tied(), sw.Cluster.local(2))


# ---- compile: errors before anything runs ----


def test_more_devices_than_ranks() -> None:
    model, batch = example()
    with pytest.raises(DistributedError, match=r"for 2 ranks, but 1 is running; .*torchrun --nproc-per-node 2"):
        compile(model, sw.Cluster.local(2), kwargs=batch)


def test_a_plan_leaves_nothing_to_search() -> None:
    model, batch = example()
    made = plan(model, sw.Cluster.local(2), kwargs=batch)
    with pytest.raises(PlanError, match=r"plan= was given together with mesh=, which guide"):
        compile(model, kwargs=batch, plan=made, mesh={"dp": 2})


def test_a_plan_for_another_cluster() -> None:
    model, batch = example()
    made = plan(model, sw.Cluster.local(2), kwargs=batch)
    with pytest.raises(PlanError, match=r"for 2 devices \(local-2\), the cluster local-4 has 4; plan for this cluster"):
        compile(model, sw.Cluster.local(4), kwargs=batch, plan=made)


# ---- compile on ranks ----


def train(build: Callable[[nn.Module, Batch], ParallelModule]) -> tuple[list[float], dict[str, Any]]:
    """Three steps of AdamW, seeded; the losses and the final state."""
    model, batch = example()
    parallel = build(model, batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses: list[float] = []
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        losses.append(parallel.forward_backward(**batch).item())
        optimizer.step()
    state = {k: (v.full_tensor() if isinstance(v, DTensor) else v).detach() for k, v in parallel.state_dict().items()}
    return losses, {
        "state": state,
        "type": type(parallel).__name__,
        "names": [n for n, _ in parallel.named_parameters()],
    }


def single() -> tuple[list[float], dict[str, Tensor]]:
    """The same in a single process; in a fork, because autograd's threads do not survive the later forks."""
    model, batch = example()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def eager(model: nn.Module, batch: Batch) -> ParallelModule:
    return compile(model, sw.Cluster.local(2), kwargs=batch, **forced())


def lazy(model: nn.Module, batch: Batch) -> ParallelModule:
    return compile(model, sw.Cluster.local(2), **forced())


@pytest.mark.parametrize("build", [eager, lazy])
def test_training_equals_the_single_process(build: Callable[[nn.Module, Batch], ParallelModule]) -> None:
    ((losses, state),) = run_ranks(single, 1)
    for found, rest in run_ranks(train, 2, args=(build,)):
        assert found == pytest.approx(losses, rel=1e-5)
        assert rest["type"] == "ParallelModule"
        assert rest["names"] == ["table.weight", "up.weight", "up.bias"]
        assert rest["state"].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(rest["state"][name], value, rtol=1e-4, atol=1e-5)


def _before_and_after() -> list[Any]:
    model, batch = example()
    parallel = compile(model, sw.Cluster.local(2), **forced())
    assert "to be planned at its first call" in repr(parallel)
    before = dict(parallel.named_parameters())
    kinds = [parallel.training, all(isinstance(p, DTensor) for p in before.values()), sorted(parallel.state_dict())]
    loss = parallel(**batch)
    loss.backward()
    after = dict(parallel.named_parameters())
    same = [before[name] is after[name] for name in before]
    gradients = all(p.grad is not None for p in before.values())
    return [*kinds, all(same), gradients, str([p.placements for p in before.values() if isinstance(p, DTensor)])]


def test_a_lazy_module_keeps_its_parameters() -> None:
    for training, dtensors, names, same, gradients, placements in run_ranks(_before_and_after, 2):
        assert training
        assert dtensors
        assert names == ["calls", "head.weight", "table.weight", "up.bias", "up.weight"]
        assert same
        assert gradients
        assert "Shard" in placements


def _done_before_the_first_call() -> list[bool]:
    model, batch = example()
    parallel = compile(model, sw.Cluster.local(2), **forced())
    bias, weight, called = parallel.get_parameter("up.bias"), parallel.get_parameter("up.weight"), list[str]()
    bias.requires_grad_(False)
    weight.register_hook(lambda gradient: called.append("gradient"))
    handle = parallel.register_forward_hook(lambda module, args, loss: called.append("forward"))
    parallel.note = "kept"
    parallel(**batch).backward()
    handle.remove()
    parallel.forward_backward(**batch)
    assert called == ["forward", "gradient", "gradient"]
    return [bias.grad is None, not bias.requires_grad, weight.grad is not None, parallel.note == "kept"]


def test_what_is_done_to_a_lazy_module_before_its_first_call_stays() -> None:
    assert run_ranks(_done_before_the_first_call, 2) == [[True] * 4] * 2


def _before_the_first_call() -> list[Any]:
    model, batch = example()
    states = [model.state_dict(), compile(model, sw.Cluster.local(2), kwargs=batch, **forced()).state_dict()]
    states = [{name: value * 2 if value.is_floating_point() else value for name, value in s.items()} for s in states]
    losses = list[float]()
    for state in states:  # of one process, and of DTensors
        known = compile(example()[0], sw.Cluster.local(2), kwargs=batch, **forced())
        later = compile(example()[0], sw.Cluster.local(2), **forced())
        for parallel in (known, later):
            parallel.load_state_dict(state)
            torch.manual_seed(0)
            losses.append(parallel.forward_backward(**batch).item())
    later = compile(model, sw.Cluster.local(2), **forced())
    later.compile(backend="eager")
    later._for(batch)
    assert hasattr(later.program.forward, "_torchdynamo_orig_callable")
    messages = list[str]()
    later = compile(model, sw.Cluster.local(2), **forced())
    for ask in (lambda: later.source, lambda: later.input_layouts, lambda: later.graph,
                lambda: later.clip_grad_norm_(1.0), lambda: later.typo):  # fmt: skip
        with pytest.raises(AttributeError) as caught:
            ask()
        messages.append(str(caught.value))
    with pytest.raises(PlanError, match=r"up.bias: the state has shape \[3\], the model"):
        later.load_state_dict({"up.bias": torch.zeros(3)}, strict=False)
    return [losses, messages]


def test_what_is_asked_of_a_lazy_module_before_its_first_call() -> None:
    """A checkpoint is loaded; what needs the plan says so."""
    for losses, messages in run_ranks(_before_the_first_call, 2):
        assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
        for name, message in zip(("source", "input_layouts", "graph", "clip_grad_norm_"), messages, strict=False):
            assert message.startswith(f"{name}: a model that is compiled without a batch has no plan before its first")
        assert messages[-1] == "'ParallelModule' object has no attribute 'typo'"


def _own_batches() -> str:
    model, batch = example()
    parallel = compile(model, sw.Cluster.local(2), check_inputs="always", **forced())
    for _ in range(5):
        parallel.forward_backward(**batch)
    with pytest.raises(BatchError) as caught:
        parallel.forward_backward(**example(dist.get_rank())[1])
    return str(caught.value)


def test_a_batch_of_each_ranks_own_is_refused_on_request_in_any_step() -> None:
    for message in run_ranks(_own_batches, 2):
        assert "'ids' in step 6 differs between ranks 0 and 1" in message


def _from_file(path: str) -> float:
    model, batch = example()
    torch.manual_seed(0)
    return compile(model, kwargs=batch, plan=path).forward_backward(**batch).item()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Tensor:
        return self.layer(x["pixels"]).square().mean() * x["scale"]


def test_what_is_no_tensor_may_lie_beside_tensors() -> None:
    batch = {"x": {"pixels": torch.randn(4, 4), "scale": 2, "mask": None}}

    def body() -> None:
        compile(Scaled(), sw.Cluster.local(2), kwargs=batch, **forced()).forward_backward(**batch)
        scale = 2 + dist.get_rank()
        with pytest.raises(DistributedError, match=r"batch: 'x.scale' is 3 on rank 1 and 2 on rank 0|another rank"):
            compile(Scaled(), sw.Cluster.local(2), kwargs={"x": batch["x"] | {"scale": scale}}, **forced())

    run_ranks(body, 2)


def test_a_plan_file_is_run(tmp_path: Path) -> None:
    model, batch = example()
    plan(model, sw.Cluster.local(2), kwargs=batch, **forced()).save(tmp_path / "plan.json")
    ((losses, _),) = run_ranks(single, 1)
    assert run_ranks(_from_file, 2, args=(str(tmp_path / "plan.json"),)) == pytest.approx([losses[0]] * 2, rel=1e-5)


def _with_rules(path: str) -> set[str]:
    """The operators that are split by a plan that is searched on the ranks."""
    model, batch = example()
    parallel = compile(model, sw.Cluster.local(2), kwargs=batch, rules=path, **forced())
    assert torch.isfinite(parallel.forward_backward(**batch))
    return {node.op for node in parallel.graph.nodes if node.split not in ((), ("R",))}


def test_ranks_plan_with_the_rules_of_a_file_and_no_others(tmp_path: Path) -> None:
    pattern = Pattern.parse("a b c, d c -> a b d", 2)
    rules = [derive("linear", pattern, choice).to_json() for choice in choices(ROWS["linear"], pattern)]
    (tmp_path / "rules.json").write_text(json.dumps({"version": 1, "rules": rules}))
    assert run_ranks(_with_rules, 2, args=(str(tmp_path / "rules.json"),)) == [{"linear"}] * 2


def _refused(build: Callable[[], object]) -> str:
    try:
        build()
    except sw.ShardwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def _other_batch(made: Plan) -> str:
    model, batch = example(batch=8)
    return _refused(lambda: compile(model, kwargs=batch, plan=made))


def test_a_plan_for_another_batch_is_refused_on_every_rank() -> None:
    model, batch = example()
    made = plan(model, sw.Cluster.local(2), kwargs=batch)
    zero, one = run_ranks(_other_batch, 2, args=(made,))
    assert zero.startswith(f"PlanError: plan for 'Tied' has fingerprint {made.fingerprint}, the captured model ")
    assert "input 'ids' is int64[4, 6] in the plan, int64[8, 6] in the model" in zero
    assert one == f"DistributedError: rank 0 could not make the plan: {zero}"


def _uneven() -> list[str]:
    """What each rank is told where rank 1 has something else than rank 0."""
    found: list[str] = []
    for number in range(5):
        model, batch = example()
        if dist.get_rank() == 1:
            if number == 0:
                model.up = nn.Linear(8, 8, bias=False)
            elif number == 1:
                model.up.weight.requires_grad_(False)
            elif number == 2:
                model.head.weight = nn.Parameter(model.head.weight.detach().clone())
            elif number == 3:
                model.eval()
            else:
                batch = {name: value[:2] for name, value in batch.items()}
        build = partial(compile, model, sw.Cluster.local(2), kwargs=batch, **forced())
        found.append(_refused(build))
    return found


def test_ranks_with_different_models_or_batches_all_end() -> None:
    expected = [
        "tensor 'up.bias' is missing on rank 1 and float32[8], trained on rank 0; build the same model",
        "tensor 'up.weight' is float32[8, 8], not trained on rank 1 and float32[8, 8], trained on rank 0",
        "tensor 'head.weight' is float32[16, 8], trained on rank 1 and float32[16, 8], trained, table.weight on rank 0",
        "module '' is in eval mode on rank 1 and in train mode on rank 0",
        "batch: 'ids' is int64[2, 6] on rank 1 and int64[4, 6] on rank 0; build the same model, and pass a batch of",
    ]
    for text, zero, one in zip(expected, *run_ranks(_uneven, 2), strict=True):
        assert one.startswith(f"DistributedError: {text}"), one
        assert zero.startswith(f"DistributedError: rank 1: {text}"), zero


class Looping(nn.Module):
    """It makes parameters, constants, buffers and draws in the order of a set."""

    def __init__(self, kinds: Iterable[str], p: float = 0.1) -> None:
        super().__init__()
        self.kinds, self.p, self.up = kinds, p, nn.ParameterDict()
        for kind in kinds:
            self.up[kind] = nn.Parameter(torch.full((8, 8), 0.01 * len(kind)))
            self.register_buffer(kind, torch.tensor(float(len(kind))))

    def forward(self, x: Tensor) -> Tensor:
        made: dict[str, Tensor] = {}
        for kind in self.kinds:
            shift = torch.tensor([0.1 * len(kind), 0.5]).sum()
            made[kind] = F.dropout(torch.tanh(x @ self.up[kind] * self.get_buffer(kind)) + shift, self.p)
        return sum(made[kind].square().mean() * len(kind) for kind in sorted(made))  # pyright: ignore[reportReturnType]


def looped(kinds: Iterable[str], path: str | None = None) -> list[Any]:
    """Losses, the names of parameters in the model's order, and the program."""
    model, batch = Looping(kinds, 0.0 if path else 0.1), {"x": torch.linspace(-1, 1, 32).reshape(4, 8)}
    torch.manual_seed(3)
    searched: dict[str, Any] = (
        {} if path else {"cluster": sw.Cluster.local(dist.get_world_size()), **forced(dist.get_world_size())}
    )
    parallel = compile(model, kwargs=batch, plan=path, **searched)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(parallel.forward_backward(**batch).item())
        optimizer.step()
    parallel.clip_grad_norm_(1.0)
    return [losses, list(dict(model.named_parameters())), parallel.source]


def _looped_by_rank() -> list[Any]:
    return looped(["aaa", "b", "cc"][:: 1 - 2 * dist.get_rank()])


def test_ranks_may_trace_a_model_in_different_orders() -> None:
    (losses, names, source), (others, other_names, other_source) = run_ranks(_looped_by_rank, 2)
    assert names == other_names[::-1]
    assert source == other_source
    assert losses == others
    assert losses == pytest.approx(run_ranks(looped, 1, args=(["aaa", "b", "cc"],))[0][0], rel=1e-5)


_HASHED = """
import os, sys
if "PYTHONHASHSEED" not in os.environ:
    os.environ["PYTHONHASHSEED"] = os.environ["RANK"]
    os.execv(sys.executable, [sys.executable, *sys.argv])
import json, torch
from tests.shardwright.test_api import looped
kinds = {"aaa", "b", "cc", "dddd"}
losses, _, source = looped(kinds, sys.argv[1])
with open(f"{os.environ['RANK']}.json", "w") as file:
    json.dump([list(kinds), losses, source], file)
print(f"loss {losses[0]}")  # one write: two ranks' do not mix
"""


@pytest.mark.slow
def test_ranks_of_a_script_may_hash_differently(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun: processes of their own, in each of which a set of names has its own order; so has the plan's."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    model = Looping(["cc", "aaa", "dddd", "b"], 0.0)
    plan(model, sw.Cluster.local(2), (torch.randn(4, 8),), **forced()).save("plan.json")
    Path("train.py").write_text(_HASHED)
    status, out, err = run("run", "train.py", "--cluster", "local:2", "--", "plan.json")
    assert status == 0, err
    assert out.count("loss ") == 2
    zero, one = (json.loads(Path(f"{rank}.json").read_text()) for rank in range(2))
    assert zero[0] != one[0]
    assert zero[1:] == one[1:]


def _failing_search() -> str:
    model, batch = example()
    return _refused(lambda: compile(model, sw.Cluster.local(2), kwargs=batch, mesh={"dp": 2}, roles=["fast"]))


def test_where_rank_0_cannot_plan_every_rank_ends() -> None:
    zero, one = run_ranks(_failing_search, 2)
    assert zero.startswith("PlanError: unknown axis role 'fast'")
    assert one.startswith("DistributedError: rank 0 could not make the plan: PlanError: unknown axis role 'fast'")


def _corrupted(made: Plan) -> str:
    model, batch = example()
    return _refused(lambda: compile(model, kwargs=batch, plan=made))


def test_a_corrupted_plan_does_not_run() -> None:
    model, batch = example()
    made = plan(model, sw.Cluster.local(2), kwargs=batch, **forced())
    nodes = tuple(replace(n, op="sigmoid") if n.op == "tanh" else n for n in made.graph.nodes)
    corrupted = replace(made, graph=replace(made.graph, nodes=nodes))
    for text in run_ranks(_corrupted, 2, args=(corrupted,)):
        assert "its graph is not the captured one" in text
        assert "sigmoid" in text


class Disordered(nn.Module):
    """Two layers that are put into the model in another order on every second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for name in ("a", "b") if dist.get_rank() % 2 == 0 else ("b", "a"):
            self.layers[name] = nn.Linear(8, 8)
        for name, value in (("a", 1.0), ("b", 2.0)):
            nn.init.constant_(cast(Tensor, self.layers[name].weight), value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["b"](self.layers["a"](x)).square().mean()


def test_parameters_come_in_rank_0s_order() -> None:
    """Else who goes through them and gathers each joins halves of different weights, without a word."""

    def rank(*, batch_is_known: bool) -> list[tuple[str, set[float]]]:
        batch = {"x": torch.ones(4, 8)}
        parallel = compile(Disordered(), sw.Cluster.local(2), kwargs=batch if batch_is_known else None,
                           mesh={"dp": 2}, roles=["zero"])  # fmt: skip
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.0)
        parallel.forward_backward(**batch)
        optimizer.step()
        named = [(name, p) for name, p in parallel.named_parameters() if "weight" in name]
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in parallel.parameters()]
        return [(name, set(cast(DTensor, p).full_tensor().flatten().tolist())) for name, p in named]

    for known in (True, False):
        found = run_ranks(partial(rank, batch_is_known=known), 2)
        assert found == [[("layers.a.weight", {1.0}), ("layers.b.weight", {2.0})]] * 2
