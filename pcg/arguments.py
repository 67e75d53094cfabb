"""The arguments of public functions, checked in one place before anything is done.

why_not(plan, name=3)  ──▶  PlanError: why_not(name=...): expected the name of a strategy, got 3
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter
from numbers import Real
from typing import Any, NamedTuple, TypeVar, cast

from shardwright.pcg.errors import ShardwrightError

_F = TypeVar("_F", bound=Callable[..., Any])
Class = type | str
"""A class, or its module and name as "torch.nn:Module". Before that module is loaded, nothing is of it."""


class Argument(NamedTuple):
    """The values that an argument may have.

    types      it is of one of these; truth values are no numbers
    expected   what that is, in words
    refused    neither it nor an element of it, if it is a list, is of one of these
    """

    types: tuple[Class, ...]
    expected: str
    refused: tuple[Class, ...] = ()

    def check(self, where: str, value: object, error: type[ShardwrightError]) -> None:
        """Raise `error` for another value."""
        types, refused = _loaded(self.types), _loaded(self.refused)
        is_odd = not isinstance(value, types) or (isinstance(value, bool) and not {bool, object} & {*types})
        elements = [value, *value] if isinstance(value, (list, tuple)) else [value]
        for odd in [value] if is_odd else [e for e in elements if isinstance(e, refused)]:
            got = f"the class {odd.__name__}" if isinstance(odd, type) else f"an object of type {type(odd).__name__}"
            shown = repr(odd) if odd is None or isinstance(odd, (str, bool, int, float)) else got
            raise error(f"{where}: expected {self.expected}, got {shown}")


def _loaded(classes: Iterable[Class]) -> tuple[type, ...]:
    loaded = (_class_named(one) if isinstance(one, str) else one for one in classes)
    return tuple(one for one in loaded if one is not None)


def _class_named(name: str) -> type | None:
    module, _, qualname = name.partition(":")
    return getattr(sys.modules.get(module), qualname, None)


PATH = Argument((str, os.PathLike), "a path")
FUNCTION = Argument((cast("type", Callable),), "a function of a message")
FLAG = Argument((bool,), "True or False")
NUMBER = Argument((int,), "a whole number")
SECONDS = Argument((Real,), "a number of seconds")


def checked(error: type[ShardwrightError], more: Sequence[Parameter] = (), /, **kinds: Argument) -> Callable[[_F], _F]:
    """Let a function refuse arguments of other kinds with an `error`, and unknown names with the nearest one.

    None is refused unless it is the default. `more`: what the function takes as `**options`; its signature then
    shows these.
    """

    def of(function: _F) -> _F:
        plain = inspect.signature(function)
        fixed = [p for p in plain.parameters.values() if p.kind is not Parameter.VAR_KEYWORD or not more]
        names = {p.name: p for p in (*fixed, *more)}
        shown = function.__qualname__.removesuffix(".__init__")
        is_open = any(p.kind is Parameter.VAR_KEYWORD for p in fixed)

        @wraps(function)
        def checking(*args: object, **given: object) -> object:
            for name in given:
                if name not in names and not is_open:
                    known = [known for known in names if known not in ("self", "cls")]
                    near = get_close_matches(name, known, 1)
                    hint = f"did you mean {near[0]!r}?" if near else f"choose among {', '.join(known)}"
                    raise TypeError(f"{shown}() has no option {name!r}; {hint}")
            for name, value in {**dict(zip(names, args, strict=False)), **given}.items():
                if name in kinds and (value is not None or names[name].default is not None):
                    kinds[name].check(f"{shown}({name}=...)", value, error)
            return function(*args, **given)

        signature = plain.replace(parameters=[*fixed, *more])
        checking.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        return cast("_F", checking)

    return of
