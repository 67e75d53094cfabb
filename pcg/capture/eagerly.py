"""Eager mode's answers for code that asks whether it is compiled or exported, so that branches of training are taken.

    if torch.compiler.is_compiling(): …    the branch that an export would take; the branch of training is captured

Torch itself asks too, for its tracing, and gets the true answer. The functions have many names (`from
torch.compiler import is_compiling`, `torch._dynamo.is_compiling`), so their code is replaced during a capture.
If the branch of eager mode cannot be traced, for example because it looks at values, the other one is: libraries ask so
that they compute the same in a form that can be traced.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import TypeVar
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import _symbolic_trace

from shardwright.pcg.capture.unseen import UnseenError
from shardwright.pcg.errors import CaptureError

T = TypeVar("T")


def as_in_eager(capture: Callable[[], T]) -> T:
    """Run `capture` with the answers of eager mode, and if that fails and a question was asked, with true answers.

    Raises the first `CaptureError` if both ways fail, or if something is refused
    (`pcg.capture.unseen`).
    """
    asked = list[str]()
    quiet = mock.patch.object(logging.getLogger(FakeTensor.__module__), "disabled", new=True)  # no log of failures
    try:
        with _answers_of_eager(asked), quiet:
            return capture()
    except CaptureError as error:
        if not asked or error.__cause__ is None or isinstance(error.__cause__, UnseenError):
            raise
        first = error
    try:
        return capture()
    except CaptureError:
        raise first from first.__cause__


@contextmanager
def _answers_of_eager(asked: list[str]) -> Generator[None]:
    """Answer as in eager mode inside the context; `asked` collects the Python modules that got a false answer."""
    flags = {
        torch.compiler.is_compiling: (torch.compiler, "_is_compiling_flag"),
        torch.compiler.is_exporting: (torch.compiler, "_is_exporting_flag"),
        _symbolic_trace.is_fx_tracing: (_symbolic_trace, "_is_fx_tracing_flag"),
    }
    with ExitStack() as stack:
        for function, flag in flags.items():
            stack.callback(setattr, function, "__kwdefaults__", function.__kwdefaults__)
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__kwdefaults__ = {"answer": partial(_answer, function.__name__, *flag, asked)}
            function.__code__ = _answered.__code__
        yield


def _answered(*, answer: Callable[[], bool]) -> bool:
    """Answer for torch's functions meanwhile: this code sees torch's globals and none of this file's."""
    return answer()


def _answer(name: str, module: ModuleType, flag: str, asked: list[str]) -> bool:
    """Return the answer of eager mode, or to torch the true one, which `flag` of the module has."""
    truth: bool = getattr(module, flag)
    frame = sys._getframe(2)  # the caller of torch's function
    while frame.f_code.co_name == name and frame.f_back is not None:  # another name of it
        frame = frame.f_back
    who = str(frame.f_globals.get("__name__", ""))
    if not truth or who.partition(".")[0] == "torch":
        return truth
    asked.append(who)
    return False
