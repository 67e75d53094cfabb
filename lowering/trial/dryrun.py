"""A dry run: one rank's program on tensors without data, among ranks that are not there.

The program is lowered as on a cluster, over torch's `fake` process group, and takes two whole steps with AdamW on fake
tensors. Nothing is computed or sent; operators yield only shapes and dtypes. The dry run counts the messages of the
second step, and the memory of all storages that are alive in it. All ranks of a mesh run the same program on equal
shapes, so one of them stands for all.

Tensors are on the CPU, as autograd has no fake GPU, but collectives are those of NCCL. A dry run does not see
workspaces of kernels, staging buffers of collectives, the allocator's rounding or the driver.
"""

from __future__ import annotations

import re
import time
import traceback
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.lowering import private
from shardwright.lowering.dtensors.mending import mend_dtensors
from shardwright.lowering.random.drawing import Stream
from shardwright.lowering.runtime.entry import Entry
from shardwright.lowering.runtime.spec import EntrySpec
from shardwright.lowering.store.parameter_store import ParameterStore
from shardwright.lowering.store.sources import ModelValues
from shardwright.lowering.store.storage import Held, as_real
from shardwright.lowering.text.program import PROGRAM_NAME, Program, compile_source
from shardwright.lowering.trial.tape import Tape
from shardwright.pcg.errors import DistributedError, PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.stages import channel
from shardwright.pcg.step.execution import DEFAULT, Execution, draws_whole
from shardwright.pcg.step.late import check_backward
from shardwright.pcg.step.meshes import first_ranks, in_words, stage_meshes
from shardwright.pcg.step.messages import Message

_LINE = re.compile(r"^( *)(\w+)( = .*|,)  # (?:(.*) \| )?(\w+)(\[[\d, ]*\])$")
"""A line that `emit` writes: a name, the source and layouts of its value, dtype and local shape."""
_CHECK = "_check_value"
GROUP_SIZE = 32
"""The number of parameters that the optimizer updates together."""


@dataclass(frozen=True)
class DryRun:
    """The messages and memory of one rank in a warm step.

    messages    messages that it sends, and how often
    memory      bytes by category at the peak; `during`: the operator that ran then
    misshapen   values that differ from the graph's types, and failures, in words
    seconds     duration of the dry run
    """

    rank: int
    messages: Mapping[Message, int]
    memory: Mapping[str, int]
    during: str
    misshapen: tuple[str, ...]
    seconds: float

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())


def dry_run(graph: Graph, rank: int = 0, execution: Execution = DEFAULT, kind: str = "cpu") -> DryRun:
    """Run a rank's program of a validated parallel graph without data; no model is needed. `execution`: as for `lower`.

    `kind`: the kind of the devices that the program is for, which decides how masks are drawn.
    Raises `PlanError` for a rank that the mesh does not have and for a model that does not train, and
    `DistributedError` if there is a process group.
    """
    check_backward(graph)
    meshes = stage_meshes(graph.mesh, execution)
    start, size = time.perf_counter(), first_ranks(meshes)[-1]
    if not 0 <= rank < size:
        what, verb = (f"the mesh {graph.mesh}", "has") if len(meshes) == 1 else (in_words(meshes), "have")
        raise PlanError(f"rank {rank}: {what} {verb} ranks 0 to {size - 1}; choose one of them")
    with as_rank(rank, size), private.FakeTensorMode() as mode, Tape(mode) as tape:
        mend_dtensors()
        entry = _entry(graph, execution)
        entry.drawing.by_part = not draws_whole(kind)
        misshapen: dict[str, None] = {}
        for runner in entry.runners:
            runner.program = checked(runner.program, misshapen)
        try:
            misshapen.update(_take_steps(entry, tape))
        except RuntimeError as error:
            misshapen[_failure(error)] = None
        memory, during = tape.peak()
        messages, names = Counter[Message](), _names(entry)
        for (collective, group, num_bytes, kind_sent), count in tape.sent.items():
            messages[Message(collective, names.get(group, "all ranks"), num_bytes, kind_sent)] += count
    return DryRun(rank, messages, memory, during, tuple(misshapen), time.perf_counter() - start)


def _entry(graph: Graph, execution: Execution) -> Entry:
    """Return this rank's program over parameters without data."""
    model, constants = hollow_model(graph), dict(_leaves(graph, "constant"))
    store = ParameterStore(ModelValues(model), model)
    return Entry(EntrySpec(graph, constants, execution=execution), store, Stream())


def _take_steps(entry: Entry, tape: Tape) -> dict[str, None]:
    """Take two steps, the second warm; return in words which values differ from the graph's types."""
    optimizer, check = _adamw(entry.store.parameters), entry.batch
    batch = {key: _empty(check.own_shapes[key], kind.dtype) for key, kind in check.inputs.items()}
    misshapen: dict[str, None] = {}
    for _ in range(2):
        tape.begin()
        loss = entry.forward_backward(batch, None)
        misshapen.update(dict.fromkeys(_misshapen(entry, loss)))
        _label(tape, entry, batch)
        optimizer.step()
        tape.label("optimizer", _locals(chain(*(state.values() for state in optimizer.state.values()))))
        optimizer.zero_grad()
    return misshapen


