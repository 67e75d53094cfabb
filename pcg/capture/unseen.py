"""Actions of a forward that `torch.export` does not see, and would lose or fix silently: they are refused.

They are a new seed of torch's generator, and a draw from a generator that is not torch's: Python's and NumPy's run at
capture only, so everything that depends on a draw (a mask, a layer that is dropped) would be the same in every step.
Draws after a seed that forward itself sets are the same in every step anyway. For backwards, see
`pcg.capture.backwards`.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_STATES = frozenset({"getstate", "setstate", "get_state", "set_state"})


class Site(NamedTuple):
    """The point that a forward has reached: a module of the model, and a line (`file.py:12`; "": not known)."""

    module: nn.Module
    line: str


class UnseenError(Exception):
    """An action that `torch.export` does not see. `remedy`: what to do; `site`: where, if not where it is raised.

    `function`: the `autograd.Function` that acts, by its full name, or "". `is_late`: it was seen after forward.
    """

    def __init__(
        self, what: str, remedy: str, site: Site | None = None, function: str = "", *, is_late: bool = False
    ) -> None:
        super().__init__(what)
        self.remedy, self.site, self.function, self.is_late = remedy, site, function, is_late


def _fixed_draw(generator: str, *, is_late: bool = False) -> UnseenError:
    return UnseenError(
        f"forward draws from {generator}",
        "Capture would give every step the same draw: draw with torch (torch.rand, F.dropout), draw outside of forward "
        "and pass the tensor in the batch, or switch off what draws (transformers: apply_spec_augment=False)",
        is_late=is_late,
    )


_SEEDED = UnseenError(
    "forward seeds torch's generator, or sets its state (torch.random.fork_rng does)",
    "Capture would lose it: seed before the step, or draw outside of forward and pass the tensor in the batch",
)


@contextmanager
def unseen_refused(model: nn.Module) -> Generator[None]:
    """Raise an `UnseenError` for each of these actions in the forward inside."""
    with _seeds_refused(), _draws_refused(model):
        yield


class _Unseeded(torch.Generator):
    """A stand-in for torch's own generator, which may be looked at and drawn from, but not set."""

    own = torch.default_generator

    def get_state(self) -> torch.Tensor:
        return self.own.get_state()

    def initial_seed(self) -> int:
        return self.own.initial_seed()

    def manual_seed(self, seed: int) -> torch.Generator:
        raise _SEEDED

    def seed(self) -> int:
        raise _SEEDED

    def set_state(self, new_state: torch.Tensor) -> torch.Generator:
        setter = sys._getframe(2)  # the caller of torch.set_rng_state
        if not setter.f_globals["__name__"].startswith("torch._dynamo"):  # it compiles what torch.cond is given
            raise _SEEDED
        return self


@contextmanager
def _seeds_refused() -> Generator[None]:
    """Raise for seeds of `torch.manual_seed` and its like; other seeds show in the state after forward."""
    stand_in = _Unseeded()
    before = stand_in.get_state()
    with (
        mock.patch.object(torch, "default_generator", stand_in),
        mock.patch.object(torch.random, "default_generator", stand_in),
    ):
        yield
    if not before.equal(stand_in.get_state()):
        raise _SEEDED


@contextmanager
def _draws_refused(model: nn.Module) -> Generator[None]:
    """Raise for draws by functions of `random` or `numpy.random`; other draws show in the state after forward."""
    seeded: set[str] = set()
    with ExitStack() as stack:
        for module, name in ((random, "Python's random"), (np.random, "NumPy's random")):
            for patch in _patches(module, name, seeded):
                stack.enter_context(patch)
        before = states(model)
        yield
        after = states(model)
    for name, state in after.items():
        if state != before.get(name, state) and name not in seeded:
            raise _fixed_draw(name, is_late=True)


def _patches(module: ModuleType, name: str, seeded: set[str]) -> Iterator[Any]:
    """Yield patches of a module's functions that draw from its one generator, and of the one that seeds it."""

    def checked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
        if name not in seeded:
            raise _fixed_draw(name)
        return function(*args, **kwargs)

    def seed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
        if any(value is not None for value in (*args, *kwargs.values())):
            seeded.add(name)
        return function(*args, **kwargs)

    def begun(function: Callable[..., Any], seed: object = None) -> object:
        if seed is None:
            raise _fixed_draw("a new generator of NumPy's")
        return function(seed)

    for key, function in vars(module).items():
        if key == "seed":
            yield mock.patch.object(module, key, partial(seed, function))
        elif key == "default_rng":
            yield mock.patch.object(module, key, partial(begun, function))
        elif isinstance(getattr(function, "__self__", None), _GENERATORS) and key not in _STATES:
            yield mock.patch.object(module, key, partial(checked, function))


def states(model: nn.Module) -> dict[str, bytes]:
    """Return the states of the generators of Python and NumPy, and of those that modules keep."""
    kept = {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _GENERATORS)
    }
    shared = {"Python's random": random.getstate(), "NumPy's random": np.random.get_state()}
    return {name: pickle.dumps(value) for name, value in (shared | kept).items()}
