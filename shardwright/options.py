"""The options of `plan` and `compile`: the words in which callers give them, and the value that they become.

A new option is a line in `PlanWords` (or `SearchWords`, if the search itself keeps to it), a field of the value beside
it, a line in the docstring of `shardwright.plan`, and an option of the command line (`cli.options.search_options`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, Unpack, cast, get_args

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.arguments import FLAG, FUNCTION, PATH, SECONDS, Argument, checked
from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.foreign import Foreign, Way, ways
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution, ReduceDtype
from shardwright.pcg.step.optimizers import Optimizer, optimizer_named
from shardwright.pcg.step.precisions import Precision, PrecisionByModule, PrecisionMode, canonical
from shardwright.search.plan import Plan
from shardwright.search.request.options import NOTHING, SearchOptions, SearchWords

if TYPE_CHECKING:
    import torch

_F = TypeVar("_F", bound=Callable[..., Any])
PerMicrobatch = bool | str | Sequence[str]
Pad = bool | int
"""The number of devices that dimensions are padded for; True: those of an axis."""
_OPTION = Argument(
    (object,), "what docs/planning.md says", ("torch.nn:Module", "torch:Tensor", "torch.optim:Optimizer")
)
_NAMED = _OPTION._replace(types=(bool, str, Sequence, Mapping), expected="names, as docs/planning.md says")
KINDS: Mapping[str, Argument] = {
    "model": Argument(("torch.nn:Module",), "a module, such as Net()"),
    "cluster": Argument((Cluster,), "a cluster, such as Cluster.preset('dgx-h100') or Cluster.local(2)"),
    "args": Argument((list, tuple, NoneType), "the positional inputs of one batch, as (x, y)"),
    "kwargs": Argument((Mapping,), "the inputs of one batch by name, as {'x': x}"),
    "plan": Argument((Plan, *PATH.types), "a plan, or the path of one"),
    "loss_fn": FUNCTION._replace(expected="a function of the model's result and the batch"),
    "progress": FUNCTION,
}
"""The kinds of arguments that several functions take."""
_OPTIONS: Mapping[str, Argument] = {
    **dict.fromkeys(SearchWords.__annotations__, _OPTION),
    "shapes": Argument((list, tuple), "batches with weights, as [({'x': x}, 0.9), ({'x': longer}, 0.1)]"),
    "weights": Argument(
        ("shardwright.lowering.store.weights:WeightFiles", *PATH.types),
        "a path, or WeightFiles(path); load a state_dict into the model",
    ),
    "rules": PATH._replace(expected="the path of a rule file"),
    "strict": FLAG._replace(types=(bool, NoneType)),
    "timeout_s": SECONDS,
    "time_limit_s": SECONDS,
    "microbatches": _OPTION._replace(types=(int,), expected="a whole number"),
    "pins": _NAMED,
    "per_microbatch": _NAMED,
    "foreign": _NAMED,
    "pad": _OPTION,
    "optimizer": Argument(
        (str, type), "its name or its class, such as torch.optim.AdamW; make it of parallel.parameters()"
    ),
}
"""The kinds of options; those without one are judged by those who take them."""


CheckCapture = Literal["first", "never"]
"""The values of `check_capture`: "first" compares an eager step unless the plan records that one was compared."""


class PlanWords(SearchWords, total=False):
    """The options as a caller says them, by name. None says nothing."""

    per_microbatch: PerMicrobatch | None
    precision: PrecisionMode | Sequence[PrecisionMode] | None
    reduce_dtype: ReduceDtype | torch.dtype | None
    optimizer: str | type[torch.optim.Optimizer] | None
    strict: bool
    foreign: Foreign | None
    pad: Pad | None
    rules: str | os.PathLike[str] | None


class Statistics(NamedTuple):
    """The number of microbatches, and the modules with statistics of each microbatch by itself."""

    num_microbatches: int = 1
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of planning a model, as `shardwright.plan` documents them.

    Attributes:
        search: what the search keeps to.
        precisions: those among which the search chooses; None: the model's own. By module, it is in pairs.
        statistics: the number of microbatches that the model is captured for, and modules with statistics of each.
        reduce_dtype: the dtype that gradients are sent in; None: the parameters'.
        optimizer: whose states are predicted.
        strict: whether an operator without a row is an error, and a part that cannot be captured.
        foreign: the parts that run as they are, by name, and how each does.
        pad: the number of devices for which dimensions may be padded; 0: for none; None: for those of an axis.
        rules: a rule file in place of the shipped catalogue.
    """

    search: SearchOptions = NOTHING
    precisions: tuple[Precision | PrecisionByModule | None, ...] = (None,)
    statistics: Statistics = field(default_factory=Statistics)
    reduce_dtype: ReduceDtype | None = None
    optimizer: Optimizer = "adam"
    strict: bool = False
    foreign: Mapping[str, Way] = field(default_factory=dict)
    pad: int | None = 0
    rules: str | os.PathLike[str] | None = None

    @classmethod
    def of(cls, **words: Unpack[PlanWords]) -> PlanOptions:
        """Return the options that these words ask for. Raises a `ShardwrightError` for what cannot be asked."""
        search_words = {name: value for name, value in words.items() if name in SearchWords.__annotations__}
        search = SearchOptions.of(**cast("SearchWords", search_words))
        reduced = Execution(reduce_dtype=words.get("reduce_dtype")).reduce_dtype  # pyright: ignore[reportArgumentType]
        optimizer = optimizer_named(words.get("optimizer") or "adam", "", "optimizer")
        statistics = _statistics(words.get("per_microbatch"), search)
        precisions = tuple(precisions_of(words.get("precision")))
        foreign = ways(words.get("foreign"))
        strict, pad = words.get("strict", False), _padded_for(words.get("pad"))
        return cls(search, precisions, statistics, reduced, optimizer, strict, foreign, pad, words.get("rules"))


