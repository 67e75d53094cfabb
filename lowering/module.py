"""`ParallelModule`: a lowered plan as an `nn.Module` that trains on torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.lowering import private
from shardwright.lowering.dtensors.mending import mend_dtensors
from shardwright.lowering.random.drawing import Stream
from shardwright.lowering.ranks.agreement import order_of_rank_0
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.ranks.waits import TIMEOUT_S
from shardwright.lowering.runtime.entries import Entries
from shardwright.lowering.runtime.entry import Entry
from shardwright.lowering.runtime.inputs import CheckInputs
from shardwright.lowering.runtime.measures import measured
from shardwright.lowering.runtime.spec import EntrySpec, Maker
from shardwright.lowering.store.parameter_store import ParameterStore
from shardwright.lowering.store.parts import Fixed, bake, mirror, names_of, refuse_own_hooks, show_carried
from shardwright.lowering.store.sources import ModelValues, Source
from shardwright.lowering.text.program import Program
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.precisions import Precision
from shardwright.search.plan import CaptureCheck

_OF_AN_ENTRY = {
    "graph", "ranks", "execution", "capture_check", "program", "source", "input_layouts", "options", "elsewhere",
}  # fmt: skip


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
    """Return this rank's program for a parallel graph, with this rank's shards of the model's parameters and buffers.

    Every rank must call it with the same graph and the same model. `constants` and `options` are as in
    `pcg.capture.capture.Captured`. `precision` is the precision of the capture: casts are in the graph, so it only
    decides the format of matrix products. `execution` decides what backward recomputes, the stages and the schedule.
    `check_inputs` is as in `shardwright.compile`. Raises `DistributedError` if the number of ranks is not the mesh's.
    Raises `PlanError` if the graph is of another model, cannot be run in microbatches or lacks a region to recompute,
    or if this device does not train in the precision.
    """
    known = constants or {}, options or {}
    spec = EntrySpec(graph, *known, execution, precision, check_inputs, timeout_s, training=model.training)
    parallel = ParallelModule(model)
    parallel.enter(spec)
    return parallel


class ParallelModule(Fixed):
    """A model lowered onto this rank. Parameters carry the model's own names and are DTensors on one mesh.

    `forward_backward(**batch)` computes the loss and every gradient; `parallel(**batch)` returns the loss, and its
    `backward()` does the rest. `input_layouts` are for callers that pass a rank's own shard. With a `scaler`,
    `forward_backward` scales the loss, and `scaler.step(optimizer)` undoes this in the gradients. `elsewhere`: the
    names of what other pipeline stages have. `capture_check`: how the captured graph compared with an eager step.

    A batch contains all microbatches. With several, `parallel(**batch)` runs their backwards itself, and `backward()`
    of its loss only scales the gradients and hands them over (so with fp16, use `forward_backward`).

    A model that was compiled without a batch captures and plans at its first call. Its parameters exist from the start
    and remain the same objects. Until then they are replicated and share the model's storage.
    """

    def __init__(
        self, model: nn.Module, maker: Maker | None = None, *, source: Source | None = None, stands_in: bool = False,
        order: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """Make a module over a store of the model's values, or of another `source`; `enter` gives it a program.

        With a `maker`, a call for whose batch and mode there is no program does so. `stands_in`: whether parameters are
        to exist before the first program. `order`: `names_of` the model on rank 0.
        """
        super().__init__()
        mend_dtensors()
        self.training = model.training
        self.scaler: torch.amp.GradScaler | None = None
        self._model: tuple[nn.Module, ...] = (model,)  # a tuple, so that the model is not a submodule; () once planned
        self._store = ParameterStore(source or ModelValues(model), model)
        self.entries = Entries()
        self._evaluations = Entries()
        self.stream, self.maker = Stream(), maker
        self._modes = {"": self.training}  # as compiled, by the names of modules, to which train or eval comes back
        self._prepare: Callable[[Entry], None] | None = None
        if stands_in:
            self._store.stand_in()
            mirror(self, model, self._store.outside, names_of(model) if order is None else order)
            bake(self, model)

    def enter(self, spec: EntrySpec) -> None:
        """Add a program over the parameters of this module, for another batch or mode. All ranks must call it.

        The first program fixes the layouts of parameters. Raises the errors of `Entry`.
        """
        self._store.foreign.take(spec.graph, *self._model)
        entry = Entry(spec, self._store, self.stream)
        if self._prepare is not None:
            self._prepare(entry)
        if self._model:
            self._show(entry.ranks)
            self.__dict__["training"] = spec.training
            self._modes = {name: module.training for name, module in self.named_modules()}
        (self.entries if spec.returned is None else self._evaluations).add(entry)

    def _show(self, ranks: Ranks) -> None:
        """Show the store's parameters and buffers under the model's names."""
        (model,), self._model = self._model, ()
        order = order_of_rank_0(names_of(model), ranks)
        mirror(self, model, self._store.outside, order)
        show_carried(self, {name: self._store.held[name].outside for name in self._store.carried})
        bake(self, model)

    def _for(self, batch: Mapping[str, Any]) -> Entry:
        """Return the entry for a batch; one that is missing is made, if the module can."""
        if self.maker is not None and (not self.entries or self.entries.lacks(batch, training=self.training)):
            if self._store.ranks is None:
                self._store.tell_source()
            self.maker.for_batch(self, self.entries.globally(batch))
        return self.entries.of(batch, training=self.training)

    # ---- steps ----

    def forward(self, **batch: Any) -> Tensor:
        """Return the loss of a batch of global tensors, or of this rank's own shards of them."""
        return self._for(batch).loss(batch)

    def forward_backward(self, **batch: Any) -> Tensor:
        """Return the loss of a batch, detached, and add every parameter's gradient to its `grad`.

        Raises `BatchError` if the batch differs from the captured one, or if the ranks' inputs do not fit together (see
        `check_inputs` of `shardwright.compile`). Raises `DistributedError` if another rank failed.
        """
        refuse_own_hooks(self)
        return self._for(batch).forward_backward(batch, self.scaler)

    def evaluate(self, *, metrics: Any = None, gather: Any = False, **batch: Any) -> Any:  # noqa: ANN401 - `**batch` may be typed; results
        """Return what the model returns in eval mode, without gradients: logits, a loss, any nest of them.

        A tensor whose rows the ranks can share is a DTensor of these; others are whole on every rank, in all stages.
        With `gather`, all tensors are whole on every rank, under any plan. Every rank calls it.
        Labels may be left out where the model does without. Other values than tensors are those given to `compile`, or
        those passed. With `metrics`, returns what it makes of results row by row, whole (`runtime.measures`).

        Raises `AttributeError` before the first step. Raises `ShardwrightError` if the module was not made by
        `shardwright.compile`.
        """
        if self.maker is None:
            raise ShardwrightError("evaluate: only shardwright.compile gives modules that return more than their loss")
        self._planned("evaluate")
        batch = self.entries.with_options(batch)
        if (entry := self._evaluations.find(batch)) is None:
            self.maker.for_evaluation(self, batch)
            entry = self._evaluations.find(batch)
        assert entry is not None
        return measured(metrics, entry.results(batch, gather=gather), batch, entry.ranks)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before."""
        self._planned("clip_grad_norm_")
        return self._store.clip(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def train(self, mode: bool = True) -> Fixed:
        """Set the mode, which is part of a program. A program that is missing is made at the next call, if it can."""
        if mode == self.training or not (self.maker or self.entries.has_mode(training=mode)):
            return super().train(mode)
        for name, module in self.named_modules():
            module.__dict__["training"] = self._modes.get(name, mode) if mode == self._modes[""] else mode
        return self

    # ---- what users look at ----

    def _planned(self, what: str) -> Entry:
        """Return the first entry. Raises `AttributeError` if there is none."""
        for entry in self.entries:
            return entry
        raise AttributeError(
            f"{what}: a model that is compiled without a batch has no plan before its first call; call it first, or "
            "give compile the batch, as kwargs=batch"
        )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name in _OF_AN_ENTRY:  # the property has raised this error, which torch discards
            self._planned(name)
        return super().__getattr__(name)

    @property
    def graph(self) -> Graph:
        return self._planned("graph").graph

    @property
    def ranks(self) -> Ranks:
        return self._planned("ranks").ranks

    @property
    def execution(self) -> Execution:
        return self._planned("execution").execution

    @property
    def capture_check(self) -> CaptureCheck | None:
        return self._planned("capture_check").capture_check

    @property
    def elsewhere(self) -> set[str]:
        self._planned("elsewhere")
        return self._store.elsewhere

    @property
    def input_layouts(self) -> dict[str, Layouts]:
        """The layout of each tensor of the batch, by mesh axis."""
        return self._planned("input_layouts").batch.layouts

    @property
    def options(self) -> Mapping[str, Any]:
        """The values of the batch that are no tensors, which are part of the program."""
        return self._planned("options").batch.options

    @property
    def program(self) -> Program:
        """This rank's program."""
        return self._planned("program").runner.program

    @property
    def source(self) -> str:
        """The program as readable Python; `program.write(path)` puts it into a file."""
        return self._planned("source").runner.program.source

    def extra_repr(self) -> str:
        if not self.entries:
            return "to be planned at its first call"
        return f"mesh={self.graph.mesh}, rank={dist.get_rank()}, device={self.ranks.device}"

    # ---- state ----

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state by the model's own names; `torch.distributed.checkpoint` loads it under any other plan."""
        return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> private.IncompatibleKeys:
        """Load whole tensors (a single-process checkpoint) or DTensors of any layout, in place. Every rank calls it.

        If one rank cannot load its state, or was given other names than the others, raises a `ShardwrightError` on all
        ranks, and loads nothing.
        """
        if assign:
            raise ShardwrightError("load_state_dict(assign=True) would cut the program off its parameters; drop assign")
        return self._store.load(state_dict, self.state_dict(), strict=strict)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
        raise ShardwrightError(
            "a compiled model is not copied or pickled, as its program belongs to this process: for an average keep "
            "{name: p.detach().clone() for name, p in parallel.named_parameters()}, and load that where it is to be "
            "evaluated; save parallel.state_dict()"
        )

    # ---- how the program runs ----

    def mark(self) -> None:
        """Give operators and blocks of the model names in the records of `torch.profiler`: `shardwright …`.

        This undoes `compile`.
        """
        self._planned("mark")
        self._prepare_all(Entry.mark)

    def compile(self, **options: Any) -> None:
        """Run the program through `torch.compile` with these options; the runtime around it does not change.

        Blocks of the model are compiled one by one, and equal ones once, so a deeper model takes no longer. The
        gathering of parameters and the recomputation of values stay outside the compiled graphs. Inductor draws other
        masks than a single process does; with its setting `fallback_random` it draws the same. A model that was
        compiled without a batch is compiled by torch at its first call.
        """
        self._prepare_all(lambda entry: entry.compile(**options))

    def _prepare_all(self, prepare: Callable[[Entry], None]) -> None:
        """Call `prepare` for every entry, and for entries to come."""
        for entry in (*self.entries, *self._evaluations):
            prepare(entry)
        self._prepare = prepare
