"""Steps of a lowered program: forward and backward of each microbatch, and what the ranks sum up of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardwright.lowering.collectives import reduce
from shardwright.lowering.drawing import Drawing
from shardwright.lowering.handover import hand_over
from shardwright.lowering.inputs import Inputs
from shardwright.lowering.movement import Axis
from shardwright.lowering.original import Original
from shardwright.lowering.parts import Fixed, refuse_own_hooks
from shardwright.lowering.pipeline import Pipeline, Scale
from shardwright.lowering.precision import check_products
from shardwright.lowering.ranks import Ranks
from shardwright.lowering.reducer import Finished
from shardwright.lowering.runner import Runner
from shardwright.lowering.storage import Held, refuse_replaced, refuse_thawed
from shardwright.lowering.waits import blame
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.late import LOSS, check_backward
from shardwright.pcg.step.precisions import Precision


class Training(Fixed):
    """What runs the steps of a lowered module, which gives it all that it needs."""

    graph: Graph
    ranks: Ranks
    scaler: torch.amp.GradScaler | None
    _inputs: Inputs
    _original: Original
    _runners: Sequence[Runner]
    _held: dict[str, Held]
    _pipeline: Pipeline | None
    _frozen: Sequence[Held]
    _trained: Sequence[Held]
    _loss_axis: Axis | None
    _products: Precision | None
    _drawing: Drawing
    _num_draws: int
    _by_microbatch: Collection[str]

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
        raise ShardwrightError(
            "a compiled model is not copied or pickled, as its program belongs to this process: for an average keep "
            "{name: p.detach().clone() for name, p in parallel.named_parameters()}, and load that where it is to be "
            "evaluated; save parallel.state_dict()"
        )

    def forward(self, **batch: Any) -> Tensor:
        """The loss of a batch of global tensors, or of this rank's own shards of them."""
        if torch.is_inference_mode_enabled():  # its tensors could not serve in later steps
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(**batch)
        local = self._take(batch)
        if torch.is_grad_enabled() and (self._pipeline is not None or (len(local) > 1 and self._runner.reducer.held)):
            with ExitStack() as stack:
                kept = list[Finished]()
                for runner in self._runners:
                    stack.enter_context(runner.reducer.keeping(kept))
                return hand_over(self._forward_backward(local, None), kept)
        if self._pipeline is not None:
            return self._in_stages(self._pipeline, local, None)
        if len(local) == 1:
            summand = self._forward(local[0])
        else:
            summand = self._runner.program.step(self._forward, _nothing, local, self.ranks.time)
        return summand if self._loss_axis is None else reduce(summand, self._loss_axis)

    def forward_backward(self, **batch: Any) -> Tensor:
        """The loss of a batch, detached, with every parameter's gradient added to its `grad`.

        Raises `BatchError` where the batch is not what was captured, or ranks pass what does not fit together (see
        `check_inputs` of `shardwright.compile`), `DistributedError` where another rank failed.
        """
        refuse_own_hooks(self)
        return self._forward_backward(self._take(batch), self.scaler)

    def _take(self, batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        if self._pipeline is not None:
            self._pipeline.check_alive()
        refuse_thawed(self._frozen)
        if torch.is_grad_enabled():
            self._original.guard(self._held.values())
        refuse_replaced((held.name, held.outside, held.memory) for held in self._trained)
        check_products(self._products)
        try:
            return self._inputs.take(batch)
        except RuntimeError as error:
            raise blame(error, "the comparison of inputs") from error

    def _forward_backward(self, local: Sequence[Mapping[str, Tensor]], scaler: torch.amp.GradScaler | None) -> Tensor:
        """The loss of this rank's parts of the microbatches."""
        check_backward(self.graph)
        if self._pipeline is not None:
            if scaler is not None:  # its first call makes its scale, and only the last stage has a loss to scale
                scaler.scale(torch.zeros((), device=self.ranks.device))
            return self._in_stages(self._pipeline, local, scaler.scale if scaler is not None else _as_it_is)
        work: dist.Work | None = None

        def backward(summand: Tensor, loss: Tensor) -> None:
            nonlocal work
            try:
                if self._turn[1]:
                    work = self._start_sum(loss)
                (summand if scaler is None else scaler.scale(summand)).backward()
            except RuntimeError as error:
                raise blame(error, "backward") from error

        loss = self._runner.program.step(self._forward, backward, local, self.ranks.time)
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise blame(error, "backward") from error
        return loss

    def _in_stages(self, pipeline: Pipeline, local: Sequence[Mapping[str, Tensor]], scale: Scale | None) -> Tensor:
        """The loss of a step whose microbatches go through pipeline stages."""
        try:
            with self._drawing.by_number(self._num_draws) as draw:
                return pipeline.step(local, draw, scale)
        except RuntimeError as error:
            raise blame(error, f"pipeline stage {self.ranks.stages.rank}, {pipeline.now}") from error

    def _start_sum(self, loss: Tensor) -> dist.Work | None:
        """Sum the loss over the ranks, in place."""
        if self._loss_axis is None or self._loss_axis.group is None:
            return None
        return dist.all_reduce(loss, group=self._loss_axis.group, async_op=True)

    @property
    def _runner(self) -> Runner:
        """The only one, or that of the first chunk of this rank's pipeline stage."""
        return self._runners[0]

    @property
    def _turn(self) -> tuple[bool, bool]:
        """Whether this is the first microbatch of a step, and the last."""
        time = self.ranks.time
        return (True, True) if time is None else (time.rank == 0, time.rank == time.size - 1)

    def _forward(self, local: Mapping[str, Tensor]) -> Tensor:
        """The loss of a microbatch, or this rank's summand of it."""
        first, last = self._turn
        runner = self._runner
        runner.blocks.begin(first=first, last=last)
        try:
            with self._drawing.microbatch(self._num_draws, first=first, last=last) as draw:
                outputs = runner.run(local, draw)
            loss = outputs.pop(LOSS)
            roots = [get_gradient_edge(loss)] if loss.requires_grad else []
            runner.reducer.watch(*roots, first=first, last=last)
            runner.write_back({k: v for k, v in outputs.items() if last or k in self._by_microbatch})
        except RuntimeError as error:
            raise blame(error, "forward") from error
        return loss


def _as_it_is(loss: Tensor) -> Tensor:
    return loss


def _nothing(summand: Tensor, loss: Tensor) -> None:
    """No backward."""
