"""Entries: a graph over a store's parameters, with everything that runs its steps, for one batch shape and one mode.

forward and backward of each microbatch, or of each action of a pipeline stage, and what the ranks sum up of them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from shardwright.lowering.random.drawing import Drawing, Stream
from shardwright.lowering.random.exact import num_draws
from shardwright.lowering.ranks.agreement import share_values
from shardwright.lowering.ranks.launch import connect
from shardwright.lowering.ranks.picked import Work
from shardwright.lowering.ranks.waits import waiting
from shardwright.lowering.runtime.batch import BatchCheck
from shardwright.lowering.runtime.collectives import reduce, start_total
from shardwright.lowering.runtime.handover import hand_over
from shardwright.lowering.runtime.inputs import Inputs
from shardwright.lowering.runtime.pipeline import Outcome, Pipeline, Scale
from shardwright.lowering.runtime.precision import check_device, check_products, set_products
from shardwright.lowering.runtime.reducer import Finished
from shardwright.lowering.runtime.runner import Runner
from shardwright.lowering.runtime.shared import Holders, Shared
from shardwright.lowering.runtime.spec import EntrySpec, Key, check_stages
from shardwright.lowering.store.foreign import ForeignCalls
from shardwright.lowering.store.parameter_store import ParameterStore
from shardwright.lowering.store.places import places
from shardwright.lowering.store.shown import ShownMasks
from shardwright.lowering.store.storage import Held, with_others
from shardwright.lowering.text.outside import find_inputs, find_outside
from shardwright.pcg import pieces
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.node import is_result, result_key
from shardwright.pcg.stages import Stages, cut
from shardwright.pcg.step.additive import find_additive
from shardwright.pcg.step.late import LOSS, check_backward, sums_of_loss
from shardwright.pcg.step.meshes import stage_meshes
from shardwright.pcg.step.parameters import find_parameters
from shardwright.pcg.step.precisions import Precision
from shardwright.pcg.step.time import as_run


class Entry:
    """The runner of one graph's steps on the parameters of a store. Every rank makes one, with the same graph.

    `batch` checks the batches; `runners` has one for each virtual stage of this rank, and `pipeline` connects them;
    `constants` are tensors that the program reads and that are not trained.

    Raises `DistributedError` if the number of ranks is not the mesh's. Raises `PlanError` if the graph is of another
    model than the store, wants another layout than the store has, cannot be run in microbatches, lacks a region to
    recompute, or if this device does not train in the precision.
    """

    def __init__(self, spec: EntrySpec, store: ParameterStore, stream: Stream) -> None:
        graph, self.execution = as_run(spec.graph, spec.execution).validate(), spec.execution
        check_stages(graph, self.execution, spec.precision)
        self.ranks = ranks = connect(stage_meshes(graph.mesh, self.execution), spec.timeout_s, spec.schedules)
        check_device(spec.precision, ranks.device.type)
        self.capture_check = spec.capture_check
        self.products: Precision | None = spec.precision if ranks.device.type == "cuda" else None
        set_products(self.products)
        stages = cut(graph, self.execution)
        self.graph = graph = replace(graph, mesh=ranks.mesh) if graph.mesh != ranks.mesh else graph
        self.store, wanted = store, places(graph, stages)
        given = {name: value.to(ranks.device) for name, value in spec.constants.items()}
        carried = {name: value for name, value in given.items() if name in wanted}
        store.join(wanted, ranks, carried, trains=spec.returned is None)
        self.constants = {name: value for name, value in given.items() if name not in wanted}
        share_values(self.constants, ranks)
        self._masks = ShownMasks(graph, store.held, self.constants)
        self.batch = BatchCheck(find_inputs(graph)[0], spec.options, ranks)
        self.key = Key(spec.training, tuple(sorted(self.batch.shapes.items())))
        sums = sums_of_loss(graph).values()
        self._loss_axis = ranks.merged(tuple(a for a in graph.mesh.names if a in sums)) if sums else None
        buffers = (name for name, _ in graph.outputs)
        in_turn = {name for name in buffers if self.execution.is_per_microbatch(name.rpartition(".")[0])}
        self._by_microbatch = in_turn | find_additive(graph).buffers
        self.foreign = ForeignCalls(store.foreign, graph, training=spec.training)
        self.runners = list[Runner]()
        self.pipeline: Pipeline | None = None
        if len(stages) > 1:
            self._share_groups(stages)
        for stage in range(ranks.stages.rank, len(stages), ranks.stages.size):
            of_stage = find_outside(stages.graphs[stage], self.execution, graph)
            self.runners.append(Runner(of_stage, ranks, self.constants, store.leaves(), self.foreign))
        if len(stages) > 1:
            self._run_in_stages(stages)
        self.drawing = Drawing(ranks, graph, stream)
        self._inputs = Inputs(self.batch, self.drawing, spec.check_inputs)
        self._returned, self._num_draws = spec.returned, num_draws(graph)

    def _share_groups(self, stages: Stages) -> None:
        """Make the groups of all stages, since every rank must take part in making each."""
        by_stage = [find_parameters(graph, self.execution).by_leaf.values() for graph in stages.graphs]
        for sums in sorted({p.sums for found in by_stage for p in found if p.sums}):
            self.ranks.merged(sums)

    def _run_in_stages(self, stages: Stages) -> None:
        """Make the pipeline, which connects this rank's runners with other stages."""
        ranks = self.ranks
        shared_by_stages = Shared(ranks, dict(self._shared(stages)))
        for runner in self.runners:
            runner.reducer.hold_back = shared_by_stages.hold_back
        self.pipeline = Pipeline(stages, self.runners, ranks, self._loss_axis, self._by_microbatch, shared_by_stages)

    def _shared(self, stages: Stages) -> Iterator[tuple[str, Holders]]:
        """Yield the parameters that this stage trains together with others, by name."""
        ranks = self.ranks
        for leaf, holders in stages.shared.items():
            if (axis := ranks.across(holders)) is not None:
                kind = self.graph.types[leaf]
                yield self.held(leaf).name, Holders(holders, axis, pieces.Tensor(kind.shape, kind.layouts))

    def held(self, leaf: str) -> Held:
        """Return the store's parameter or buffer for a leaf of the graph."""
        return self.store.held[str(self.graph.by_name[leaf].attr("target"))]

    @property
    def runner(self) -> Runner:
        """The only runner, or that of the first chunk of this rank's pipeline stage."""
        return self.runners[0]

    def mark(self) -> None:
        """Give operators and blocks of the model names in the records of `torch.profiler`."""
        for runner in self.runners:
            runner.mark()

    def compile(self, **options: Any) -> None:
        """Run the program through `torch.compile` with these options."""
        if options.get("fullgraph") and any(runner.replaces for runner in self.runners):
            raise ShardwrightError(
                "compile(fullgraph=True): parameters are gathered, or values made again or offloaded, between the "
                "graphs of this program; leave fullgraph out"
            )
        for runner in self.runners:
            runner.compile(**options)
        if self.pipeline is not None:
            self.pipeline.stepped.clear()  # the next step loads other kernels

    # ---- steps ----

    def results(self, batch: Mapping[str, Any], *, gather: bool = False) -> object:
        """Return what the model returns for a batch. Tensors of which a rank has some rows are DTensors, or gathered.

        Every rank gathers.
        """
        assert self._returned is not None, "the program of a step gives its loss"
        with torch.inference_mode(False), torch.no_grad():
            (local,) = self._take(batch)
            if self.pipeline is None:
                outputs = self._run(local)
                self.runner.write_back({k: v for k, v in outputs.items() if not is_result(k)})
            else:
                outputs = self._in_stages(self.pipeline, [local], None)
            types = {key: self.graph.types[name].layouts for key, name in self.graph.outputs}
            keys = [result_key(i) for i in range(self._returned.size)]
            values = [with_others(outputs[k], types[k], self.ranks) for k in keys]
            if gather:
                with waiting("the gathering of results", self.ranks.timeout_s):
                    values = [x.full_tensor() if isinstance(x, DTensor) else x for x in values]
            return self._returned.filled(values)

    def loss(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss, with a backward, of a batch of global tensors or of this rank's own shards of them."""
        if torch.is_inference_mode_enabled():  # its tensors could not serve in later steps
            with torch.inference_mode(False), torch.no_grad():
                return self.loss(batch)
        local = self._take(batch)
        if torch.is_grad_enabled() and (self.pipeline is not None or (len(local) > 1 and self.runner.reducer.held)):
            with ExitStack() as stack:
                kept = list[Finished]()
                for runner in self.runners:
                    stack.enter_context(runner.reducer.keeping(kept))
                return hand_over(self._forward_backward(local, None), kept)
        if self.pipeline is not None:
            return self._in_stages(self.pipeline, local, None)[LOSS]
        if len(local) == 1:
            summand = self._forward(local[0])
        else:
            summand = self.runner.program.step(self._forward, _nothing, local, self.ranks.time)
        return summand if self._loss_axis is None else reduce(summand, self._loss_axis)

    def forward_backward(self, batch: Mapping[str, Any], scaler: torch.amp.GradScaler | None) -> Tensor:
        """Return the loss of a batch, detached, and add every parameter's gradient to its `grad`."""
        return self._forward_backward(self._take(batch), scaler)

    def _take(self, batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        if self.pipeline is not None:
            self.pipeline.check_alive()
        self.store.check()
        self._masks.check()
        check_products(self.products)
        with waiting("the comparison of inputs"):
            return self._inputs.take(batch)

    def _forward_backward(self, local: Sequence[Mapping[str, Tensor]], scaler: torch.amp.GradScaler | None) -> Tensor:
        """Run forward and backward of this rank's parts of the microbatches, and return the loss."""
        check_backward(self.graph)
        if self.pipeline is not None:
            if scaler is not None:  # the first call initialises the scale, and only the last stage has a loss to scale
                scaler.scale(torch.zeros((), device=self.ranks.device))
            return self._in_stages(self.pipeline, local, scaler.scale if scaler is not None else _as_it_is)[LOSS]
        work: Work | None = None

        def backward(summand: Tensor, loss: Tensor) -> None:
            nonlocal work
            with waiting("backward"):
                first, last = self._turn
                if self.runner.sums_loss(first=first, last=last):
                    work = start_total(loss, self._loss_axis)
                (summand if scaler is None else scaler.scale(summand)).backward()

        loss = self.runner.program.step(self._forward, backward, local, self.ranks.time)
        with waiting("backward"):
            if work is not None:
                work.wait()
        return loss

    def _in_stages(self, pipeline: Pipeline, local: Sequence[Mapping[str, Tensor]], scale: Scale | None) -> Outcome:
        """Run a step through stages, and return the loss or the model's results."""
        with (
            waiting(lambda: f"pipeline stage {self.ranks.stages.rank}, {pipeline.now}"),
            self.drawing.by_number(self._num_draws) as draw,
            self._compared(),
        ):
            return pipeline.step(local, draw, scale, self.drawing.alike)

    def _compared(self) -> AbstractContextManager[None]:
        """Compare what foreign parts give on all ranks, in the steps that compare inputs."""
        compares = self.foreign and self._inputs.compares
        return self.foreign.compared(self.ranks) if compares else nullcontext()

    @property
    def _turn(self) -> tuple[bool, bool]:
        """Return two flags: whether this is the first microbatch of a step, and whether it is the last."""
        time = self.ranks.time
        return (True, True) if time is None else (time.rank == 0, time.rank == time.size - 1)

    def _run(self, local: Mapping[str, Tensor]) -> dict[str, Any]:
        """Run forward of a microbatch, and return its outputs."""
        first, last = self._turn
        self.runner.blocks.begin(first=first, last=last)
        with self.drawing.microbatch(self._num_draws, first=first, last=last) as draw, self._compared():
            return self.runner.run(local, draw)

    def _forward(self, local: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of a microbatch, or this rank's summand of it."""
        (first, last), runner = self._turn, self.runner
        with waiting("forward"):
            outputs = self._run(local)
            loss = outputs.pop(LOSS)
            roots = [get_gradient_edge(loss)] if loss.requires_grad else []
            runner.reducer.watch(*roots, first=first, last=last)
            runner.write_back({k: v for k, v in outputs.items() if last or k in self._by_microbatch})
        return loss


def _as_it_is(loss: Tensor) -> Tensor:
    return loss


def _nothing(summand: Tensor, loss: Tensor) -> None:
    """Run no backward."""
