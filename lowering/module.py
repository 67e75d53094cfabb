"""`ParallelModule`: a lowered plan as an `nn.Module` that trains on torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.lowering import private
from shardwright.lowering.agreement import share_values
from shardwright.lowering.batch import BatchCheck, find_inputs
from shardwright.lowering.blocks import Blocks
from shardwright.lowering.buffers import SlicedParameter
from shardwright.lowering.checkpoint import make_checkpointable
from shardwright.lowering.clipping import clip_gradients
from shardwright.lowering.collectives import reduce
from shardwright.lowering.emit import emit
from shardwright.lowering.exact import Draw, num_draws, step_draws
from shardwright.lowering.handover import hand_over
from shardwright.lowering.launch import TIMEOUT_S, Ranks, connect
from shardwright.lowering.outside import find_outside
from shardwright.lowering.precision import check_device, tf32
from shardwright.lowering.program import Program, compile_source, left_to_python
from shardwright.lowering.reducer import Reducer
from shardwright.lowering.saved import Saved
from shardwright.lowering.storage import Held, check_model, hold_buffer, hold_parameter, local_part
from shardwright.pcg.capture import names_by_first, tied_names
from shardwright.pcg.errors import DistributedError, ShardwrightError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts, R
from shardwright.pcg.mesh import TIME
from shardwright.pcg.step.execution import DEFAULT, Execution, Precision
from shardwright.pcg.step.late import LOSS, sink_reductions
from shardwright.pcg.step.parameters import Parameter, module_block
from shardwright.pcg.step.time import check_time


def lower(
    graph: Graph,
    model: nn.Module,
    *,
    constants: Mapping[str, Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    precision: Precision | None = None,
    timeout_s: float = TIMEOUT_S,
    execution: Execution = DEFAULT,
) -> ParallelModule:
    """This rank's program for a parallel graph, with this rank's shards of the model's parameters and buffers.

    Every rank calls it with the same graph and the same model. `constants` and `options` are those of
    `pcg.capture.Captured`; `precision` is that under which it was captured: casts are in the graph, so it only says in
    what matrix products run. `execution` says what backward makes again. Raises `DistributedError` where the number of
    ranks is not the mesh's, `PlanError` where the graph is not of this model, cannot be run in microbatches, has not
    what is to be made again, or this device does not train in the precision.
    """
    graph = sink_reductions(graph).validate()
    check_time(graph)
    ranks = connect(graph.mesh, timeout_s)
    check_device(precision, ranks.device)
    constants, options = constants or {}, options or {}
    return ParallelModule(graph, model, ranks, constants, options, execution, in_tf32=precision == "tf32")


class ParallelModule(nn.Module):
    """A model lowered onto this rank. Parameters carry the model's own names and are DTensors on one mesh.

    `forward_backward(**batch)` computes the loss and every gradient; `parallel(**batch)` returns the loss, and its
    `backward()` does the rest. `source` is the program's text; `input_layouts` says how each tensor of the batch is
    laid out, for those who pass a rank's own shard of it instead of the global tensor. With a `scaler`,
    `forward_backward` scales the loss before its backward; `scaler.step(optimizer)` undoes that in the gradients.

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
        *,
        in_tf32: bool = False,
    ) -> None:
        super().__init__()
        self.scaler: torch.amp.GradScaler | None = None
        self._in_tf32 = in_tf32 and ranks.device.type == "cuda"
        self.training = model.training
        self.graph, self.ranks, self.execution = graph, ranks, execution
        self._held: dict[str, Held] = {}
        self._leaves = {name: value.to(ranks.device) for name, value in constants.items()}
        self._hold(graph, model)
        self._batch = BatchCheck(find_inputs(graph)[0], options, ranks)
        outside = find_outside(graph, execution)
        todo, uses = outside.actions, [use.parameter for use in outside.chunk.uses]
        units = ([uses[number] for number in unit] for unit in todo.units)
        self._reducer = Reducer(
            [(ranks.merged(unit[0].sums), [self._of(p.leaf) for p in unit]) for unit in units],
            [self._of(p.leaf) for p in outside.operations.parameters.values() if p.grad],
        )
        orders = (todo.of("await", backward=False), todo.of("await", backward=True))
        self._blocks = Blocks(self._reducer.deliver, *orders)
        for block in outside.chunk.blocks:
            lifetime, summed = block.slices.lifetime, block.slices.summed
            self._blocks.add(*self._shares(block.parameters), lifetime, summed=summed)
        self._reducer.at_end.append(self._blocks.finish)
        sums = {str(graph.by_name[name].attr("axis")) for name in outside.loss_sums} - {TIME}
        self._loss_axis = ranks.merged(tuple(a for a in graph.mesh.names if a in sums)) if sums else None
        self._saved = Saved(self._blocks, self._leaves.values(), ranks.device)
        self._remakes = bool(self._blocks.items) or any(o.again for o in outside.operations.listed)
        self._parts = _by_block(self._leaves)
        self._runtime: tuple[Any, ...] = (self._blocks.items, self._saved)
        self._constants: dict[str, Tensor] | None = None
        self._num_draws = num_draws(graph)
        self._drawn: Tensor | None = None  # the generator's state before the first microbatch
        self.program: Program = compile_source(emit(graph, outside))

    def _hold(self, graph: Graph, model: nn.Module) -> None:
        leaves = {str(n.attr("target")): n for n in graph.nodes if n.op in ("parameter", "buffer")}
        layouts = {name: graph.types[node.name].layouts for name, node in leaves.items()}
        whole = (R,) * len(graph.mesh)
        values = {**dict(model.named_parameters(remove_duplicate=False)), **_buffers(model)}
        shapes = {name: graph.types[node.name].shape for name, node in leaves.items()}
        check_model(shapes, values, with_data=not self.ranks.is_dry)
        share_values(values, self.ranks)
        for hold, tensors in ((hold_parameter, tied_names(model)), (hold_buffer, names_by_first(_buffers(model)))):
            for name, names in tensors.items():
                used = next((n for n in names if n in layouts), name)
                self._keep(hold(values[name], names, layouts.get(used, whole), self.ranks), used)
        mirror(self, model, {name: held.outside for name, held in self._held.items()})

    def _keep(self, held: Held, leaf: str) -> None:
        self._held.update(dict.fromkeys(held.names, held))
        for name in {leaf, *held.names}:
            self._leaves[name] = held.inside

    def _of(self, leaf: str) -> Held:
        return self._held[str(self.graph.by_name[leaf].attr("target"))]

    def _shares(self, parameters: Sequence[Parameter]) -> tuple[list[Tensor], list[SlicedParameter]]:
        shards = [self._of(p.leaf).inside for p in parameters]
        slices = [p.slices for p in parameters if p.slices is not None]
        axes = [self.ranks.merged((s.axis,)) for s in slices]
        dtypes = [getattr(torch, p.used_dtype) for p in parameters]
        shares = [
            SlicedParameter(tuple(shard.shape), dtype, shard.device, axis, s.dim, s.blocks, s.copied)
            for shard, dtype, axis, s in zip(shards, dtypes, axes, slices, strict=True)
        ]
        return shards, shares

    # ---- training ----

    def forward(self, **batch: Any) -> Tensor:
        """The loss of a batch of global tensors, or of this rank's own shards of them."""
        local = self._batch.local(batch)
        with tf32(self._in_tf32):
            if len(local) == 1:
                summand = self._forward(local[0])
            elif torch.is_grad_enabled() and self._reducer.held:
                with self._reducer.keeping() as kept:
                    return hand_over(self._forward_backward(local, None), kept)
            else:
                summand = self.program.step(self._forward, _nothing, local, self.ranks.time)
        return summand if self._loss_axis is None else reduce(summand, self._loss_axis)

    def forward_backward(self, **batch: Any) -> Tensor:
        """The loss of a batch, detached, with every parameter's gradient added to its `grad`.

        Raises `BatchError` where the batch is not what was captured, `DistributedError` where another rank failed.
        """
        with tf32(self._in_tf32):
            return self._forward_backward(self._batch.local(batch), self.scaler)

    def _forward_backward(self, local: Sequence[Mapping[str, Tensor]], scaler: torch.amp.GradScaler | None) -> Tensor:
        """The loss of this rank's parts of the microbatches."""
        work: dist.Work | None = None

        def backward(summand: Tensor, loss: Tensor) -> None:
            nonlocal work
            try:
                if self._turn[1]:
                    work = self._start_sum(loss)
                (summand if scaler is None else scaler.scale(summand)).backward()
            except RuntimeError as error:
                raise _blame(error, "backward") from error

        loss = self.program.step(self._forward, backward, local, self.ranks.time)
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise _blame(error, "backward") from error
        return loss

    def _start_sum(self, loss: Tensor) -> dist.Work | None:
        """Sum the loss over the ranks, in place."""
        if self._loss_axis is None or self._loss_axis.group is None:
            return None
        return dist.all_reduce(loss, group=self._loss_axis.group, async_op=True)

    @property
    def _turn(self) -> tuple[bool, bool]:
        """Whether this is the first microbatch of a step, and the last."""
        time = self.ranks.time
        return (True, True) if time is None else (time.rank == 0, time.rank == time.size - 1)

    def _forward(self, local: Mapping[str, Tensor]) -> Tensor:
        """The loss of a microbatch, or this rank's summand of it."""
        first, last = self._turn
        self._blocks.begin(first=first, last=last)
        try:
            self._draw_alike(first=first, last=last)
            with (
                self._saved.hooks() if self._remakes else nullcontext(),
                step_draws(self._num_draws if last else 0) as draw,
            ):
                outputs = self._program(local, draw)
            loss = outputs.pop(LOSS)
            self._reducer.watch(loss, first=first, last=last)
            if last:
                self._write_back(outputs)
        except RuntimeError as error:
            raise _blame(error, "forward") from error
        return loss

    def _draw_alike(self, *, first: bool, last: bool) -> None:
        """Every microbatch draws what the single process draws for the whole batch, and takes its part of that."""
        if not self._num_draws or (first and last):
            return
        generator = private.default_generator(self.ranks.device)
        if first:
            self._drawn = generator.get_state()
        elif self._drawn is not None:
            generator.set_state(self._drawn)

    def _program(self, local: Mapping[str, Tensor], draw: Draw) -> dict[str, Tensor]:
        device, axes = self.ranks.device, self.ranks.axes
        if self._constants is None:
            with torch.no_grad():
                constants = self.program.constants(device, *axes)
                self._constants = {name: _by_itself(value) for name, value in constants.items()}
        runtime = (*self._runtime, device, *axes)
        return self.program.forward(self._parts, local, self._constants, *runtime, draw=draw)

    def _write_back(self, buffers: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in buffers.items():
                held = self._held[name]
                held.inside.copy_(local_part(value.detach(), held.layouts, self.ranks))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm that they had."""
        return clip_gradients(list({id(h): h for h in self._held.values()}.values()), self.ranks, max_norm, norm_type)

    # ---- what users look at ----

    @property
    def input_layouts(self) -> dict[str, Layouts]:
        """How each tensor of the batch is laid out, by mesh axis."""
        return self._batch.layouts

    @property
    def source(self) -> str:
        """The program as readable Python; `program.write(path)` puts it into a file."""
        return self.program.source

    def extra_repr(self) -> str:
        return f"mesh={self.graph.mesh}, rank={dist.get_rank()}, device={self.ranks.device}"

    # ---- state ----

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """By the model's own names; ready for `torch.distributed.checkpoint`, which reshards into any other plan."""
        return make_checkpointable(super().state_dict(*args, **kwargs))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> private.IncompatibleKeys:
        """Load whole tensors (a single-process checkpoint) or DTensors of any layout, in place."""
        if assign:
            raise ShardwrightError("load_state_dict(assign=True) would cut the program off its parameters; drop assign")
        own = self.state_dict()
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        if strict and (missing or unexpected):
            raise ShardwrightError(f"load_state_dict: missing keys {missing}, unexpected keys {unexpected}")
        for name, value in state_dict.items():
            if name in own:
                self._held[name].load(value, self.ranks)
        return private.IncompatibleKeys(missing, unexpected)

    def train(self, mode: bool = True) -> ParallelModule:
        """Whether the model trains is part of the program; asking for the other mode is an error."""
        if mode != self.training:
            have, want = ("train", "eval") if self.training else ("eval", "train")
            raise ShardwrightError(
                f"the model was captured in {have} mode, which is part of the program; "
                f"call model.{want}() and compile again for {want} mode"
            )
        return self

    def compile(self, **options: Any) -> None:
        """Run the program through `torch.compile` with these options; what lies around it stays as it is.

        Blocks of the model are compiled one by one, equal ones once, so that it takes no longer for a deeper model.
        What gathers parameters or makes values again stays outside of the compiled graphs. Inductor draws masks of its
        own, which are not those of a single process; `torch._inductor.config.fallback_random` keeps them.
        """
        if options.get("fullgraph") and self._remakes:
            raise ShardwrightError(
                "compile(fullgraph=True): parameters are gathered, or values made again, between the graphs of this "
                "program; leave fullgraph out"
            )
        self.program = self.program.optimized(**options)
        self._runtime = (
            left_to_python(self._blocks.items, "gather", "free"),
            *left_to_python([self._saved], "checkpoint", "remade"),
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ParallelModule:
        raise ShardwrightError(
            "a lowered module cannot be moved or cast (its program holds its parameters' storage); "
            "move or cast the model before compiling it"
        )


def _by_block(leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """All by name, and those of each repeated block of the model by their names in it."""
    found: dict[str, Any] = dict(leaves)
    for name, value in leaves.items():
        if block := module_block(name):
            found.setdefault(block, {})[name.removeprefix(f"{block}.")] = value
    return found


def _nothing(summand: Tensor, loss: Tensor) -> None:
    """No backward."""


def _by_itself(value: Tensor) -> Tensor:
    """Without what it is only a part of."""
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def _blame(error: RuntimeError, phase: str) -> RuntimeError | DistributedError:
    """Errors of the process group as ours; all others as they are."""
    text = str(error)
    signs = ("Connection closed", "Connection reset", "Timed out", "timed out", "gloo", "NCCL", "Broken pipe", "Socket")
    if not isinstance(error, dist.DistError) and not any(sign in text for sign in signs):
        return error
    return DistributedError(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: a collective failed in {phase}: {text.strip()}; "
        "another rank has probably failed or is stuck, see its output; start all ranks anew"
    )


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers(remove_duplicate=False))


def mirror(target: nn.Module, model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give `target` the model's tree of names, with plain modules that hold these tensors."""
    for path, module in model.named_modules(remove_duplicate=False):
        here = target
        for part in path.split(".") if path else []:
            if part not in here._modules:
                here._modules[part] = nn.Module().train(target.training)
            here = here.get_submodule(part)
        prefix = f"{path}." if path else ""
        for kept, own in ((here._parameters, module._parameters), (here._buffers, module._buffers)):
            for name, value in own.items():
                kept[name] = None if value is None else values[prefix + name]  # pyright: ignore[reportArgumentType]
        here._non_persistent_buffers_set |= module._non_persistent_buffers_set
