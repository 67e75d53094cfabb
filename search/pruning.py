"""Choices that no optimum needs: dropped before elimination, which then spans small tables. Exact.

A choice is *dominated* where another one of the same variable costs no more whatever the neighbours do. Beyond that, a
choice is dropped where a lower bound of every solution that holds it exceeds the cost of a solution that is known.
The bounds come from sequential reparametrization (Kolmogorov, "Convergent tree-reweighted message passing", 2006):
cost is moved between a variable and its edges such that no solution's sum changes, and

    bound(v, x) = constant + what is left at choice x of v,        all other parts being at least 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Edges = Mapping[tuple[int, int], np.ndarray]


def undominated(unary: np.ndarray, tables: Sequence[np.ndarray]) -> np.ndarray:
    """The choices that no other choice beats or equals everywhere; of equal ones the first stays.

    `tables` are those of the variable's edges, with its own choices along the first dimension.
    """
    rows = np.concatenate([unary[:, None], *tables], axis=1)
    keep = np.flatnonzero(np.isfinite(unary))
    order = keep[np.argsort(rows[keep].sum(1, where=np.isfinite(rows[keep])), kind="stable")]
    winners: list[int] = []
    for i in order:
        if not winners or not np.any(np.all(rows[winners] <= rows[i][None, :], axis=1)):
            winners.append(int(i))
    return np.array(sorted(winners), dtype=np.intp)


def lower_bounds(unary: Sequence[np.ndarray], edges: Edges, clip: float, num_sweeps: int = 4) -> list[np.ndarray]:
    """For every choice of every variable, a lower bound of the cost of all solutions that hold it.

    Costs above `clip` count as `clip`: infinities cannot be moved, and lower costs only make lower bounds. Choose a
    little more than the cost of a known solution. Costs are not negative.
    """
    return _Reparametrization(unary, edges, clip).bounds(num_sweeps)


class _Reparametrization:
    def __init__(self, unary: Sequence[np.ndarray], edges: Edges, clip: float) -> None:
        self.unary = [np.minimum(table, clip) for table in unary]
        self.edges = [np.minimum(table, clip) for table in edges.values()]
        self.constant = 0.0
        self.around: list[list[tuple[int, int]]] = [[] for _ in unary]  # of each variable: (neighbour, edge)
        for e, (i, j) in enumerate(edges):
            self.around[i].append((j, e))
            self.around[j].append((i, e))

    def bounds(self, num_sweeps: int) -> list[np.ndarray]:
        best = [np.zeros(len(table)) for table in self.unary]
        for sweep in range(num_sweeps):
            forward = sweep % 2 == 0
            for v in range(len(best)) if forward else reversed(range(len(best))):
                self._pull(v)
                best[v] = np.maximum(best[v], self.constant + self.unary[v])
                self._push(v, [(n, e) for n, e in self.around[v] if (n > v) == forward])
        return best

    def _pull(self, v: int) -> None:
        """Move into a variable what its edges cost at least at each choice, and into the constant what it does."""
        total = self.unary[v]
        for n, e in self.around[v]:
            least = self.edges[e].min(axis=1 if v < n else 0)
            self.edges[e] -= least[:, None] if v < n else least
            total = total + least
        self.constant += float(total.min())
        self.unary[v] = total - total.min()

    def _push(self, v: int, later: Sequence[tuple[int, int]]) -> None:
        """Share what is left out among the edges to variables that are still to come."""
        if not later:
            return
        most = max(len(later), len(self.around[v]) - len(later))
        share = self.unary[v] / most
        for n, e in later:
            self.edges[e] += share[:, None] if v < n else share
        self.unary[v] = share * (most - len(later))
