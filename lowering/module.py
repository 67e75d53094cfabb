"""`ParallelModule`: a lowered plan as an `nn.Module` that trains on torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.lowering import private
from shardwright.lowering.agreement import order_of_rank_0, share_values
from shardwright.lowering.batch import BatchCheck, find_inputs
from shardwright.lowering.clipping import clip_gradients
from shardwright.lowering.drawing import Drawing
from shardwright.lowering.dtensors import mend_dtensors
from shardwright.lowering.exact import num_draws
from shardwright.lowering.groups import across
from shardwright.lowering.inputs import CheckInputs, Inputs
from shardwright.lowering.launch import TIMEOUT_S, connect
from shardwright.lowering.loading import load
from shardwright.lowering.original import Original
from shardwright.lowering.outside import find_outside
from shardwright.lowering.parts import bake, mirror, names_of, show_carried
from shardwright.lowering.pipeline import Pipeline
from shardwright.lowering.precision import check_device, set_products
from shardwright.lowering.program import Program
from shardwright.lowering.ranks import Ranks
from shardwright.lowering.runner import Runner, own_leaf
from shardwright.lowering.shared import Holders, Shared
from shardwright.lowering.storage import Held, check_model, hold_buffer, hold_parameter
from shardwright.lowering.training import Training
from shardwright.pcg import pieces
from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.graph import Graph
from shardwright.pcg.importing import names_by_first, tied_names
from shardwright.pcg.layout import Layouts, R
from shardwright.pcg.mesh import TIME
from shardwright.pcg.stages import Stages, cut, not_run
from shardwright.pcg.step.additive import find_additive
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.meshes import stage_meshes
from shardwright.pcg.step.parameters import find_parameters
from shardwright.pcg.step.precisions import DTYPES, Precision, in_bf16
from shardwright.pcg.step.schedules import orders
from shardwright.pcg.step.time import as_run
from shardwright.search.plan import CaptureCheck


def lower(
    graph: Graph,
    model: nn.Module,
    *,
    constants: Mapping[str, Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    precision: Precision | None = None,
    timeout_s: float = TIMEOUT_S,
    execution: Execution = DEFAULT,
    check_inputs: CheckInputs = "first",
) -> ParallelModule:
    """This rank's program for a parallel graph, with this rank's shards of the model's parameters and buffers.

    Every rank calls it with the same graph and the same model. `constants` and `options` are those of
    `pcg.capture.Captured`; `precision` is that under which it was captured: casts are in the graph, so it only says in
    what matrix products run. `execution` says what backward makes again; `check_inputs` is that of
    `shardwright.compile`. Raises `DistributedError` where the number of
    ranks is not the mesh's, `PlanError` where the graph is not of this model, cannot be run in microbatches, has not
    what is to be made again, or this device does not train in the precision.
    """
    graph = as_run(graph, execution).validate()
    check_stages(graph, execution, precision)
    ranks = connect(stage_meshes(graph.mesh, execution), timeout_s)
    check_device(precision, ranks.device.type)
    constants, options = constants or {}, options or {}
    return ParallelModule(graph, model, ranks, constants, options, execution, check_inputs, precision=precision)


def check_stages(graph: Graph, execution: Execution, precision: Precision | None) -> None:
    """Raise a `PlanError` for what cannot be run in pipeline stages."""
    if execution.num_virtual_stages == 1:
        return
    if (problem := not_run(graph, precision)) is not None:
        raise PlanError(problem)
    if precision is not None and DTYPES[precision].is_scaled:  # every stage looks for overflows, in its gradients
        parts = cut(graph, execution).graphs
        for stage in range(execution.num_stages):
            own = parts[stage :: execution.num_stages]
            if not any(part.types[leaf.name].grad for part in own for leaf in part.leaves("parameter")):
                other = in_bf16(precision)
                raise PlanError(f"{precision}: nothing is trained in stage {stage}; use {other}, or no stages")


class ParallelModule(Training):
    """A model lowered onto this rank. Parameters carry the model's own names and are DTensors on one mesh.

    `forward_backward(**batch)` computes the loss and every gradient; `parallel(**batch)` returns the loss, and its
    `backward()` does the rest. `source` is the program's text; `input_layouts` says how each tensor of the batch is
    laid out, for those who pass a rank's own shard of it instead of the global tensor. With a `scaler`,
    `forward_backward` scales the loss before its backward; `scaler.step(optimizer)` undoes that in the gradients.
    `elsewhere`: the names of parameters and buffers that other pipeline stages have. `capture_check`: how `compile` has
    compared the captured graph with an eager step.

    A batch is that of all microbatches. Where there are several, `parallel(**batch)` has run their backwards already,
    and `backward()` of its loss only scales the gradients and hands them over (so with fp16, use `forward_backward`).
    """

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        ranks: Ranks,
        constants: Mapping[str, Tensor],
        options: Mapping[str, Any],
        execution: Execution = DEFAULT,
        check_inputs: CheckInputs = "first",
        *,
        precision: Precision | None = None,
    ) -> None:
        super().__init__()
        mend_dtensors()
        self.scaler: torch.amp.GradScaler | None = None
        self._products = precision if ranks.device.type == "cuda" else None
        set_products(self._products)
        self.training = model.training
        stages = cut(graph, execution) if execution.num_virtual_stages > 1 else Stages(graph, {}, (), ranks.meshes)
        graph = replace(graph, mesh=ranks.mesh) if graph.mesh != ranks.mesh else graph
        self.graph, self.ranks = graph, ranks
        self.capture_check: CaptureCheck | None = None
        self._original = Original(model)
        self._held: dict[str, Held] = {}
        self.elsewhere = set[str]()  # what other pipeline stages have
        self._leaves = {name: value.to(ranks.device) for name, value in constants.items()}
        self._hold(graph, model, stages)
        self._frozen = [held for held in self._held.values() if not held.inside.requires_grad]
        self._trained = list({id(h): h for h in self._held.values() if isinstance(h.outside, nn.Parameter)}.values())
        self._batch = BatchCheck(find_inputs(graph)[0], options, ranks)
        self.execution = execution
        outside = find_outside(graph, execution)
        sums = {str(graph.by_name[name].attr("axis")) for name in outside.loss_sums} - {TIME}
        self._loss_axis = ranks.merged(tuple(a for a in graph.mesh.names if a in sums)) if sums else None
        buffers = (name for name, _ in graph.outputs)
        in_turn = {name for name in buffers if execution.is_per_microbatch(name.rpartition(".")[0])}
        self._by_microbatch = in_turn | find_additive(graph).buffers
        self._pipeline: Pipeline | None = None
        if len(stages) == 1:
            self._runners = [Runner(outside, ranks, self._leaves, self._held)]
        else:
            self._run_in_stages(stages, execution)
        self._drawing = Drawing(ranks, graph)
        self._inputs = Inputs(self._batch, self._drawing, check_inputs)
        self._num_draws = num_draws(graph)
        bake(self, model)

    def _run_in_stages(self, stages: Stages, execution: Execution) -> None:
        """A runner for each virtual stage of this rank, and what goes on between stages."""
        ranks, own = self.ranks, self._virtual_stages(stages)
        by_stage = [find_parameters(graph, execution).by_leaf.values() for graph in stages.graphs]
        for sums in sorted({p.sums for found in by_stage for p in found if p.sums}):
            ranks.merged(sums)  # of all stages, as every rank takes part in making a group
        self._runners = list[Runner]()
        for number, stage in enumerate(own):
            held = self._held if not number else {name: own_leaf(one) for name, one in self._held.items()}
            outside = find_outside(stages.graphs[stage], execution, self.graph)
            self._runners.append(Runner(outside, ranks, self._leaves, held))
        shared_by_stages = Shared(ranks, dict(self._shared(stages)))
        for runner in self._runners:
            runner.reducer.hold_back = shared_by_stages.hold_back
        many = replace(execution, num_microbatches=self.graph.mesh.num_microbatches)
        items = orders(many)[ranks.stages.rank]
        around = self._loss_axis, self._by_microbatch, shared_by_stages
        self._pipeline = Pipeline(stages, self._runners, items, ranks, *around)

    def _shared(self, stages: Stages) -> Iterator[tuple[str, Holders]]:
        """What this stage trains together with others, by name."""
        ranks = self.ranks
        for leaf, holders in stages.holders.items():
            if len(holders) > 1 and (group := ranks.group(across(ranks.meshes, holders), "shared")) is not None:
                held, kind = self._of(leaf), self.graph.types[leaf]
                held.counts = ranks.stages.rank == holders[0]
                if held.inside.requires_grad:
                    yield held.name, Holders(holders, group, pieces.Tensor(kind.shape, kind.layouts))

    def _virtual_stages(self, stages: Stages) -> range:
        return range(self.ranks.stages.rank, len(stages), self.ranks.stages.size)

    def _hold(self, graph: Graph, model: nn.Module, stages: Stages) -> None:
        leaves = {str(n.attr("target")): n for n in graph.nodes if n.op in ("parameter", "buffer")}
        layouts = {name: graph.types[node.name].layouts for name, node in leaves.items()}
        whole = (R,) * len(graph.mesh)
        carried = {name: self._leaves[name] for name in leaves if name in self._leaves}  # no buffers of the model
        buffers = {**carried, **dict(model.named_buffers(remove_duplicate=False))}
        values = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
        shapes = {name: graph.types[node.name].shape for name, node in leaves.items()}
        check_model(shapes, values, with_data=not self.ranks.is_dry)
        share_values(dict(sorted({**self._leaves, **values}.items())), self.ranks)  # until here, leaves are constants
        is_absent = self._read_elsewhere(stages)
        for hold, tensors in ((hold_parameter, tied_names(model)), (hold_buffer, names_by_first(buffers))):
            for name, names in tensors.items():
                if is_absent(names):
                    self.elsewhere.update(names)
                    continue
                used = next((n for n in names if n in layouts), name)
                self._keep(hold(values[name], names, layouts.get(used, whole), self.ranks), used)
        order = order_of_rank_0(names_of(model), self.ranks)
        mirror(self, model, {name: held.outside for name, held in self._held.items()}, order)
        show_carried(self, {name: self._held[name].outside for name in carried if name in self._held})

    def _read_elsewhere(self, stages: Stages) -> Callable[[tuple[str, ...]], bool]:
        """Whether other pipeline stages have a parameter or buffer alone; the first one has what no stage reads."""
        found = [{str(n.attr("target")) for op in ("parameter", "buffer") for n in g.leaves(op)} for g in stages.graphs]
        read, own = (set[str]().union(*sets) for sets in (found, (found[k] for k in self._virtual_stages(stages))))
        is_first = self.ranks.stages.rank == 0
        return lambda names: own.isdisjoint(names) and not (is_first and read.isdisjoint(names))

    def _keep(self, held: Held, leaf: str) -> None:
        self._held.update(dict.fromkeys(held.names, held))
        for name in {leaf, *held.names}:
            self._leaves[name] = held.inside

    def _of(self, leaf: str) -> Held:
        return self._held[str(self.graph.by_name[leaf].attr("target"))]

    # ---- what users look at ----

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm that they had."""
        return clip_gradients(list({id(h): h for h in self._held.values()}.values()), self.ranks, max_norm, norm_type)

    @property
    def input_layouts(self) -> dict[str, Layouts]:
        """How each tensor of the batch is laid out, by mesh axis."""
        return self._batch.layouts

    @property
    def program(self) -> Program:
        """This rank's program."""
        return self._runner.program

    @property
    def source(self) -> str:
        """The program as readable Python; `program.write(path)` puts it into a file."""
        return self.program.source

    def extra_repr(self) -> str:
        return f"mesh={self.graph.mesh}, rank={dist.get_rank()}, device={self.ranks.device}"

    # ---- state ----

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """By the model's own names; `torch.distributed.checkpoint` saves it, and loads it into any other plan."""
        return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> private.IncompatibleKeys:
        """Load whole tensors (a single-process checkpoint) or DTensors of any layout, in place; called on every rank.

        Raises a `ShardwrightError` on all ranks, and loads nothing, where one cannot take its state or was given other
        names than the others.
        """
        if assign:
            raise ShardwrightError("load_state_dict(assign=True) would cut the program off its parameters; drop assign")
        stage, elsewhere = self._place
        return load(state_dict, self.state_dict(), self._load, elsewhere=elsewhere, strict=strict, stage=stage)

    @property
    def _place(self) -> tuple[int, Collection[str]]:
        """The number of this rank's stage, and the names that other stages have."""
        return self.ranks.stages.rank, self.elsewhere

    def _load(self, name: str, value: Tensor) -> None:
        self._held[name].load(value, self.ranks)

    def mark(self) -> None:
        """Give operators and blocks of the model names in what `torch.profiler` records, `shardwright …`.

        Undoes `compile`.
        """
        for runner in self._runners:
            runner.mark()

    def compile(self, **options: Any) -> None:
        """Run the program through `torch.compile` with these options; what lies around it stays as it is.

        Blocks of the model are compiled one by one, equal ones once, so that it takes no longer for a deeper model.
        What gathers parameters or makes values again stays outside of the compiled graphs. Inductor draws masks of its
        own, which are not those of a single process; its setting `fallback_random` keeps them.
        """
        if options.get("fullgraph") and any(runner.remakes for runner in self._runners):
            raise ShardwrightError(
                "compile(fullgraph=True): parameters are gathered, or values made again, between the graphs of this "
                "program; leave fullgraph out"
            )
        for runner in self._runners:
            runner.compile(**options)
