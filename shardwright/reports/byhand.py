"""The settings in FSDP2 and in torchtitan of the best plan by hand that fits: `explain --by-hand`.

Plans by hand come from `search.request.spaces.baselines`; the names of their axes say what the axes do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwright.pcg.errors import PlanError
from shardwright.reports.facts import memory_verdict, ranked_alternatives
from shardwright.reports.report import Paragraph, Report
from shardwright.reports.units import seconds
from shardwright.reports.wording import SEARCHED, called, faster_or_slower
from shardwright.search.plan import Alternative, Plan
from shardwright.search.request.spaces import batch_size, sequence_length

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}


@dataclass(frozen=True)
class Settings:
    """A plan by hand in the terms of the libraries that run it.

    `replicas`, `shards`: groups of data parallelism that hold all of a parameter, and the parts of it in each.
    `reshards`: whether gathered parameters are freed after forward (ZeRO-3). `tensor`, `sequence`: degrees.
    """

    plan: Plan
    other: Alternative

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.other.mesh.names, self.other.mesh.sizes, strict=True))

    @property
    def replicas(self) -> int:
        return self.sizes.get("dp", 1) if "zero" in self.sizes or not self.other.lifetimes else 1

    @property
    def shards(self) -> int:
        return self.sizes.get("zero", 1) * self.sizes.get("dp", 1) // self.replicas

    @property
    def reshards(self) -> bool:
        return "zero-3" in self.other.lifetimes

    @property
    def tensor(self) -> int:
        return self.sizes.get("tp", 1)

    @property
    def sequence(self) -> int:
        return self.sizes.get("cp", 1) * self.sizes.get("sp", 1)

    @property
    def local_batch(self) -> int:
        """The examples that a group of data parallelism computes at once."""
        return max(1, batch_size(self.plan.graph) // (self.replicas * self.shards * self.other.mesh.num_microbatches))

    @property
    def checkpointing(self) -> str:
        """The recomputation: none, selective or full, or "by block" or "by value" if chosen so."""
        recomputed = self.other.execution.recompute
        if isinstance(recomputed, str):
            return recomputed
        return "by block" if all(isinstance(mode, str) for _, mode in recomputed) else "by value"


_NEAREST = {"by block": "selective", "by value": "memory_budget"}
"""Torchtitan's nearest mode for each kind of recomputation."""


class ByHandReport(Report):
    """The best plan by hand that fits, as settings. Raises `PlanError` if no such plan was compared."""

    def __init__(self, plan: Plan) -> None:
        fitting = [a for a in ranked_alternatives(plan) if memory_verdict(plan, a) == "fits" and SEARCHED not in a.name]
        if not fitting:
            raise PlanError("none of the plans by hand that this plan was compared with fits; `compare` lists them")
        self.plan, self.own = plan, Settings(plan, fitting[0])

    def paragraphs(self) -> list[Paragraph]:
        step_s, own_s = self.own.other.prediction.step_s, self.plan.prediction.step_s
        compared = faster_or_slower(step_s, own_s)
        title = f"Best plan by hand: {called(self.own.other)}, {seconds(step_s)} a step, {compared} than this plan"
        return [
            Paragraph(title, _notes(self.own)),
            Paragraph("In FSDP2", _fsdp2(self.own)),
            Paragraph("In torchtitan", _torchtitan(self.own)),
        ]

    def data(self) -> dict[str, object]:
        return {
            "name": called(self.own.other),
            "step_s": self.own.other.prediction.step_s,
            "notes": _notes(self.own),
            "fsdp2": _fsdp2(self.own),
            "torchtitan": _torchtitan(self.own),
        }


def _notes(settings: Settings) -> list[str]:
    notes = ["blocks stands for the model's repeated layers"]
    if nearest := _NEAREST.get(settings.checkpointing):
        how = "block by block" if settings.checkpointing == "by block" else "value by value"
        notes.append(f"what it makes again is chosen {how} here; {nearest} is torchtitan's nearest mode")
    if settings.other.execution.schedule.num_stages > 1:
        notes.append("FSDP2 has no pipeline stages; torchtitan has")
    if (
        settings.other.lifetimes
        and settings.other.lifetimes[0] == "zero-1"
        and settings.other.mesh.num_microbatches > 1
    ):
        notes.append(
            "FSDP2 reduces gradients in each microbatch unless set_requires_gradient_sync(False) is called before"
        )
    return notes


