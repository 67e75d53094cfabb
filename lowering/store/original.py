"""The user's own model beside its compiled form: after training it still has its old weights.

    parallel trains ──▶ its parameters change; the model's do not, and a call of it is an error until they do

From the first step on, forward hooks check this: on the model, and on its modules that have parameters or buffers of
the plan. A copy of such a model has the old weights, too, and hooks of its own. Pickling the model is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

from torch import Tensor, nn

from shardwright.lowering.store.storage import Held
from shardwright.pcg.errors import ShardwrightError


class _Records:
    """A record of tensors: their names and how often they had been written. It does not keep them alive."""

    def __init__(self) -> None:
        self._by_id = dict[int, tuple[weakref.ref[Tensor], int, str]]()

    def add(self, tensor: Tensor, name: str) -> None:
        self._by_id[id(tensor)] = weakref.ref(tensor), tensor._version, name

    def unwritten(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, str]]:
        """Yield the tensors that are recorded and have not been written since, with their names."""
        for tensor in tensors:
            reference, written, name = self._by_id.get(id(tensor), (None, 0, ""))
            if reference is not None and reference() is tensor and tensor._version == written:
                yield tensor, name


class _Weights(Protocol):
    """The weights of a model, or of a copy of a model."""

    model: str
    this: str

    def stale(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, str]]:
        """Yield the tensors that have other values in the compiled model, with their names."""
        ...


class Original:
    """The user's model that was compiled, not kept alive, with a record of how often its tensors had been written."""

    this = "this model"

    def __init__(self, model: nn.Module) -> None:
        self.model = type(model).__name__
        self._model = weakref.ref(model)
        self._records = _Records()
        self._held = dict[str, tuple[Held, tuple[int, int]]]()
        self._elsewhere: Collection[str] = ()

    def guard(self, held: Iterable[Held], elsewhere: Collection[str]) -> None:
        """Register, before the first step that trains, hooks that check calls of the model and of its modules.

        `elsewhere`: the names of parameters and buffers that other pipeline stages have.
        """
        model = self._model()
        if self._held or model is None:
            return
        self._held, self._elsewhere = {name: (one, _written(one)) for one in held for name in one.names}, elsewhere
        loaded = {id(value) for value in model.state_dict(keep_vars=True).values()}
        for name, tensor in chain(
            model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        ):
            if id(tensor) in loaded and (name in self._held or name in elsewhere):
                self._records.add(tensor, name)
        for path, module in model.named_modules():
            if any(self._records.unwritten(_tensors(module))):
                module.register_forward_pre_hook(_Guard(weakref.ref(self), module, path))

    def stale(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, str]]:
        """Yield the tensors that have other values in the compiled model, with their names.

        Parameters of other pipeline stages count as changed when this stage's have changed.
        """
        is_trained = any(map(self._is_written, self._held))
        for tensor, name in self._records.unwritten(tensors):
            if self._is_written(name) or (name in self._elsewhere and tensor.requires_grad and is_trained):
                yield tensor, name

    def _is_written(self, name: str) -> bool:
        held, written = self._held.get(name, (None, None))
        return held is not None and _written(held) != written


class _Copy:
    """A copy of the model with its old weights. `is_gone` returns whether the compiled model is gone."""

    this = "this copy"

    def __init__(self, model: str, is_gone: Callable[[], bool]) -> None:
        self.model, self.is_gone, self.records = model, is_gone, _Records()

    def stale(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, str]]:
        """Yield the tensors that have not been written since they were copied, with their names."""
        return iter(()) if self.is_gone() else self.records.unwritten(tensors)


class _Guard:
    """A forward pre-hook of one module. It does nothing once the compiled model is gone."""

    of_shardwright = True
    """A mark by which capture leaves the hook out (`pcg.capture.hooks`)."""

    def __init__(
        self, weights: Callable[[], _Weights | None] = lambda: None, module: nn.Module | None = None, path: str = ""
    ) -> None:
        self._weights, self._path = weights, path
        self._module = weakref.ref(module) if module is not None else lambda: None

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ANN401
        """Raise a `ShardwrightError` if the compiled model's weights have changed since, and the module's have not."""
        weights = self._weights()
        for _, name in weights.stale(_tensors(module)) if weights is not None else ():
            assert weights is not None
            raise ShardwrightError(_message(weights, self._path, name))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Guard:
        """Return the hook of the module's copy, whose own parameters and buffers have been copied before its hooks."""
        weights, module = self._weights(), self._module()
        if weights is None or module is None:
            return _Guard()
        made: _Copy = memo.setdefault(id(weights), _Copy(weights.model, lambda own=self._weights: own() is None))
        for tensor, name in weights.stale(_tensors(module, recurse=False)):
            if id(tensor) in memo:
                made.records.add(memo[id(tensor)], name)
        return _Guard(lambda: made, memo.get(id(module), module), self._path)

    def __reduce__(self) -> tuple[type[_Guard], tuple[()]]:
        module = self._module()
        if module is not None:
            self(module, ())
        return _Guard, ()


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[Tensor]:
    return chain(module.parameters(recurse), module.buffers(recurse))


def _message(weights: _Weights, path: str, name: str) -> str:
    this = f"{path!r} of {weights.this}" if path else weights.this
    return (
        f"{weights.model} was compiled, and its compiled form trained since; {this} still has the weights of before "
        f"({name}, for one). Call the compiled one, or give this one the trained weights first, on every rank: "
        "model.load_state_dict(get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True))), both of"
        " torch.distributed.checkpoint.state_dict; a copy that shall have the weights of before is made before the "
        "first step"
    )


def _written(held: Held) -> tuple[int, int]:
    """Return how often a parameter or buffer has been written in place, by users (`outside`) and by the program."""
    return held.outside._version, held.inside._version
