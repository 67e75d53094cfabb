"""The public functions: `plan` searches, `compile` turns a plan into this rank's trainable module.

model and batch ──capture──▶ serial graph ──Planner──▶ Plan ──check_plan──▶ lower ──▶ ParallelModule
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.private import default_device
from shardwright.lowering.ranks.launch import join
from shardwright.lowering.ranks.waits import TIMEOUT_S, start_up
from shardwright.lowering.runtime.inputs import CheckInputs
from shardwright.lowering.runtime.precision import check_device
from shardwright.lowering.store.deferred import DeferredValues, is_unreal
from shardwright.lowering.store.parts import names_of
from shardwright.lowering.store.weights import WeightFiles
from shardwright.options import (
    CheckCapture,
    PlanOptions,
    PlanWords,
    check_when,
    guiding,
    precisions_of,
    takes_options,
)
from shardwright.pcg.capture.fake import off_meta
from shardwright.pcg.capture.with_loss import LossFunction, with_loss
from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.precisions import base_of
from shardwright.planning import certified_by
from shardwright.plans import plan_file
from shardwright.programs import Programs, Shape
from shardwright.ranks import check_world, from_rank_0, on_all_ranks, same_on_all_ranks, world_size
from shardwright.search.collector import collector_paused
from shardwright.search.plan import Plan

if TYPE_CHECKING:
    from shardwright.search.tree.planner import Progress


@takes_options
def plan(
    model: nn.Module,
    cluster: Cluster,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    progress: Progress | None = None,
    check_capture: CheckCapture = "never",
    **options: Unpack[PlanWords],
) -> Plan:
    """Search for the best way to train `model` on `cluster`. Nothing is distributed, or run without `check_capture`.

    Where the batch does not divide among all devices, fewer may be faster: the plan is then for a part of the cluster
    (`plan.cluster`), and `plan.idle` says how many stay idle, and why.

    Args:
        model: in the mode (train or eval) that it will run in. Parameters may be fake tensors: a model of any size
            built inside `with shardwright.fake():` is planned without its memory.
        cluster: what to plan for; see `Cluster`.
        args: example inputs of one global batch, positional; shapes are baked into the plan.
        kwargs: the same, by name.
        loss_fn: `loss_fn(result, batch)` returns the scalar loss, where the model does not: from what the model
            returns, and the batch by argument name. The batch may have tensors that only `loss_fn` reads.
        progress: called with a line of text now and then.
        check_capture: "first" runs one eager step of the model and compares it with the captured graph, as `compile`
            does by default; the plan then records it (`Plan.capture_check`), so that `compile(plan=...)` need not.
        options: what the search keeps to, by name; left out or None, the search chooses.
        mesh: search on this mesh only, as `Mesh.of(dp=2, tp=4)` or `{"dp": 2, "tp": 4}`. A first axis `mb` is that of
            time: `{"mb": 4, "dp": 2}` runs four microbatches in a step. Where it has fewer devices than the cluster,
            the others stay idle.
        roles: the use of each axis of devices: "data", "zero", "expert", "context", "ulysses", "ring", "tensor" or
            "free" (any, the default).
        microbatches: how many microbatches a step has, gradients accumulated; 1: none. By default the search chooses.
        recompute: the values that backward computes again instead of keeping them: "none", "selective" (attention),
            "full" (every repeated block, from its input), or a mapping from blocks of the model, modules in them or
            patterns to one of these or to a list of places (docs/recompute.md), such as
            `{"model.layers.0-7": ["mlp", ":add"]}`. By default the search chooses, value by value.
        offload: the values that wait for backward in the host's memory: "none", "full" (all that is kept), or a mapping
            as for `recompute`, such as `{"model.layers.0-7": ["mlp", ":add"]}`. They are copied beside compute, and
            back before backward needs them. What is made again does not wait. By default none
            do, unless nothing fits without and the device has `host_bytes_per_s`, a link to that memory. See
            docs/offload.md.
        pieces: in how many pieces a change of layout of activations runs beside the matrix products that read its
            result, or that make what it sends: one piece travels while another is computed, wherever the number divides
            them. 1: every one runs whole. By default the search chooses. See docs/pieces.md.
        encodings: what gathers of weights and sums of gradients may send in place of their values, in blocks of 256:
            "int8" for both, "fp8" for weights, "int4" for gradients. A name, or a list of them, allows these where a
            step is faster, and "auto" allows all. A mapping says it for each: `{"weights": "int8", "gradients":
            "int4"}`, or a list to choose from, in which "exact" stands for the values. By default values are sent.
            A plan that encodes is exact up to the bounds that it reports. See docs/encodings.md.
        pins: further constraints on the search, as texts or by name: the layout of parameters, by name or pattern
            of parameters or modules (`{"lm_head.weight": {"tp": "S(0)"}, "*.mlp": "sharded"}`: "whole", "sharded",
            "gathered" for use, or "S(dim)"); degrees of roles ("no context", "tensor<=8", "zero>=4") or sizes of axes
            ("y<=8"), on any mesh; and memory on each device ("memory<=40GB"). See docs/planning.md.
        per_microbatch: modules, by name or pattern of `fnmatch` (with all modules inside), whose statistics over the
            batch (batch norm's, those of balancing losses) are taken of each microbatch by itself; True: all. Such a
            step is not a step of the whole batch: it equals one process that runs the microbatches in turn, with the
            mean of their losses, and updates running statistics after each. `microbatches` must be given.
        precision: "amp_bf16" and "amp_fp16": 16 bits where `torch.autocast` uses them, with weights, their gradients
            and optimizer states in float32. "bf16_params" and "fp16_params": parameters, inputs and all results in 16
            bits, over weights and optimizer states in float32, as with FSDP2's `MixedPrecisionPolicy(param_dtype=…)`.
            "tf32": matrix products in tf32. "fp8" can be costed, not run. "fp32", "bf16" and "fp16" check that the
            model is in that dtype. By default the model's own dtypes; a `torch.autocast` in the model is kept in any
            case. A mapping sets it by module: from names or patterns of modules (with all modules inside) to "fp32",
            "amp_bf16" or "bf16_params", of which the first match counts, and from "*", the last key, to the precision
            of all others, as `{"lm_head": "fp32", "*": "amp_bf16"}`; see docs/precision.md. Usual other names
            ("bfloat16", "bf16-mixed") are understood. From a list of several precisions, the search chooses the fastest
            that fits.
        reduce_dtype: "float32", "bfloat16" or "float16", or that dtype of torch, in which gradients of parameters are
            sent to be summed over devices. By default the dtype of the parameters, in which they are accumulated and
            returned in any case. It is `reduce_dtype` of FSDP's `MixedPrecisionPolicy`, and goes with any precision.
        optimizer: the optimizer that is going to train, whose states count for memory and whose update for time: "adam"
            (AdamW too), "adam8bit", "momentum" (SGD with it), "sgd", "lion", "muon" or "adafactor", or a class of
            torch of such a name; "adam@host" and "momentum@host" keep states in the host's memory, with `on_host`. By
            default "adam". Nothing else depends on it; see docs/training.md.
        strict: an operator without a row in the op table is an error; otherwise it runs replicated. So is a part that
            cannot be captured; otherwise it runs as it is (`foreign`), and the plan names it.
        foreign: the parts of the model that run as they are, in Python and under torch's own autograd: modules by name,
            `autograd.Function`s and functions of torch by their full names. Each runs whole on every device, or with
            `{"name": "batch"}` along the batch, if each row of its results depends on its own row alone. Parts that
            cannot be captured are found without being named; see docs/training.md.
        pad: pad parameters, where that lets devices split a dimension that they do not divide: a vocabulary of 50,257,
            25 heads, 7 experts. A number of devices; or True for those of an axis of `mesh`, or else of one machine and
            of all devices. The plan is the best with and without padding, each of which is searched; a batch that they
            do not share evenly is also searched with more rows. Parameters, gradients and checkpoints keep the model's
            shapes; see docs/planning.md.
        rules: a rule file (docs/rules.md) in place of the shipped catalogue: the only source of the forms of rules
            that it holds. Rules that this machine has not proven yet are proven now, or left out and reported to
            `progress`; proofs are kept in the cache folder.
        time_limit_s: seconds of search, in each precision, after which the best plan so far is finished, which takes a
            little longer; so does Ctrl-C. The plan says so, and its bound is that of all meshes.
        stages: the number of pipeline stages, where `mesh` is that of one stage; 1: none; "auto": the best number.
            For stages of unlike sizes, the devices of each, as `[4, 2]`: `mesh` is then that of the largest, and the
            first axis of the others is shorter. By default stages are tried where they may pay: nothing fits without,
            devices are unlike, or the best plan for GPUs takes more than 1.03 times an equal share of all work.
        schedule: the order of microbatches in stages, "gpipe", "1f1b", "eager-1f1b", "interleaved" or "zero-bubble";
            by default the best.

    Raises:
        CaptureError: the model cannot be captured with this batch, or its captured graph computes something else.
        PlanError: arguments do not fit or contradict each other, or the model is not in the dtype that `precision`
            is for. A plan that does not fit the devices' memory is no error: it is the smallest that was found,
            `fits(plan)` of `shardwright.reports.facts` is False, and `shardwright plan` ends with status 3.
        RuleError: the rule file cannot be read, or no rule of it can be used.
    """
    from shardwright.searching import check_devices, searched  # a run with a given plan needs none

    request = PlanOptions.of(**options)
    check_devices(request, cluster)
    check_when(check_capture)
    certified, model = certified_by(request.rules, progress), with_loss(model, loss_fn)
    return searched(model, cluster, args, kwargs, certified, request, progress, check_capture)[0]


@takes_options
@collector_paused()
def compile(
    model: nn.Module,
    cluster: Cluster | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    shapes: Sequence[Shape] | None = None,
    loss_fn: LossFunction | None = None,
    progress: Progress | None = None,
    timeout_s: float = TIMEOUT_S,
    check_inputs: CheckInputs = "first",
    check_capture: CheckCapture = "first",
    weights: str | os.PathLike[str] | WeightFiles | None = None,
    **options: Unpack[PlanWords],
) -> ParallelModule:
    """Return this rank's program for training `model`, a module with DTensor parameters under the model's own names.

    Call it on every rank of a run that `torchrun` (or `shardwright run`) started, with the same model and arguments.
    Rank 0 captures and plans, and every rank gets its plan: ranks may trace the model in different orders, as where it
    loops over a `set`. Without example inputs the module captures and plans at its first call.

    The module returns only the loss. Where the model returns a tuple or dictionary with more, a warning says so.

    A step takes one global batch, the same on every rank, and each rank uses its part of it. A batch of other sizes, or
    the other mode (`parallel.eval()`), gets a program of its own at its first call, over the same parameters.
    Where `input_layouts` shards a tensor, a rank may pass only its own shard. A different batch per rank in the global
    shape, as for DDP, is an error: compile with all of them as one batch.

    Args:
        model: with real weights. Where they differ between ranks, rank 0's count (and are copied into `model`), as with
            DDP; so does its random state where ranks are seeded differently (docs/randomness.md). A model that was
            built inside `with shardwright.fake():` has no weights yet: each rank makes its parts alone, with the values
            that the model would have got outside of it. One on device meta gets them from `weights`.
        cluster: by default the cluster that this process runs on, `Cluster.detect()`.
        args: example inputs of one global batch, positional.
        kwargs: the same, by name.
        loss_fn: as in `plan`. `parallel.evaluate` returns the model's result all the same.
        plan: use this plan, or plan file, instead of searching; of a folder of plans (`shardwright plan --for`), the
            one for as many ranks as run.
        shapes: in place of `args` and `kwargs`, several batches by name, each with a weight, such as how often it comes
            in an epoch: `[(batch, 0.9), (longer, 0.1)]`. Each is searched by itself; the parameters are then stored as
            in the plan with which the weighted sum of all steps is least, and all programs are made at once.
        progress: as in `plan`; called on rank 0 only.
        timeout_s: the time after which a collective that waits for another rank is an error.
        check_inputs: when to compare the inputs of all ranks, by a digest: in the "first" three steps (with gradients,
            and without), "always" or "never". Where they do not fit together, every rank raises a `BatchError`.
        check_capture: "first" compares one eager step of the model with the captured graph: loss, gradients, buffers
            and random state, on the model's own values, on a part of the batch where a step is large. Rank 0 does it,
            unless `plan` records that it was done, and restores everything that it changes; docs/limits.md lists the
            differences that it cannot see. "never" leaves it out. The result is the module's `capture_check`.
        weights: files to read the model's values from, in parts: a path of safetensors, of `torch.save`, or of a
            torch.distributed.checkpoint folder, or `WeightFiles`, which can also map names.
        options: as in `plan`. With `plan`, only `strict` and `rules`; rank 0 reads the rule file, which a plan that
            rewrites the model by rules of a file needs too.

    Raises:
        CaptureError: the model cannot be captured with this batch, or its captured graph computes something else.
        PlanError: the plan is for another model, batch, precision or cluster, or cannot run on this device; or nothing
            gives the model values, or the files in `weights` are not of this model.
        InfeasibleError: no plan is predicted to fit the devices; its `plan` is the smallest, in case you know better.
        RuleError: the rule file cannot be read, or no rule of it can be used.
        DistributedError: the number of running ranks is not the plan's (the best plan may leave some idle); another
            rank failed; or this rank has another model, or a batch of other shapes, than rank 0.
    """
    if is_unreal(torch.empty(0)):
        raise PlanError("compile makes memory for this rank's part of the model: call it outside of shardwright.fake()")
    check_when(check_capture)
    given = _load(plan)
    if given is not None and (named := [f"{name}=" for name in guiding(options)]):
        raise PlanError(
            f"plan= was given together with {' and '.join(named)}, which guide the search; give one or the other"
        )
    if shapes is not None:
        _check_shapes(shapes)
        if args or kwargs or given is not None:
            raise PlanError("shapes= has the batches, and is planned for them; leave out args, kwargs and plan")
    request = PlanOptions.of(**options)
    if given is not None and options.get("precision") and given.execution.precision not in request.precisions:
        raise PlanError(
            f"precision={options.get('precision')!r} was given with a plan for {given.precision!r}; leave it out"
        )
    target = _target(cluster, given)
    check_world(target.num_devices)

    join(timeout_s)
    for precision in request.precisions if given is None else precisions_of(given.precision):
        check_device(base_of(precision), default_device().type)
    with start_up(timeout_s):
        source = _deferred(model, weights)
    programs = Programs(
        model, loss_fn, target, request, given, progress, timeout_s, check_inputs, check_capture, source
    )
    if shapes is not None:
        parallel = ParallelModule(model, programs.maker, source=source)
        programs.together(parallel, shapes)
        return parallel
    if args or kwargs:
        parallel = ParallelModule(model, programs.maker, source=source)
        programs.first(parallel, args, kwargs or {})
        return parallel
    if source is not None:
        raise PlanError(
            f"{type(model).__name__}: a model without values, or with weights=, is compiled with its batch, as its "
            "parameters have no layout before: compile(model, kwargs=batch)"
        )
    with start_up(timeout_s):
        order = from_rank_0(lambda: names_of(model), "the order of its modules")
        return ParallelModule(model, programs.maker, stands_in=True, order=order)


def _check_shapes(shapes: Sequence[Shape]) -> None:
    """Raise `PlanError` unless these are batches with weights."""
    for number, shape in enumerate(shapes):
        pair = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        batch, weight, *_ = (*pair, None)
        good = isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 < weight < inf
        if len(pair) != 2 or not isinstance(batch, Mapping) or not good:
            raise PlanError(
                f"shapes[{number}]: expected a batch by argument name and a positive weight, got "
                f"{type(batch).__name__} and {weight!r}; give (kwargs, weight), such as ({{'x': x}}, 0.5)"
            )
    if not shapes:
        raise PlanError("shapes=[]: expected at least one batch with its weight, as (kwargs, weight)")


def _load(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    return plan if plan is None or isinstance(plan, Plan) else Plan.load(plan_file(Path(plan), world_size()))


def _target(cluster: Cluster | None, given: Plan | None) -> Cluster:
    """Return the cluster to run on; raise `PlanError` unless a given plan is for as many devices."""
    if given is None:
        return cluster or Cluster.detect()
    num_planned, unused = given.cluster.num_devices, given.idle.num_devices if given.idle else 0
    if cluster is not None and cluster.num_devices not in (num_planned, num_planned + unused):
        raise PlanError(
            f"the plan is for {num_planned} devices ({given.cluster.name}), the cluster {cluster.name} "
            f"has {cluster.num_devices}; plan for this cluster"
        )
    return given.cluster


def _deferred(model: nn.Module, weights: str | os.PathLike[str] | WeightFiles | None) -> DeferredValues | None:
    """Return the source of a model's values if they are not in the model; all ranks have the same, or all raise."""
    if weights is None and not any(map(is_unreal, (*model.parameters(), *model.buffers()))):
        return None
    off_meta(model)
    files = weights if weights is None or isinstance(weights, WeightFiles) else WeightFiles(weights)
    source = on_all_ranks(lambda: DeferredValues(model, files))
    same_on_all_ranks(lambda: source.facts)
    return source


def refuse_unreal(model: nn.Module) -> None:
    """Raise `PlanError` for a model with a parameter or buffer that has no values."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if is_unreal(value):
            kind = "a fake tensor" if isinstance(value, FakeTensor) else "on device meta"
            raise PlanError(
                f"{type(model).__name__}: {name!r} is {kind} and has no values, which one process needs here; build "
                "the model outside of shardwright.fake(), on a real device"
            )
