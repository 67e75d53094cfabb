"""A lowered program: the emitted source, compiled, so that tracebacks show its lines."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

Batch = Mapping[str, Tensor]
PROGRAM_NAME = "<shardwright program"
"""What the file names of programs begin with in tracebacks."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Program:
    """The functions as `emit` describes them, and the text that they were compiled from."""

    source: str
    forward: Callable[..., dict[str, Any]]
    constants: Callable[..., dict[str, Any]]
    step: Callable[..., Tensor]

    def write(self, path: Path | str) -> None:
        """Write the program as a Python file."""
        Path(path).write_text(self.source)


def compile_source(source: str) -> Program:
    """Compile the text that `emit` wrote and register it for tracebacks."""
    filename = f"{PROGRAM_NAME} {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": "shardwright_program"}
    exec(compile(source, filename, "exec"), namespace)
    return Program(source, namespace["forward"], namespace["constants"], namespace.get("step", _one_microbatch))


def _one_microbatch(
    forward: Callable[[Batch], Tensor], backward: Callable[[Tensor, Tensor], None], batches: Sequence[Batch], _: object
) -> Tensor:
    (batch,) = batches
    summand = forward(batch)
    loss = summand.detach().clone()
    backward(summand, loss)
    return loss
