"""A lowered program: the emitted source, compiled, so that tracebacks show its lines."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Batch = Mapping[str, Tensor]
PROGRAM_NAME = "<shardwright program"
"""The prefix of programs' file names in tracebacks."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Program:
    """The compiled functions that `emit` describes, and their source.

    `functions` holds, by name, the functions that `forward` calls.
    """

    source: str
    forward: Callable[..., dict[str, Any]]
    constants: Callable[..., dict[str, Any]]
    step: Callable[..., Tensor]
    functions: dict[str, Callable[..., Any]]

    def write(self, path: Path | str) -> None:
        """Write the program as a Python file."""
        Path(path).write_text(self.source)

    def optimized(self, **options: Any) -> Program:
        """Return the program through `torch.compile`: each function by itself, so that equal blocks compile once.

        A program without such functions is compiled as a whole.
        """
        program = compile_source(self.source)
        if not program.functions:
            return replace(program, forward=torch.compile(program.forward, **options))
        functions = {name: torch.compile(function, **options) for name, function in program.functions.items()}
        program.forward.__globals__.update(functions)
        return replace(program, functions=functions)


def compile_source(source: str) -> Program:
    """Compile the text that `emit` wrote and register it for tracebacks."""
    filename = f"{PROGRAM_NAME} {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": "shardwright_program"}
    exec(compile(source, filename, "exec"), namespace)
    functions = {name: f for name, f in namespace.items() if getattr(f, "__module__", "") == "shardwright_program"}
    step = functions.pop("step", _one_microbatch)
    return Program(source, functions.pop("forward"), functions.pop("constants"), step, functions)


def _one_microbatch(
    forward: Callable[[Batch], Tensor], backward: Callable[[Tensor, Tensor], None], batches: Sequence[Batch], _: object
) -> Tensor:
    (batch,) = batches
    summand = forward(batch)
    loss = summand.detach().clone()
    backward(summand, loss)
    return loss


def left_to_python(items: Sequence[object], *methods: str) -> list[Any]:
    """Wrap objects so that `torch.compile` calls these methods without tracing them.

    `torch.compile` tells the wrappers apart by their type alone, so all of one call have the same type.
    """

    def method(name: str) -> Callable[..., Any]:
        def call(self: Any, *operands: Any, **options: Any) -> Any:  # noqa: ANN401
            return getattr(self.item, name)(*operands, **options)

        return torch.compiler.disable(call)

    kind: Any = type("Uncompiled", (), {name: method(name) for name in methods})
    wrappers = [kind() for _ in items]
    for wrapper, item in zip(wrappers, items, strict=True):
        setattr(wrapper, "item", item)  # noqa: B010
    return wrappers
