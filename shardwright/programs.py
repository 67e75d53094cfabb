"""The programs of a compiled model: one for each mode and shape of batch, over the same parameters.

    first batch ──plan, or search──▶ Plan ──▶ EntrySpec ──ParallelModule.enter──▶ layouts of parameters, first program
    other batch or mode ──reshaped──▶ Plan over these layouts ──▶ EntrySpec ──▶ another program

Rank 0 captures and plans; every rank gets its plan. The ranks meet before, so that a rank with a batch of its own is
told from ranks that wait for it in a step.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.cost.clusters.cluster import Cluster
from shardwright.kept import StoredPlan, find, keep, key_of, traced
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.picked import ByGroup
from shardwright.lowering.ranks.waits import meet, start_up, waiting
from shardwright.lowering.runtime.inputs import CheckInputs
from shardwright.lowering.runtime.spec import EntrySpec, Maker
from shardwright.lowering.store.deferred import DeferredValues
from shardwright.options import CheckCapture, PlanOptions
from shardwright.pcg.capture.alike import ForwardTrace
from shardwright.pcg.capture.capture import Captured, baked_in, bind_arguments, captured_again
from shardwright.pcg.capture.returned import Returned
from shardwright.pcg.capture.with_loss import LossFunction, with_loss, without_loss
from shardwright.pcg.errors import BatchError, InfeasibleError, PlanError
from shardwright.pcg.foreign import Call, calls
from shardwright.planning import captured_for, certified_by, check_schedules, prove, statistics_of
from shardwright.ranks import batch_facts, check_world, from_rank_0, model_facts, same_on_all_ranks
from shardwright.search.collector import collector_paused
from shardwright.search.plan import Plan
from shardwright.verifier.choices import Certified

if TYPE_CHECKING:
    from shardwright.search.tree.planner import Progress

_T = TypeVar("_T")
MANY = 16
"""The number of programs from which on a warning says how many there are: each holds its code, and took a capture."""
Shape = tuple[Mapping[str, Any], float]
"""A batch of global tensors, and the weight of its step among those of all shapes."""
_Made = tuple[Plan, dict[str, Tensor]]
"""A plan, and the tensors that its program reads beside parameters and buffers."""


class Programs:
    """The maker of a compiled model's programs. It does not keep the model alive."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        target: Cluster,
        request: PlanOptions,
        given: Plan | None,
        progress: Progress | None,
        timeout_s: float,
        check_inputs: CheckInputs,
        check_capture: CheckCapture,
        source: DeferredValues | None = None,
    ) -> None:
        """`loss_fn`: the loss of what the model returns, where that is none (`pcg.capture.with_loss`).

        `target`: the cluster to plan for. `given`: the plan of the first batch; None: it is searched. `source`: where
        values come from that the model does not have.
        """
        self._loss_fn = loss_fn
        self._model, self._modes = weakref.ref(model), {name: m.training for name, m in model.named_modules()}
        self._target, self._asked, self._given, self._progress = target, request, given, progress
        self._timeout_s = timeout_s
        self._check_inputs: CheckInputs = check_inputs
        self._check_capture: CheckCapture = check_capture
        self._source = source
        self._first: Plan | None = None
        self._checked, self._made = set[bool](), 1

    @property
    def maker(self) -> Maker:
        """Return the functions that the compiled model calls for a program that it lacks."""
        return Maker(self.for_batch, self.for_evaluation, self.predicted, self._model)

    @collector_paused()
    def for_batch(self, parallel: ParallelModule, batch: Mapping[str, Any]) -> None:
        """Enter a program for a batch of global tensors, in the mode of the module. Every rank calls it."""
        with _ordinary():
            batch = _as_ordinary(batch)
            if self._first is None:
                self.first(parallel, (), batch)
            else:
                self._another(parallel, batch, self._first)

    def first(self, parallel: ParallelModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Enter the program that fixes the layouts of parameters."""
        model = with_loss(self._alive(), self._loss_fn)
        with start_up(self._timeout_s), _in_mode(model, self._modes, training=parallel.training):
            same_on_all_ranks(lambda: model_facts(model, args, kwargs))
            agreed, constants = from_rank_0(lambda: self._planned(model, args, kwargs), "the plan")
            if agreed.idle:
                from shardwright.reports.wording import idle  # of few plans

                size = self._target.num_devices
                use_all = f"use all with a mesh of {size}, such as mesh={{'x': {size}}}"
                check_world(agreed.cluster.num_devices, f" and leaves {idle(agreed)}", use_all)
            parallel.enter(self._spec(agreed, constants, baked_in(model, args, kwargs), training=model.training))
        self._first = agreed

    def together(self, parallel: ParallelModule, shapes: Sequence[Shape]) -> None:
        """Enter programs for several batches, in whose layouts of parameters the weighted sum of steps is least."""
        model = with_loss(self._alive(), self._loss_fn)
        with start_up(self._timeout_s), _in_mode(model, self._modes, training=parallel.training):
            for batch, _ in shapes:
                same_on_all_ranks(lambda batch=batch: model_facts(model, (), batch))
            made = from_rank_0(lambda: self._planned_together(model, shapes), "the plans of all shapes")
            for (batch, _), one in zip(shapes, made, strict=True):
                parallel.enter(self._spec(*one, baked_in(model, (), batch), training=model.training))
        self._first, self._made = made[0][0], len(made)

    @collector_paused()
    def predicted(self, batches: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the predicted seconds of a training step with each of these batches. Every rank calls it."""
        first = self._first
        assert first is not None, "the first program fixes the layouts of parameters"

        def steps() -> list[float]:
            model = with_loss(self._alive(), self._loss_fn)
            with _in_mode(model, self._modes, training=True):
                return [self._reshaped(model, batch, first)[0].prediction.step_s for batch in batches]

        meet(what := "the times of batches of other shapes", self._timeout_s)
        with _ordinary(), waiting(what, self._timeout_s):
            return from_rank_0(steps, what)

    def _another(self, parallel: ParallelModule, batch: Mapping[str, Any], first: Plan) -> None:
        """Enter a program for another batch or mode, over the parameters as they are stored."""
        training = parallel.training

        def planned() -> _Made:
            model = with_loss(self._alive(), self._loss_fn)
            with _in_mode(model, self._modes, training=training):
                return self._kept_or_made(model, batch, first)

        facts = batch_facts(batch) | {"the mode": "train" if training else "eval"}
        with self._agreed("a program for a batch of another shape, or another mode", facts, planned) as made:
            parallel.enter(self._spec(*made, parallel.options, training=training))

    @collector_paused()
    def for_evaluation(self, parallel: ParallelModule, batch: Mapping[str, Any]) -> None:
        """Enter a program that gives what the model returns for a batch of global tensors, in eval mode."""
        first = self._first
        assert first is not None, "the first program fixes the layouts of parameters"
        batch = _as_ordinary(batch)

        def planned() -> tuple[_Made, Returned, dict[str, Any]]:
            returned, model = Returned(), self._alive()
            model = model if self._loss_fn is None else without_loss(model)
            with _in_mode(model, self._modes, training=False), _without_gradients(model):
                plan, captured = self._reshaped(model, batch, first, returned)
                return (plan, self._constants(captured)), returned, baked_in(model, (), batch)

        what = "a program that gives the model's results"
        with _ordinary(), self._agreed(what, batch_facts(batch), planned) as (made, returned, options):
            parallel.enter(replace(self._spec(*made, options, training=False), returned=returned))

    @contextmanager
    def _agreed(self, what: str, facts: Mapping[str, str], make: Callable[[], _T]) -> Generator[_T]:
        """Meet the other ranks, compare facts with theirs, and yield rank 0's object, of which a program is made."""
        meet(what, self._timeout_s)
        with waiting(what, self._timeout_s):
            same_on_all_ranks(lambda: facts)
            yield from_rank_0(make, f"the plan of {what}")
        self._made += 1
        if self._made >= MANY:
            warnings.warn(
                f"this is program {self._made} of the compiled model, one for each shape of batch and mode; pad "
                "batches to a few shapes, as each takes a capture and stays in memory",
                stacklevel=2,
            )

    def _spec(
        self, plan: Plan, constants: Mapping[str, Tensor], options: Mapping[str, Any], *, training: bool
    ) -> EntrySpec:
        return EntrySpec(
            plan.graph, constants, options, plan.execution, plan.execution.base, self._check_inputs, self._timeout_s,
            training=training, capture_check=plan.capture_check, schedules=_schedules_of(plan),
        )  # fmt: skip

    # ---- on rank 0 ----

    def _planned(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Made:
        certified = certified_by(self._asked.rules, self._progress)
        if self._given is None:
            from shardwright.searching import searched  # a run with a given plan needs no search

            plan, captured = searched(
                model, self._target, args, kwargs, certified, self._asked, self._progress, self._check_capture
            )
            _check_feasible(plan)
        else:
            plan, captured = self._checked_plan(self._given, model, args, kwargs, certified)
        self._checked.add(model.training)
        _say_what_is_left_out(model, captured)
        return plan, self._constants(captured)

    def _checked_plan(
        self, given: Plan, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], certified: Certified
    ) -> tuple[Plan, Captured]:
        """Prove a plan, of the model's graph as an earlier run captured and compared it, or as it is captured now."""
        batch = bind_arguments(model, args, kwargs)
        trace = None if self._asked.strict else traced(model, batch, given)
        key = key_of(trace, given)
        stored = None if key is None else find(key, given)
        if stored is not None and _is_proven(StoredPlan(given, stored.captured), certified):
            captured = captured_again(stored.captured, model, batch, given.precision)
        else:
            known = calls(given.graph)
            stored, captured = None, self._captured(model, args, kwargs, given, known=known, trace=trace)
            prove(given, captured.graph, certified)
        check_schedules(given.cluster)
        checks = [plan.capture_check for plan in (given, *([] if stored is None else [stored.plan]))]
        check = next((one for one in checks if one is not None and one.equal), None)
        checked = replace(given, capture_check=check) if check else self._compared(given, model, captured, args, kwargs)
        is_whole = not captured.constants and not captured.beside
        if key is not None and is_whole and (stored is None or stored.plan.capture_check != checked.capture_check):
            keep(key, StoredPlan(checked, captured.graph), given)
        return checked, captured

    def _planned_together(self, model: nn.Module, shapes: Sequence[Shape]) -> list[_Made]:
        from shardwright.search.tree.reshaped import best_together
        from shardwright.searching import searched

        certified = certified_by(self._asked.rules, self._progress)
        known = [
            searched(model, self._target, (), batch, certified, self._asked, self._progress, self._check_capture)
            for batch, _ in shapes
        ]
        weighted = [(plan, captured.graph, weight) for (plan, captured), (_, weight) in zip(known, shapes, strict=True)]
        plans = best_together(weighted, certified, certified.by_name())
        for plan, (_, captured) in zip(plans, known, strict=True):
            prove(plan, captured.graph, certified)
            _check_feasible(plan)
        self._checked.add(model.training)
        _say_what_is_left_out(model, known[0][1])
        return [(plan, self._constants(captured)) for plan, (_, captured) in zip(plans, known, strict=True)]

    def _kept_or_made(self, model: nn.Module, batch: Mapping[str, Any], first: Plan) -> _Made:
        """Return the plan of another batch as an earlier run kept it, or a new one, and keep that."""
        trace = traced(model, batch, first)
        key = key_of(trace, first)
        stored = None if key is None else find(key, first)
        if stored is not None and self._is_right(stored, model):
            return stored.plan, {}
        plan, captured = self._reshaped(model, batch, first, trace=trace)
        if key is not None and not captured.constants:
            keep(key, StoredPlan(plan, captured.graph), first)
        return plan, self._constants(captured)

    def _is_right(self, stored: StoredPlan, model: nn.Module) -> bool:
        """Return whether a kept plan is proven here, and its capture compared if that is asked for."""
        certified, check = certified_by(self._asked.rules, self._progress), stored.plan.capture_check
        if not _is_proven(stored, certified):
            return False
        compared = model.training in self._checked or (check is not None and check.equal)
        return compared or self._check_capture == "never"

    def _reshaped(
        self, model: nn.Module, batch: Mapping[str, Any], first: Plan, returned: Returned | None = None,
        trace: ForwardTrace | None = None,
    ) -> tuple[Plan, Captured]:  # fmt: skip
        from shardwright.search.tree.reshaped import reshaped  # the first program needs none

        certified = certified_by(self._asked.rules, self._progress)
        captured = self._captured(model, (), batch, first, returned=returned, trace=trace)
        plan = reshaped(first, captured.graph, certified, certified.by_name())
        prove(plan, captured.graph, certified)
        _check_feasible(plan)
        if self._progress and plan.report.rows:
            self._progress(
                "a batch of {} rows runs as one of {}, in which the added ones are masked".format(*plan.report.rows)
            )
        if returned is None and model.training not in self._checked:
            plan = self._compared(plan, model, captured, (), batch)
            self._checked.add(model.training)
        return plan, captured

    def _captured(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Plan,
        known: Sequence[Call] = (), returned: Returned | None = None, trace: ForwardTrace | None = None,
    ) -> Captured:  # fmt: skip
        precisions = plan.precision, statistics_of(plan)
        return captured_for(model, args, kwargs, self._asked, self._progress, *precisions, known, returned, trace)

    def _compared(
        self, plan: Plan, model: nn.Module, captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Plan:
        from shardwright.checking import check_capture_of  # most plans are compared before a run

        check = check_capture_of(model, captured, args, kwargs, self._check_capture, self._progress)
        return replace(plan, capture_check=check)

    def _constants(self, captured: Captured) -> dict[str, Tensor]:
        values = captured.constants if self._source is None else self._source.real(captured.constants)
        return {name: value.cpu() for name, value in values.items()}

    def _alive(self) -> nn.Module:
        """Return the model. Raises `BatchError` where nothing holds it any more."""
        if (model := self._model()) is None:
            raise BatchError(
                "batch: it is of another shape, or for another mode, than all programs, and the model of which one "
                "would be made is gone; keep the model that was compiled, or call the compiled model once with each "
                "shape and mode before you let go of it"
            )
        return model


@contextmanager
def _in_mode(model: nn.Module, modes: Mapping[str, bool], *, training: bool) -> Generator[None]:
    """Put a model into a mode for a while: that of its modules when it was compiled, or all in the other one."""
    before = [(module, module.training) for module in model.modules()]
    as_compiled = modes[""] == training
    for name, module in model.named_modules():
        module.training = modes.get(name, training) if as_compiled else training
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def _without_gradients(model: nn.Module) -> Generator[None]:
    """Let no parameter require a gradient for a while, so that a program has no backward."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _ordinary() -> Generator[None]:
    """Capture as in training, whatever the call is made under."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        yield


def _as_ordinary(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without tensors of inference mode, of which nothing can be captured."""
    return tree_map_only(Tensor, lambda x: x.clone() if x.is_inference() else x, dict(batch))


def _schedules_of(plan: Plan) -> list[ByGroup]:
    if plan.cluster.schedules is None:
        return []
    from shardwright.search.picked import by_stage  # it prices them, and most plans have none

    return by_stage(plan)


def _is_proven(stored: StoredPlan, certified: Certified) -> bool:
    try:
        prove(stored.plan, stored.captured, certified)
    except PlanError:
        return False
    return True


def _say_what_is_left_out(model: nn.Module, captured: Captured) -> None:
    """Warn of values that the model returns beside its loss."""
    if captured.beside:
        warnings.warn(
            f"{type(model).__name__} returns {', '.join(captured.beside)} beside its loss, which the compiled model "
            "does not compute in a step: it returns the loss alone; parallel.evaluate(**batch) returns all of them",
            stacklevel=2,
        )


def _check_feasible(plan: Plan) -> None:
    """Raise `InfeasibleError` where the plan needs more memory than the devices have."""
    from shardwright.reports.facts import memory_verdict
    from shardwright.reports.wording import infeasible

    if memory_verdict(plan) == "does not fit":
        raise InfeasibleError(infeasible(plan), plan)