def _failure(error: RuntimeError) -> str:
    """Return in words what failed, and at which line of the program."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PROGRAM_NAME)]
    where = f" at `{frames[-1].line}`" if frames else ""
    return f"the program fails{where}: {error}"


@contextmanager
def as_rank(rank: int, size: int) -> Generator[None]:
    """Run as a rank among `size` ranks that do not exist. Raises `DistributedError` if there is a process group."""
    if dist.is_initialized():
        raise DistributedError("a dry run needs a process of its own, without ranks; start it without torchrun")
    dist.init_process_group(private.FAKE, store=private.FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        private.forget_meshes()


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW over groups of parameters: within a group, torch compares the layouts of all pairs of DTensors."""
    groups = [parameters[i : i + GROUP_SIZE] for i in range(0, len(parameters), GROUP_SIZE)]
    return torch.optim.AdamW([{"params": group} for group in groups], fused=True)


# ---- tensors without data ----


def hollow_model(graph: Graph) -> nn.Module:
    """Return plain modules that hold the graph's parameters and buffers under their names."""
    root = nn.Module()

    def owner(target: str) -> tuple[nn.Module, str]:
        *path, name = target.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module, name

    for target, value in _leaves(graph, "parameter"):
        module, name = owner(target)
        module.register_parameter(name, nn.Parameter(value, value.requires_grad))
    for target, value in _leaves(graph, "buffer"):
        module, name = owner(target)
        module.register_buffer(name, value)
    return root


def _leaves(graph: Graph, op: str) -> Iterator[tuple[str, Tensor]]:
    for node in graph.leaves(op):
        kind = graph.types[node.name]
        value = _empty(kind.shape, kind.dtype)
        value = torch.view_as_complex(value) if node.is_complex else value
        yield str(node.attr("target")), value.requires_grad_(kind.grad)


def _empty(shape: tuple[int, ...], dtype: str) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


# ---- labels and checks ----


def _label(tape: Tape, entry: Entry, batch: Mapping[str, Tensor]) -> None:
    """Label the storages that outlive the step with their categories."""
    held = entry.store.unique
    trained = [h for h in held if isinstance(h.outside, nn.Parameter)]
    tape.label("parameters", (h.inside for h in trained))
    tape.label("gradients", _locals(h.outside.grad for h in trained))
    constants = [value for runner in entry.runners for value in (runner.constants or {}).values()]
    tape.label("buffers", _locals((*(h.inside for h in held), *entry.constants.values(), *constants, *batch.values())))


def _locals(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield private.unwrap(value) if isinstance(value, private.DTensor) else value


def _names(entry: Entry) -> dict[str, str]:
    """Return, by the name of each group, its mesh axis or its channel between stages."""
    ranks, pipeline = entry.ranks, entry.pipeline
    names: dict[str, str] = {a.group.group_name: a.name for a in ranks.all_axes if a.group is not None}
    if pipeline is not None:
        names |= {one.group.group_name: channel(*way) for way, one in pipeline.channels.items()}
    return names


def _misshapen(entry: Entry, loss: Tensor) -> Iterator[str]:
    """Yield in words which of loss, parameters and gradients differ from the graph's types."""
    graph = entry.graph
    if loss.shape or not loss.is_floating_point():
        yield f"loss: expected one float, got {loss.dtype}{list(loss.shape)}"
    for leaf in graph.leaves("parameter"):
        if str(leaf.attr("target")) not in entry.store.held:  # another pipeline stage has it
            continue
        held, kind = entry.held(leaf.name), graph.types[leaf.name]
        shape = kind.local_shape(graph.mesh)
        values = {"parameter": (held.inside, shape), "gradient": (_gradient(held), held.trimmed(held.inside).shape)}
        for what, (value, local_shape) in values.items():
            expected = f"torch.{kind.dtype}{list(local_shape)}"
            for local in _locals([value]):
                if (got := f"{local.dtype}{list(local.shape)}") != expected:
                    yield f"{what} of {held.name}: expected {expected}, got {got}"


def _gradient(held: Held) -> Tensor | None:
    """Return this rank's part of a parameter's gradient, as graphs have it."""
    gradient = held.outside.grad
    return None if gradient is None else as_real(private.unwrap(gradient))


# ---- checks of values against the program's comments ----


def checked(program: Program, misshapen: dict[str, None]) -> Program:
    """Return the program with checks, which add to `found`, in words, the values that differ from their comments."""

    def check(value: object, name: str, where: str, expected: str) -> None:
        if isinstance(value, Tensor):
            got = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            if got != expected:
                misshapen[f"{name} ({where}): expected {expected}, got {got}"] = None

    checked_program = compile_source("\n".join(_with_checks(program.source.splitlines())) + "\n")
    namespace: dict[str, Any] = checked_program.forward.__globals__
    namespace[_CHECK] = check
    return checked_program


def _with_checks(lines: list[str]) -> Iterator[str]:
    """Yield the lines, with a check after each statement that makes values; each of several values has its own line."""
    open_: list[str] = []
    for line in lines:
        yield line
        if match := _LINE.match(line):
            indent, name, rest, where, dtype, shape = match.groups()
            call = f"{_CHECK}({name}, {name!r}, {where or ''!r}, {dtype + shape!r})"
            if rest == ",":
                open_.append(call)
            else:
                yield indent + call
        elif open_ and line.lstrip().startswith(")"):
            indent = line[: len(line) - len(line.lstrip())]
            yield from (indent + call for call in open_)
            open_.clear()
