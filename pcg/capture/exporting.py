"""`torch.export`, and the messages where it fails.

Composite operators (einsum, concatenate, group_norm, …) are decomposed, as autograd does, unless they have a handler.
Around forward, `pcg.capture.autograd` keeps gradients as autograd has them, and `pcg.capture.unseen` refuses what is
not exported at all (a backward of the user's own, a seed).
"""

from __future__ import annotations

import inspect
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Container, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from functools import cache
from itertools import chain
from keyword import iskeyword
from pathlib import Path
from threading import RLock
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._export import utils as export_utils
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import exported_program
from torch.fx import GraphModule, proxy

from shardwright.pcg.aten import find_handler
from shardwright.pcg.capture.regions import Marker, enter_regions
from shardwright.pcg.capture.strided import STRIDED
from shardwright.pcg.capture.unread import keep_unread_draws
from shardwright.pcg.capture.unseen import Site, UnseenError
from shardwright.pcg.capture.with_loss import calls_loss
from shardwright.pcg.errors import CaptureError
from shardwright.pcg.versions import newer_than_tested

# Operators that are kept whole. Decomposed, a recurrent layer would have a copy of its cell for every position, and
# of a factorization, a part would remain that computes nothing and only raises errors.
_WHOLE = frozenset({
    "lstm", "gru", "rnn_tanh", "rnn_relu",
    "linalg_cholesky", "linalg_inv", "linalg_ldl_factor", "linalg_lu_factor", "linalg_solve", "linalg_tensorinv",
})  # fmt: skip
_ONE_AT_A_TIME = RLock()
"""Held while a function of torch has another one in its place, for all threads."""


def export(
    wrapper: nn.Module,
    model: nn.Module,
    tensors: Mapping[str, Any],
    mode: FakeTensorMode | None,
    marker: Marker | None = None,
) -> torch.export.ExportedProgram:
    """Return `wrapper(**tensors)` in functional ATen operators. Errors are about `model`, inside the wrapper.

    `marker` marks the regions of `torch.autocast`; the wrapper gives it a tensor.

    Raises `CaptureError` naming the module and source line where tracing failed, and what usually helps.
    """
    if any(p.device.type == "meta" for p in model.parameters()):
        raise CaptureError(
            f"{type(model).__name__} is on device 'meta', where gradients can get lost silently; build it inside "
            "`with shardwright.fake():` instead, without a device"
        )
    try:
        with (
            _ONE_AT_A_TIME,
            warnings.catch_warnings(),
            _little_source_written(),
            _operators_looked_up_once(),
            mock.patch.object(proxy, "CapturedTraceback", _Calls),
            mock.patch.object(FakeTensor, "constant", property(_constant, _keep_constant), create=True),
        ):
            warnings.simplefilter("ignore")
            marker = marker or Marker("cpu")
            with marker.watching(), _no_graph_printed():
                exported = torch.export.export(wrapper, (), dict(tensors), strict=False)
            enter_regions(exported.graph_module, marker.device)
            keep_unread_draws(exported.graph)
            with mode or nullcontext():
                return exported.run_decompositions(dict(_decompositions()))
    except CaptureError:
        raise
    except Exception as error:
        raise _explained(model, tensors, error) from error


def _constant(tensor: FakeTensor) -> torch.Tensor | None:
    """Return the values of a constant, with which torch computes; None if it has no memory, where torch 2.13 crashes.

    Such are the tensors, other than parameters and buffers, of a model that was built inside of `fake`.
    """
    value = vars(tensor).get("constant")
    return None if value is None or (value.numel() and not value.untyped_storage().data_ptr()) else value


def _keep_constant(tensor: FakeTensor, value: torch.Tensor | None) -> None:
    vars(tensor)["constant"] = value


