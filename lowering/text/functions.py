"""The functions that a program's `forward` calls: one for equal blocks of the model, and for what is made again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.lowering.text.pieces import words
from shardwright.pcg.step.operation import Region


@dataclass(eq=False, slots=True)
class Function:
    """One function. `modules`: the blocks of the model that are run by it, in order."""

    name: str
    parameters: tuple[str, ...]
    body: str
    modules: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its source."""
        blocks = list(dict.fromkeys(self.modules))
        told = ", ".join(blocks) if len(blocks) < 4 else f"{blocks[0]} … {blocks[-1]}, {len(blocks)} equal blocks"
        return f'def {self.name}({", ".join(self.parameters)}):\n    """{words(told) or "Of no block."}"""\n{self.body}'


class FunctionCall(NamedTuple):
    """A call of a function, or of the one move that is the `region` (then `function` is None).

    `operands` and `results` are nodes, masks, gathered blocks and parameters of blocks, as the program names them;
    `draw` is the first draw of the function, if it draws.
    """

    function: Function | None
    operands: tuple[str, ...]
    results: tuple[str, ...]
    module: str
    region: Region | None
    draw: str = ""


class Functions:
    """Those of one program, each text once."""

    def __init__(self, taken: Collection[str]) -> None:
        """`taken`: names that they may not have."""
        self._taken = set(taken)
        self._known: dict[tuple[tuple[str, ...], str], Function] = {}

    @property
    def found(self) -> list[Function]:
        return list(self._known.values())

    @property
    def names(self) -> set[str]:
        return {function.name for function in self._known.values()}

    def add(self, base: str, module: str, parameters: Sequence[str], body: str) -> Function:
        """The function of this text, which also runs this block."""
        key = tuple(parameters), body
        if key not in self._known:
            name, number = base, 1
            while name in self._taken or name in self.names:
                name, number = f"{base}_{number}", number + 1
            self._known[key] = Function(name, *key)
        self._known[key].modules.append(module)
        return self._known[key]


def block_key(number: int) -> str:
    """The name of a gathered block among those of nodes; none of these has it."""
    return f"block {number}"


def leaf_key(module: str) -> str:
    """The name of what belongs to a block of the model."""
    return f"leaf {module}"
