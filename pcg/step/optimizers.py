"""The optimizers whose memory is predicted: what each keeps of a parameter, from update to update.

A new optimizer is a row of `OPTIMIZERS`, and a name in the schema of plan files. Sources: Kingma and Ba, "Adam" (2015);
Shazeer and Stern, "Adafactor" (2018); Dettmers et al., "8-bit optimizers via block-wise quantization" (2022); Chen et
al., "Symbolic discovery of optimization algorithms" (2023), of Lion; Jordan et al., "Muon" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

from shardwright.pcg import checks
from shardwright.pcg.dtypes import plain

Optimizer = Literal["adam", "adam8bit", "momentum", "sgd", "lion", "muon", "adafactor", "adam@host", "momentum@host"]
BLOCK, LEAST_IN_8_BITS = 256, 4096
"""The elements that share a scale of four bytes in 8-bit states; smaller parts of parameters, and those that blocks do
not divide, are kept as torchao keeps them: in the dtype of weights."""


class States(NamedTuple):
    """The states that an optimizer keeps of a tensor.

    whole     the number of states that are as large as the tensor, and cut as it is
    narrow    whether those are in 8 bits
    factored  whether there are sums of its rows and of its columns as well, whole on every rank
    """

    whole: int
    narrow: bool = False
    factored: bool = False

    def cut_bytes(self, num_elements: float, item_bytes: int) -> float:
        """Return the bytes of states that are cut, for a part of so many elements; `item_bytes`: of a wide one."""
        if self.narrow and num_elements >= LEAST_IN_8_BITS and num_elements % BLOCK == 0:
            return self.whole * num_elements * (1 + 4 / BLOCK)
        return self.whole * num_elements * item_bytes

    def whole_bytes(self, shape: Sequence[int], item_bytes: int) -> float:
        """Return the bytes that every rank keeps of a tensor of this whole shape."""
        if not self.factored or 0 in shape:
            return 0.0
        return item_bytes * prod(shape) * (1 / shape[-1] + 1 / shape[-2])


class Row(NamedTuple):
    """An optimizer's states of matrices, of stacks of them (experts, convolutions), and of other tensors.

    `on_host`: states lie in the host's memory between updates (`shardwright.on_host`).
    """

    matrices: States
    stacks: States
    others: States
    on_host: bool = False

    def of(self, shape: Sequence[int]) -> States:
        """Return what is kept of a tensor of this shape."""
        return self.others if len(shape) < 2 else self.matrices if len(shape) == 2 else self.stacks


def _of_all(states: States) -> Row:
    return Row(states, states, states)


OPTIMIZERS: Mapping[Optimizer, Row] = {
    "adam": _of_all(States(2)),
    "adam8bit": _of_all(States(2, narrow=True)),
    "momentum": _of_all(States(1)),
    "sgd": _of_all(States(0)),
    "lion": _of_all(States(1)),
    "muon": Row(States(1), States(2), States(2)),  # AdamW trains what is no matrix
    "adafactor": Row(States(0, factored=True), States(0, factored=True), States(1)),
    "adam@host": _of_all(States(2))._replace(on_host=True),
    "momentum@host": _of_all(States(1))._replace(on_host=True),
}
AT_ONCE_BYTES = 1 << 26
"""The bytes of weights whose states are copied from the host together; two such lots are on the device at a time."""
_ALIASES: Mapping[str, Optimizer] = {"adamw": "adam", "adamw8bit": "adam8bit", "adamw@host": "adam@host"}


def optimizer_named(name: object, owner: str, field: str) -> Optimizer:
    """Return the optimizer of a name, or of a class of that name. Raise a `FieldError` if there is none."""
    class_name = name.__name__ if isinstance(name, type) else name
    optimizer = _ALIASES.get(plain(class_name), plain(class_name))
    return checks.choice(optimizer if optimizer in OPTIMIZERS else class_name, owner, field, tuple(OPTIMIZERS))  # type: ignore[return-value]