@cache
def _decompositions() -> Mapping[torch._ops.OperatorBase, Callable[..., Any]]:
    """Return torch's decompositions of the operators without a handler, and ours of operators on strides."""
    return {**STRIDED} | {
        op: decompose
        for op, decompose in torch.export.default_decompositions().items()
        if isinstance(op, torch._ops.OpOverload)
        and op._can_decompose()
        and find_handler(str(op)) is None
        and op._opname not in _WHOLE
    }


@contextmanager
def _operators_looked_up_once() -> Generator[None]:
    """Spare `run_decompositions` work on all composite operators that there are: a fifth of the time of a small export.

    It looks for them once for each namespace. And it replaces the kernels of 500, although nearly all are to do what
    they do by themselves.
    """
    override = exported_program._override_composite_implicit_decomp

    def overridden(decompositions: Mapping[object, object]) -> AbstractContextManager[None]:
        own = {op: f for op, f in decompositions.items() if getattr(f, "keywords", {}).get("kernel") is not op}
        return override(own)

    with (
        mock.patch.object(exported_program, "_override_composite_implicit_decomp", overridden),
        mock.patch.object(export_utils, "_materialize_cpp_cia_ops", cache(export_utils._materialize_cpp_cia_ops)),
    ):
        yield


class _Calls(list[traceback.FrameSummary]):
    """The calls inside of `export` that make a node, without torch's own; it replaces torch's record."""

    @classmethod
    def extract(cls) -> _Calls:
        calls, frame = cls(), sys._getframe(1)
        while frame is not None and frame.f_code is not export.__code__:
            code = frame.f_code
            if not is_library(code.co_filename):
                name = "forward" if calls_loss(frame.f_back) else code.co_name  # torch drops all with other names
                calls.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, name, lookup_line=False))
            frame = frame.f_back
        return calls

    def summary(self) -> list[traceback.FrameSummary]:
        """Return the calls, the outermost first."""
        return self[::-1]


@contextmanager
def _little_source_written() -> Generator[None]:
    """Write the source of graph modules only if they have a signature, which is read.

    fx writes it after each of 50 passes, to interpret graphs.
    """
    write = GraphModule.recompile

    def call(module: GraphModule, *args: Any, **kwargs: Any) -> object:
        write(module)
        return type(module).forward(module, *args, **kwargs)

    def later(module: GraphModule) -> None:
        if hasattr(module.graph._codegen, "pytree_info"):
            write(module)
        else:
            type(module).forward = call

    with mock.patch.object(GraphModule, "recompile", later):
        yield


@contextmanager
def _no_graph_printed() -> Generator[None]:
    """Keep `torch.export` from printing a graph to stderr before some errors; other output is passed on.

    Torch 2.14 also warns that it knows no line of the user's. That is dropped too, as our message names the line.
    """
    said, dumped = io.StringIO(), ""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with redirect_stderr(said):
            yield
    except Exception as error:
        dumped = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        kept = said.getvalue().replace(f"{dumped}\n", "") if dumped else said.getvalue()
        sys.stderr.write(kept)
        log.setLevel(level)


# ---- errors ----


def _explained(model: nn.Module, tensors: Mapping[str, Any], error: BaseException) -> CaptureError:
    """Return an error that says where in the user's model tracing failed, why, and what usually helps."""
    names = {own_id(module): name for name, module in model.named_modules()}
    site = error.site if isinstance(error, UnseenError) else None
    site = site or site_of(reversed(list(traceback.walk_tb(error.__traceback__))), names) or Site(model, "")
    inner, line = site
    module = names[own_id(inner)] or type(inner).__name__
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return CaptureError(
        f"{type(model).__name__} could not be captured: in module {module!r}"
        + (f" ({line})" if line else "")
        + f": {_known(model, inner, tensors, error) or f'{type(error).__name__}: {reason}. {_remedy(error)}'}"
    ).inside(names[own_id(inner)], f"{line}: {_short(error) or reason}", getattr(error, "function", ""))


