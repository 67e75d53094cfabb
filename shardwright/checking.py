"""The check of a capture: an eager step of the model against the captured graph.

    model, batch ──eager_step──▶ losses, gradients, buffers, generators ─┐
    captured graph ──SerialProgram──▶ the same                           ├─compared─▶ CaptureCheck, or a CaptureError
    the model ±ε ──eager_step──▶ the effect of rounding, where needed ───┘

Both run on the model's own values, one after the other, and all changes are undone. A large step is run on some rows of
the batch, for which another graph is captured: the same graph, but for sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from shardwright.lowering.trial.differences import Comparison, compared, epsilon_of
from shardwright.lowering.trial.putback import Before
from shardwright.lowering.trial.steps import SerialProgram, Trial, device_of, eager_step
from shardwright.options import CheckCapture
from shardwright.pcg.capture.capture import Captured, bind_arguments, capture
from shardwright.pcg.capture.hooks import guards_left_out
from shardwright.pcg.errors import CaptureError, ShardwrightError, printable
from shardwright.pcg.foreign import Call, calls
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.types import is_float
from shardwright.pcg.units import size
from shardwright.search.checked import CaptureCheck
from shardwright.search.request.spaces import batch_size

MOST_FLOPS = {"cpu": 1e10, "cuda": 2e12}
"""The most FLOPs of a forward, by kind of device; it is run about eight times, counting backwards and repeats."""
MEMORY_SHARE = 0.5
"""The share of free memory that the comparison may take."""
FEWEST_ROWS = 2
"""The fewest rows to compare: batch norm has no variance of one row."""
_SHOWN = 8
_SEEDS = (1, 2)


class _NotCheckedError(Exception):
    """A step cannot be compared here, for the reason in the message; it is not an error of the user's."""


def check_capture_of(
    model: nn.Module,
    captured: Captured,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    when: CheckCapture,
    tell: Callable[[str], None] | None = None,
) -> CaptureCheck | None:
    """Run `check_capture` and report to `tell`, or return None if `when` is "never"."""
    if when == "never":
        return None
    check = check_capture(model, captured, args, kwargs)
    if tell is not None:
        tell(f"captured graph {check}")
    return check


