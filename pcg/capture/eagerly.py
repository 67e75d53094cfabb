"""Who asks whether it is compiled or exported is answered as in eager mode, so that branches of training are taken.

    if torch.compiler.is_compiling(): …    the branch that an export would take; training is what is captured

Torch itself asks too, for what its tracing needs, and learns the truth. The functions have many names (`from
torch.compiler import is_compiling`, `torch._dynamo.is_compiling`), so that it is their code that changes meanwhile.
Where the branch of eager mode cannot be traced, as it may look at values, the other one is: libraries ask so that they
compute the same in a form that can be.
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
    """What `capture` gives with the answers of eager mode; with true ones, where it fails and some were not.

    Raises the first `CaptureError` where it fails in both ways, or with something that is refused
    (`pcg.capture.unseen`).
    """
    asked = list[str]()
    quiet = mock.patch.object(logging.getLogger(FakeTensor.__module__), "disabled", new=True)  # of what fails here
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
    """Adds to `asked` the Python modules that were not told the truth."""
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
    """The code of torch's functions meanwhile, which sees torch's globals and none of this file."""
    return answer()


def _answer(name: str, module: ModuleType, flag: str, asked: list[str]) -> bool:
    """That of eager mode, but to torch; `flag` of the module is the true one."""
    truth: bool = getattr(module, flag)
    frame = sys._getframe(2)  # who calls torch's function
    while frame.f_code.co_name == name and frame.f_back is not None:  # another name of it
        frame = frame.f_back
    who = str(frame.f_globals.get("__name__", ""))
    if not truth or who.partition(".")[0] == "torch":
        return truth
    asked.append(who)
    return False
