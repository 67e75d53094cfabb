"""The functions that a program's `forward` calls: one for all equal blocks or regions that backward recomputes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.lowering.text.pieces import words
from shardwright.pcg.step.operation import Region


@dataclass(eq=False, slots=True)
class Function:
    """A function of the program. `modules`: the blocks of the model that it runs, in order."""

    name: str
    parameters: tuple[str, ...]
    body: str
    modules: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The source of the function."""
        blocks = list(dict.fromkeys(self.modules))
        names = ", ".join(blocks) if len(blocks) < 4 else f"{blocks[0]} … {blocks[-1]}, {len(blocks)} equal blocks"
        return (
            f'def {self.name}({", ".join(self.parameters)}):\n    """{words(names) or "Of no block."}"""\n{self.body}'
        )


class FunctionCall(NamedTuple):
    """A call of a function; if `function` is None, of the single parallel operator that `region` consists of.

    `operands` and `results` are the keys of nodes, masks, gathered blocks and parameters of blocks.
    `draw` is the first draw of the function, if it draws.
    """

    function: Function | None
    operands: tuple[str, ...]
    results: tuple[str, ...]
    module: str
    region: Region | None
    draw: str = ""


class Functions:
    """The functions of one program, each text once."""

    def __init__(self, taken: Collection[str]) -> None:
        """Start without functions; none will have a name in `taken`."""
        self._taken = set(taken)
        self._known: dict[tuple[tuple[str, ...], str], Function] = {}

    @property
    def found(self) -> list[Function]:
        return list(self._known.values())

    @property
    def names(self) -> set[str]:
        return {function.name for function in self._known.values()}

    def add(self, base: str, module: str, parameters: Sequence[str], body: str) -> Function:
        """Return the function with this text, and note that it also runs this block."""
        key = tuple(parameters), body
        if key not in self._known:
            name, number = base, 1
            while name in self._taken or name in self.names:
                name, number = f"{base}_{number}", number + 1
            self._known[key] = Function(name, *key)
        self._known[key].modules.append(module)
        return self._known[key]


def block_key(number: int) -> str:
    """Return the key of a gathered block; no node has this name."""
    return f"block {number}"


def leaf_key(module: str) -> str:
    """Return the key of the mapping that holds the parameters and buffers of a block of the model."""
    return f"leaf {module}"