def _statistics(named: PerMicrobatch | None, search: SearchOptions) -> Statistics:
    """Return the statistics that a request asks for.

    Raises `PlanError` if modules have their own but the number of microbatches is open: other statistics make another
    step, so the search may not choose it.
    """
    names = ("*",) if named is True else (named,) if isinstance(named, str) else tuple(named or ())
    many = search.microbatches or (search.mesh or Mesh()).num_microbatches
    if names and search.microbatches is None and many == 1:
        raise PlanError(
            f"per_microbatch={named!r} without microbatches=: what a step computes depends on how many there are, "
            "so the search may not choose; say how many"
        )
    return Statistics(many, names)


def _padded_for(pad: object) -> int | None:
    """Return `PlanOptions.pad`. Raises `PlanError` for what is no number of devices."""
    if pad is None or isinstance(pad, bool):
        return None if pad else 0
    if not isinstance(pad, int) or pad < 1:
        raise PlanError(f"pad={pad!r}: expected a number of devices, or True for those of an axis of the mesh")
    return pad


def precisions_of(
    precision: PrecisionMode | Sequence[PrecisionMode] | None,
) -> list[Precision | PrecisionByModule | None]:
    """Return the distinct precisions; a precision by module is in pairs. Raises `PlanError` where there are none."""
    if precision is not None and not precision:
        raise PlanError(f"precision={precision!r} names none; leave it out for the model's own")
    several = precision if isinstance(precision, Sequence) and not isinstance(precision, str) else [precision]
    return list(dict.fromkeys(canonical(each, "") for each in several))


def check_when(when: str) -> None:
    """Raise `ShardwrightError` for an unknown value of `check_capture`."""
    if when not in get_args(CheckCapture):
        expected = " or ".join(map(repr, get_args(CheckCapture)))
        raise ShardwrightError(f"check_capture={when!r}: expected {expected}")


def guiding(words: Mapping[str, Any]) -> list[str]:
    """Return the names of given options that a plan has decided already."""
    decided = {*PlanWords.__annotations__} - {"precision", "strict", "rules"}
    return [name for name, value in words.items() if name in decided and value is not None]


def takes_options(function: _F) -> _F:
    """Let a function that takes `PlanWords` show them in its signature, and check all that it is given."""
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False if name == "strict" else None)
        for name in PlanWords.__annotations__
    ]
    return checked(PlanError, options, **KINDS, **_OPTIONS)(function)