def check_capture(
    model: nn.Module, captured: Captured, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> CaptureCheck:
    """Compare one eager step of the model with the graph that was captured of it, for this batch.

    Every change that the steps make is undone (`lowering.trial.putback`). Raises `CaptureError` that names differences
    beyond rounding. If the step cannot be compared, for lack of values or memory, the result says why.
    """
    kwargs = kwargs or {}
    try:
        part = _part(model, captured, args, kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            comparison = _compare(model, part)
    except _NotCheckedError as reason:
        return CaptureCheck(equal=False, why=printable(str(reason), allowed=""))
    if comparison.differences:
        raise CaptureError(_refusal(model, comparison, part))
    errors = comparison.loss_error, comparison.gradient_error, comparison.buffer_error
    return CaptureCheck(equal=True, num_rows=part.num_rows, errors=errors, noise=comparison.noise)


# ---- the part of the batch ----


class _Part(NamedTuple):
    """A graph to compare, and its batch. `num_rows`: of the batch, None for all."""

    captured: Captured
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    num_rows: int | None = None


def _part(model: nn.Module, captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Part:
    """Return the batch, or as many of its rows as take little time and memory."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    if any(isinstance(t, FakeTensor) or t.device.type == "meta" for t in tensors.values()):
        raise _NotCheckedError("the model has no values")
    if len(devices := {str(t.device) for t in tensors.values()}) > 1:
        raise _NotCheckedError(f"the model is on several devices, {', '.join(sorted(devices))}")
    rows, device = batch_size(captured.graph), device_of(model)
    share, why = _affordable(captured.graph, sum(t.numel() * t.element_size() for t in tensors.values()), device)
    if captured.per_microbatch:  # the graph with such statistics is not of the whole batch
        share, why = min(share, 0.5), "statistics are those of each microbatch"
    if share >= 1:
        return _Part(captured, args, kwargs)
    wanted = int(rows * share)
    if wanted < FEWEST_ROWS or rows <= FEWEST_ROWS:
        raise _NotCheckedError(f"{why}, and fewer of its {rows} rows cannot be taken")
    given = bind_arguments(model, args, kwargs)
    fewer = tree_map_only(Tensor, lambda x: _rows(x, rows, wanted), given)
    try:
        captured_part = capture(model, fewer, precision=captured.precision, known=calls(captured.graph))
    except ShardwrightError as error:
        raise _NotCheckedError(f"{why}, and {wanted} of its {rows} rows cannot be captured: {error}") from None
    if not captured.per_microbatch and not same_but_for_sizes(captured.graph, captured_part.graph):
        raise _NotCheckedError(f"{why}, and {wanted} of its {rows} rows make another graph")
    return _Part(captured_part, (), fewer, wanted)


def _rows(tensor: Tensor, rows: int, wanted: int) -> Tensor:
    """Return the first rows of a tensor, which may have several for each row of the batch."""
    if not tensor.dim() or tensor.shape[0] % rows:
        return tensor
    return tensor[: tensor.shape[0] // rows * wanted]


def _affordable(graph: Graph, model_bytes: int, device: torch.device) -> tuple[float, str]:
    """Return the share of the batch to compare, and the reason if it is not all."""
    flops = sum(node.row.flops(graph.signature(node)) for node in graph.nodes if node.row is not None and node.inputs)
    made = sum(
        graph.types[n.name].num_bytes for n in graph.nodes if not n.is_leaf and is_float(graph.types[n.name].dtype)
    )
    free, most = (
        MEMORY_SHARE * free_bytes(device) - 3 * model_bytes,
        MOST_FLOPS["cpu" if device.type == "cpu" else "cuda"],
    )
    if free <= 0:
        raise _NotCheckedError(f"it takes {size(3 * model_bytes)} beside the model, more than half of what is free")
    if flops / most > made / free:
        return most / max(flops, 1.0), f"a step of the whole batch takes {flops:.1e} floating-point operations"
    return free / max(made, 1), f"a step of the whole batch takes {size(made)}"


def free_bytes(device: torch.device) -> float:
    """Return the free memory of a device; of a host, the rest that kernel and control group leave."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    limits = [float("inf")]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
        group = Path("/sys/fs/cgroup")
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        limits += [float(most) - float(used)] if most != "max" else []
    except (OSError, ValueError):
        pass
    return min(limits)


def same_but_for_sizes(one: Graph, other: Graph) -> bool:
    """Return whether two graphs have the same operators and operands; numbers in attributes may differ."""
    if len(one.nodes) != len(other.nodes):
        return False
    place = {node.name: number for number, node in enumerate(other.nodes)}
    numbers = {node.name: number for number, node in enumerate(one.nodes)}
    for a, b in zip(one.nodes, other.nodes, strict=True):
        wiring = [numbers[name] for name in a.inputs] == [place[name] for name in b.inputs]
        kinds = one.types[a.name].dtype == other.types[b.name].dtype
        if not (a.op == b.op and wiring and kinds and _form(_own(a), a.op) == _form(_own(b), b.op)):
            return False
    return True


def _own(node: Node) -> tuple[object, ...]:
    """Return the attributes of a node; of a foreign call, what is called alone, as the rest are types."""
    return tuple((key, Call.of(node).name if key == "call" else value) for key, value in node.attrs)


def _form(value: object, op: str) -> object:
    """Return an attribute without its numbers; constants are named by their elements."""
    if op == "constant":
        return op
    if isinstance(value, tuple):
        return tuple(_form(part, op) for part in value)
    return "a number" if isinstance(value, (int, float)) and not isinstance(value, bool) else value


# ---- both steps ----


def _compare(model: nn.Module, part: _Part) -> Comparison:
    before = Before(model)
    epsilon = epsilon_of(part.captured.graph)
    try:
        with _as_in_training(), _drawing_alike(part.captured.graph, device_of(model)), guards_left_out(model):
            eager = _run(lambda: _eager(model, part, before), before, "the model does not run on this batch")
            if not all(map(torch.isfinite, map(torch.tensor, eager.losses))):
                raise _NotCheckedError(f"the loss of this batch is {eager.losses[0]}")
            program = _program(model, part, before)

            def moved() -> list[Trial]:
                what = "the model does not run once its weights are off by rounding"
                return [_run(lambda s=seed: _moved(model, part, before, epsilon, s), before, what) for seed in _SEEDS]

            return compared(eager, program, epsilon, moved, before.buffers)
    finally:
        before.put_back()


@contextmanager
def _as_in_training() -> Generator[None]:
    """Enable gradients, whatever the caller has disabled, and disable compilation of parts."""
    with torch.inference_mode(False), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _drawing_alike(graph: Graph, device: torch.device) -> Generator[None]:
    """Make attention with dropout draw the same mask in both steps.

    The graph has such attention written out, since its mask is cut; a GPU's fused kernels would draw another mask.
    """
    by_name = {node.name: node for node in graph.nodes}
    drops = any(node.op == "dropout" and by_name[node.inputs[0]].op == "softmax" for node in graph.nodes)
    with sdpa_kernel(SDPBackend.MATH) if drops and device.type == "cuda" else nullcontext():
        yield


def _run(step: Callable[[], Trial], before: Before, what: str) -> Trial:
    try:
        return step()
    except Exception as error:
        raise _NotCheckedError(f"{what}: {type(error).__name__}: {_first_line(error)}") from error
    finally:
        before.put_back()


def _eager(model: nn.Module, part: _Part, before: Before) -> Trial:
    return eager_step(model, part.args, part.kwargs, part.captured.precision, before.parameters)


def _moved(model: nn.Module, part: _Part, before: Before, epsilon: float, seed: int) -> Trial:
    """Run the eager step with parameters and inputs that are off by ±ε of themselves."""
    generator = torch.Generator(device_of(model)).manual_seed(seed)

    def off(value: Tensor) -> Tensor:
        if not (value.is_floating_point() or value.is_complex()):
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator, device=generator.device, dtype=torch.int8)
        return value + value * (epsilon * (2 * signs - 1).to(value.device, value.dtype))

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(off(parameter))
        args, kwargs = tree_map_only(Tensor, off, (list(part.args), dict(part.kwargs)))
    return eager_step(model, args, kwargs, part.captured.precision, {})


def _program(model: nn.Module, part: _Part, before: Before) -> Trial:
    try:
        return SerialProgram(part.captured, device_of(model)).step(model, part.args, part.kwargs)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _NotCheckedError(f"the captured graph needs more memory than there is: {_first_line(error)}") from error
    except RuntimeError as error:
        raise CaptureError(
            f"{type(model).__name__} runs on this batch, and the graph that was captured of it fails: "
            f"{_first_line(error)}; {_REMEDY}"
        ) from error
    finally:
        before.put_back()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---- the differences, in words ----

_REMEDY = (
    "capture keeps what operators compute, and loses what else forward does (docs/limits.md): compute it by operators "
    "and buffers, or train without it. check_capture='never' trains the captured graph as it is, which is another model"
)


def _refusal(model: nn.Module, comparison: Comparison, part: _Part) -> str:
    shown = comparison.differences[:_SHOWN]
    more = len(comparison.differences) - len(shown)
    batch = "this batch" if part.num_rows is None else f"{part.num_rows} rows of this batch"
    lines = [f"\n  {difference.what}: {difference.how}" for difference in shown]
    noise = f" (rounding alone moves gradients by {comparison.noise:.1e} of themselves)" if comparison.noise else ""
    return (
        f"{type(model).__name__}: a step of the captured graph is not the eager one, on {batch}{noise}:"
        f"{''.join(lines)}" + (f"\n  and {more} more" if more else "") + f"\n{_REMEDY}"
    )
