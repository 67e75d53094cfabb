"""Lists of layers, and a model in which few of them run: layers of a *kind* do the same, and one of them is exported.

    list of layers ──shortened──▶ one layer of each kind exported ──deepened──▶ the graph of all of them
        └──────── both run on tensors without data, operator by operator: the layers of a kind must do the same
        (`pcg.capture.alike`)

So capture takes about as long however deep a model is. A model whose layers are not seen to repeat is exported whole.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

_FEWEST = 8
"""The smallest number of layers for which some are left out."""


class Layers(NamedTuple):
    """The layers of a list, by number.

    path        of the list
    stands_for  the layer that is exported in place of each: itself, or one of its kind
    calls       the first layer that makes the same calls as each
    kinds       the first layer of the kind of each: it makes the same calls, and the same is read of it by the next
                layer, or by what follows the last
    """

    path: str
    stands_for: Mapping[int, int]
    calls: Mapping[int, int]
    kinds: Mapping[int, int]

    def block(self, number: int) -> str:
        return f"{self.path}.{number}"

    @property
    def kept(self) -> list[int]:
        """The layers that are exported."""
        return [number for number, kept in self.stands_for.items() if number == kept]

    @property
    def before(self) -> Mapping[int, int]:
        """The layer right before each, but the first."""
        return {after: number for number, after in pairwise(self.stands_for)}

    @property
    def kept_before(self) -> Mapping[int, int]:
        """The exported layer right before each exported one, but the first."""
        return {after: number for number, after in pairwise(self.kept)}


def lists_of_layers(model: nn.Module) -> list[Layers]:
    """Return the outermost lists of a model with many layers, half of which have the same parts as others."""
    found = list[Layers]()
    for path, layers in model.named_modules():
        if not path or not isinstance(layers, (nn.ModuleList, nn.Sequential)) or _is_inside(path, found):
            continue
        if list(layers._modules) != [str(number) for number in range(len(layers))]:
            continue
        modules: list[nn.Module | None] = list(layers._modules.values())
        own = {number: layer for number, layer in enumerate(modules) if layer is not None}
        is_long = len(own) >= _FEWEST and len(set(map(id, own.values()))) == len(own)
        if is_long and 2 * len(set(map(_parts, own.values()))) <= len(own):
            themselves = dict(zip(own, own, strict=True))
            found.append(Layers(path, themselves, themselves, themselves))
    return found


def _is_inside(path: str, found: Sequence[Layers]) -> bool:
    return any(path.startswith(f"{layers.path}.") for layers in found)


def _parts(layer: nn.Module) -> Hashable:
    """Return the modules and tensors of a layer. What it does with them is seen when it runs."""
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return (
        tuple((name, type(part), part.training) for name, part in layer.named_modules()),
        tuple((name, type(t), tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors),
    )


@contextmanager
def shortened(model: nn.Module, found: Sequence[Layers]) -> Generator[None]:
    """Inside the context, layers that are not exported have no parts, and return what the one before them returned."""
    undo = list[Callable[[], object]]()
    try:
        for layers in found:
            cell = _Returned()
            for number, kept in layers.stands_for.items():
                layer = model.get_submodule(layers.block(number))
                undo.append(_replaced(vars(layer), "forward", cell.noted(layer) if number == kept else cell.replay))
                if number != kept:
                    undo += [_replaced(vars(layer), parts, {}) for parts in ("_modules", "_parameters", "_buffers")]
        yield
    finally:
        for back in reversed(undo):
            back()


class _Returned:
    """The value that a layer returned last."""

    value: Any = None

    def noted(self, layer: nn.Module) -> Callable[..., Any]:
        forward = layer.forward

        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.value = forward(*args, **kwargs)
            return self.value

        return call

    def replay(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        return self.value


def _replaced(held: dict[str, Any], name: str, value: object) -> Callable[[], object]:
    """Put a value in a dictionary. Return a function that puts back what was there."""
    before = {name: held[name]} if name in held else {}
    held[name] = value
    return lambda: (held.pop(name), held.update(before))
