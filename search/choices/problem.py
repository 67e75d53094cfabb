"""The pairwise model of a graph on one mesh: variables, their own costs, and the costs between them.

    operator ──result──▶ [hub] ──resharding──▶ operator ...        parameter's storage ──▶ operator

One variable per operator and per stored parameter; a *hub* variable per tensor with several readers, so that a
resharding that they share is paid once. The sum of own costs and of edge costs is the plan's cost, with one exception:
where several readers want the same layout and it is not the hub's, the model pays for it once each, the plan once in
all. Nodes that no parameter reaches (masks, positions) are not variables: they are computed in whatever layout their
readers want.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwright.pcg.choice import Choice
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import Layout, Layouts
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.again import NOTHING, MadeAgain
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.lifetimes import Zero
from shardwright.search.choices.domain import Domain
from shardwright.search.choices.interning import Interned
from shardwright.search.choices.reshard import Closure

Restrict = Callable[[Node, int, Choice | Layout], bool]
"""A test of whether an operator may take a choice on an axis, or a parameter a layout: of baselines and tests."""
Costs = Interned[np.ndarray]
"""Seconds or bytes: per choice of a variable, or per pair of choices of two."""


class NoLayoutsError(PlanError):
    """No layouts of a graph on a mesh can be run in the way that is asked for."""


class RunFacts(NamedTuple):
    """The facts on which layouts depend, of how a graph is run.

    again   what backward recomputes
    zero    for how long gathered parameters stay
    run     the dtype in which their gradients are sent, and the number of stages over which blocks are spread
    relaxed whether tables hold lower bounds over all layouts that are run so (`Problem`)
    """

    again: MadeAgain = NOTHING
    zero: Zero = "zero-3"
    run: Execution = DEFAULT
    relaxed: bool = False


class Prices(NamedTuple):
    """The prices in the sum that is minimized, of all but the seconds in which nothing else runs.

    byte            seconds that a kept byte costs
    overlap_weight  the price, above 0, of a second of communication that compute can run beside; 1 where none overlaps
    """

    byte: float = 0.0
    overlap_weight: float = 1.0


SERIAL = Prices()


@dataclass(frozen=True)
class Order:
    """The order in which variables are eliminated.

    Attributes:
        largest_table: entries of the largest table on the way; `largest_result`: of what is left of one.
        entries: of all tables together.
    """

    variables: tuple[int, ...]
    largest_table: int
    largest_result: int
    entries: int


@dataclass(frozen=True)
class Solution:
    """The choice of every variable and the objective's value. `bound`: a lower bound of it, equal if it is exact."""

    choices: tuple[int, ...]
    objective: float
    bound: float


@dataclass
class Problem:
    """Variables, numbered, with the costs of their choices; `edges[i, j]` is the cost table between two, i < j.

    index       the variables by kind ("node", "storage" or "hub") and the name of the node or tensor they belong to
    states      per variable and choice: the layouts in which its tensor is made, stored or handed on
    domains     by name: the choices of operators and of stored tensors
    closures    by name: how tensors change layouts
    overlapped  edges whose communication compute can run beside: gathers of parameters, sums of their gradients
    order       the elimination order, once a solver has decided it
    solved      by prices, the solutions of the solver
    """

    graph: Graph
    mesh: Mesh
    index: dict[tuple[str, str], int] = field(default_factory=dict)
    states: list[tuple[Layouts, ...]] = field(default_factory=list)
    domains: dict[str, Domain] = field(default_factory=dict)
    closures: dict[str, Closure] = field(default_factory=dict)
    time_s: list[Costs] = field(default_factory=list)
    kept_bytes: list[Costs] = field(default_factory=list)
    edges: dict[tuple[int, int], Costs] = field(default_factory=dict)
    overlapped: set[tuple[int, int]] = field(default_factory=set)
    order: Order | None = None
    solved: dict[Prices, Solution] = field(default_factory=dict)

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """The variables of parameters, whose weights, gradients and moments are kept whatever else is done."""
        return tuple(variable for (kind, _), variable in self.index.items() if kind == "storage")

    def chosen(self, choices: Sequence[int], kind: str, name: str) -> Layouts | None:
        """Return the layouts that these choices give a tensor, or None where it has no variable of this kind."""
        variable = self.index.get((kind, name))
        return None if variable is None else self.states[variable][choices[variable]]
