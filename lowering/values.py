"""Checks every value of a program, when it is made, against the type that the comment of its line gives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from shardwright.lowering.program import Program, compile_source

_LINE = re.compile(r"^( *)(\w+)( = .*|,)  # (?:(.*) \| )?(\w+)(\[[\d, ]*\])$")
"""What `emit` writes: a name, where it comes from and its layouts, dtype and local shape."""
_CHECK = "_check_value"


def checked(program: Program, found: dict[str, None]) -> Program:
    """The same program, which adds to `found`, in words, what it makes of another type than it says."""

    def check(value: object, name: str, where: str, expected: str) -> None:
        if isinstance(value, Tensor):
            got = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            if got != expected:
                found[f"{name} ({where}): expected {expected}, got {got}"] = None

    own = compile_source("\n".join(_with_checks(program.source.splitlines())) + "\n")
    namespace: dict[str, Any] = own.forward.__globals__
    namespace[_CHECK] = check
    return own


def _with_checks(lines: list[str]) -> Iterator[str]:
    """A call after each statement that makes values; where it makes several, each has a line of its own."""
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