def _short(error: BaseException) -> str:
    """Return a reason in few words where torch's own are many."""
    if type(error).__name__ == "DynamicOutputShapeException":
        return "the shape of a result depends on values"
    if "DataDependent" in type(error).__name__ or "data-dependent" in str(error):
        return "a branch or a number depends on values"
    return ""


def own_id(module: nn.Module) -> int:
    """Return what tells a module from others; proxies, which export makes of those with several names, share it."""
    return id(vars(module))


def site_of(frames: Iterable[tuple[FrameType, int]], modules: Container[int]) -> Site | None:
    """Return the innermost module on a stack, among `modules` (`own_id`), and its innermost line outside of torch.

    The innermost frame comes first. Returns None if no frame is of a module.
    """
    module: nn.Module | None = None
    for frame, number in frames:
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if isinstance(owner, nn.Module) and own_id(owner) in modules and frame.f_code.co_name != "_call_impl":
            module = module or owner
            if not is_library(frame.f_code.co_filename):
                return Site(module, f"{Path(frame.f_code.co_filename).name}:{number}")
    return Site(module, "") if module else None


def _known(model: nn.Module, inner: nn.Module, tensors: Mapping[str, Any], error: BaseException) -> str:
    """Return the problem and the remedy in our words, if the error itself is unclear; "" for all others."""
    if isinstance(error, SyntaxError):
        attributes = chain(model.named_modules(), model.named_parameters(), model.named_buffers())
        paths = chain(tensors, (path for path, _ in attributes))
        if path := next((path for path in paths if any(map(iskeyword, path.split(".")))), ""):
            return (
                f"{path!r} has a name that is a keyword of Python, and torch.export writes names as Python source; "
                "rename it (in a ModuleDict: its key)"
            )
    if "Float can't be cast" in str(error) and any(
        frame.f_code.co_name == "dropout" for frame, _ in traceback.walk_tb(error.__traceback__)
    ):
        return (
            "torch drops no complex numbers, eagerly neither; multiply them by a mask that it draws for real ones: "
            "z * F.dropout(torch.ones_like(z.real))"
        )
    if getattr(inner, "track_running_stats", False) and getattr(inner, "momentum", 0) is None:
        return (
            f"{type(inner).__name__}(momentum=None) averages over all batches so far and reads their count as a number,"
            " of which a program of one step has no place; give it a momentum, such as 0.1"
        )
    return ""


_PACKED = "packed sequences are split where attention is given a mask of equal segments (docs/training.md)"
_REMEDIES: Mapping[str, str] = {
    "FlexAttention": f"Capture has no such attention: {_PACKED}",
    "nested": f"Capture has no nested tensors: {_PACKED}",
    "data-dependent": "Capture needs a forward without data-dependent control flow: use torch.where instead of `if` on "
    f"tensor values; {_PACKED}, not where lengths are numbers",
    "pytree": "Capture needs plain tensors going in and out (transformers models: pass use_cache=False)",
    "Cache": "Capture needs plain tensors going in and out (transformers models: pass use_cache=False)",
}
"""What to do, by words of torch's error."""


def _remedy(error: BaseException) -> str:
    if isinstance(error, UnseenError):
        return error.remedy
    if type(error).__name__ == "DynamicOutputShapeException":
        return (
            "torch itself does not know the shapes of what this operator gives before it runs, so it cannot export it"
        )
    text = "data-dependent" if "DataDependent" in type(error).__name__ else str(error)
    for words, remedy in _REMEDIES.items():
        if words in text:
            return remedy
    newer = newer_than_tested()
    return (
        "Check that the model runs on this batch outside Shardwright. If it does, torch.export cannot trace this line: "
        "write it in other operators, or move it out of forward"
    ) + (f". {newer}" if newer else "")


_TORCH = str(Path(torch.__file__).parent) + os.sep


def is_library(filename: str) -> bool:
    """Return whether a source file is torch's."""
    return filename.startswith(_TORCH)


def line_of(function: Callable[..., Any]) -> str:
    """Return where a function begins, as `file.py:12`; "" if it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""