def _fsdp2(settings: Settings) -> list[str]:
    """Return the settings as lines of Python."""
    named = {"replicate": settings.replicas, "shard": settings.shards, "tp": settings.tensor, "cp": settings.sequence}
    axes = {name: size for name, size in named.items() if size > 1} or {"shard": 1}
    data = [name for name in ("replicate", "shard") if name in axes]
    lines = [f'mesh = init_device_mesh("cuda", {tuple(axes.values())}, mesh_dim_names={tuple(axes)})']
    if settings.sequence > 1:
        lines.append('# wrap each step in: with context_parallel(mesh["cp"], buffers=..., buffer_seq_dims=...)')
    if settings.tensor > 1:
        lines += [
            "for block in blocks:  # columns of the first products, rows of the last ones",
            '    parallelize_module(block, mesh["tp"], {...: ColwiseParallel(), ...: RowwiseParallel()})',
        ]
    if settings.checkpointing == "full":
        lines += ["for block in blocks:", "    checkpoint(block)"]
    if settings.checkpointing == "selective":
        lines += ["for block in blocks:", "    checkpoint(block.attention)"]
    if settings.checkpointing == "by block":
        lines += ["for block in some_blocks:", "    checkpoint(block)"]
    if settings.checkpointing == "by value":
        lines.append("# make values again by a policy: torch.utils.checkpoint.create_selective_checkpoint_contexts")
    if data == ["replicate"]:
        lines.append('replicate(model, mesh=mesh["replicate"])' if len(axes) > 1 else "DistributedDataParallel(model)")
    elif data:
        chosen = f"mesh[{data[0]!r}]" if len(data) == 1 else f"mesh[{tuple(data)!r}]"
        options = f"mesh={chosen}, reshard_after_forward={settings.reshards}{_policy(settings)}"
        lines += ["for block in blocks:", f"    fully_shard(block, {options})", f"fully_shard(model, {options})"]
    count = settings.other.mesh.num_microbatches
    return [*lines, f"# a step: {count} × a batch of {settings.local_batch} in each group of data parallelism"]


def _policy(settings: Settings) -> str:
    """Return the argument for mixed precision; a precision of everything is set in the model (`model.to(...)`)."""
    precision, reduced = settings.other.execution.base or "", settings.other.execution.reduce_dtype
    dtypes = (f"torch.{dtype}" for short, dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if short in precision)
    if precision in ("bf16", "fp16") or not (dtype := next(dtypes, "")):
        return ""
    return f", mp_policy=MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.{reduced or 'float32'})"


def _torchtitan(settings: Settings) -> list[str]:
    """Return the settings as lines of a job's TOML."""
    schedule = settings.other.execution.schedule
    lines = [
        "[training]",
        f"local_batch_size = {settings.local_batch}",
        f"global_batch_size = {batch_size(settings.plan.graph)}",
        *([f"seq_len = {length}"] if (length := sequence_length(settings.plan.graph)) else []),
        "[parallelism]",
        f"data_parallel_replicate_degree = {settings.replicas}",
        f"data_parallel_shard_degree = {settings.shards}",
        f'fsdp_reshard_after_forward = "{"always" if settings.reshards else "never"}"',
        f"tensor_parallel_degree = {settings.tensor}",
        f"context_parallel_degree = {settings.sequence}",
        f"pipeline_parallel_degree = {schedule.num_stages}",
    ]
    if schedule.num_stages > 1:
        lines.append(f'pipeline_parallel_schedule = "{_SCHEDULES.get(schedule.name, schedule.name)}"')
    return [
        *lines,
        "[activation_checkpoint]",
        f'mode = "{_NEAREST.get(settings.checkpointing, settings.checkpointing)}"',
    ]
