"""The user's own model beside its compiled form: once that is trained, it still has the weights of before.

    parallel trains ──▶ its parameters change; the model's do not, and a call of it is an error until they do

From the first step on a forward hook of the model looks at that. Copies of the model, and what is unpickled, have one
that does nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from shardwright.lowering.storage import Held
from shardwright.pcg.errors import ShardwrightError


class Original:
    """The model that was compiled, which it does not keep alive, and how often tensors had been written."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._own = list[tuple[weakref.ref[Tensor], int]]()
        self._held = list[tuple[Held, tuple[int, int]]]()

    def guard(self, held: Iterable[Held]) -> None:
        """Before a step that trains: from the first on, calls of the model are looked at."""
        model = self._model()
        if self._held or model is None:
            return
        self._held = [(one, _written(one)) for one in held if one.inside.requires_grad]
        self._own = [(weakref.ref(p), p._version) for p in model.parameters()]
        model.register_forward_pre_hook(_Guard(self))

    def refuse_first_weights(self, model: nn.Module) -> None:
        """Raise a `ShardwrightError` where the compiled model has other weights by now, and the model has not."""
        own = list(model.parameters())
        is_as_it_was = len(own) == len(self._own) and all(
            first() is p and p._version == written for p, (first, written) in zip(own, self._own, strict=True)
        )
        if is_as_it_was and any(_written(one) != written for one, written in self._held):
            raise ShardwrightError(
                f"{type(model).__name__} was compiled, and its compiled form trained since; this model still has the "
                "weights of before. Call the compiled one, or give this one the trained weights first, on every rank: "
                "model.load_state_dict(get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True))),"
                " both of torch.distributed.checkpoint.state_dict"
            )


class _Guard:
    """A forward pre-hook. It does nothing once the compiled model is gone."""

    of_shardwright = True
    """So that capture leaves it out (`pcg.hooks`)."""

    def __init__(self, original: Original | None = None) -> None:
        self._original = weakref.ref(original) if original is not None else None

    def __call__(self, model: nn.Module, args: Any) -> None:  # noqa: ANN401
        original = self._original() if self._original is not None else None
        if original is not None:
            original.refuse_first_weights(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Guard:
        return _Guard()

    def __reduce__(self) -> tuple[type[_Guard], tuple[()]]:
        return _Guard, ()


def _written(held: Held) -> tuple[int, int]:
    """How often a parameter has been written in place, as users see it and as the program does."""
    return held.outside._version, held.inside._version
