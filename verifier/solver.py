"""Z3 behind three questions: is a formula valid, is it refutable, and what does a counterexample look like.

Formulas are first rewritten as sums of monomials, which decides polynomial identities, the bulk of index arithmetic.
The rest goes to one shared solver, with push and pop: fresh solvers take ten times as long. An answer `unknown` is
never taken for a proof.

Z3 gives up after a number of its own steps, so an answer does not depend on the load of the machine. Some steps of its
nonlinear arithmetic are long: a clock, set far beyond the usual time of the steps, ends these by raising `Late`.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

from shardwright.verifier.limits import Late
from shardwright.verifier.logic import Answer, Formula, Number, Solver, z3
from shardwright.verifier.proof import Failure

STEPS = 10_000_000
"""Z3's `rlimit` for one question, which takes seconds. Proofs of generated rules take at most 4,000 steps."""
STUCK_S = 60.0
SMALL = (2, 3, 5, 7, 4, 6, 8, 9, 10, 11)


@lru_cache(maxsize=1)
def _shared() -> Solver:
    return new_solver()


def new_solver() -> Solver:
    """Return a solver that instantiates quantifiers only by their triggers, without models, and so answers at once."""
    solver = limited(z3.SimpleSolver(), STEPS)
    solver.set("smt.mbqi", False)
    solver.set("auto_config", False)
    return solver


def limited(solver: Solver, steps: int) -> Solver:
    """Make a solver give up after this many steps, and return it."""
    solver.set("rlimit", steps)
    solver.set("timeout", round(STUCK_S * 1e3))
    return solver


def answer(solver: Solver) -> Answer:
    """Return Z3's answer; raise `Late` if the clock ended it, which decides nothing."""
    start = time.monotonic()
    verdict = solver.check()
    if verdict == z3.unknown and time.monotonic() - start >= STUCK_S:
        raise Late
    return verdict


def version() -> str:
    """Return the solver's version, as certificates name it."""
    return "z3 " + z3.get_version_string()


def is_valid(formula: Formula, given: Iterable[Formula] = ()) -> bool:
    """Return whether `formula` follows from `given`. False also if Z3 does not know."""
    with premises(list(given)) as known:
        return known.imply(formula)


@dataclass
class Premises:
    """The assumptions of several questions. `given` may grow between questions; each asks with all of it so far."""

    given: list[Formula]
    _solver: Solver | None
    _held: int = field(default=0, init=False)

    def imply(self, formula: Formula) -> bool:
        """Return whether `formula` follows. False also if Z3 does not know."""
        goal = z3.simplify(formula, som=True)
        if z3.is_true(goal):
            return True
        with scope(self._told()) as solver:
            solver.add(z3.Not(goal))
            verdict = answer(solver)
        if verdict == z3.unknown:  # earlier questions can lead a solver astray
            alone = new_solver()
            alone.add(*[z3.simplify(h, som=True) for h in self.given], z3.Not(goal))
            verdict = answer(alone)
        return verdict == z3.unsat

    def hold(self) -> bool:
        """Return whether the premises may hold together; True also if Z3 does not know."""
        return answer(self._told()) != z3.unsat

    def _told(self) -> Solver:
        """Return the solver, with all premises added."""
        if self._solver is None:
            raise RuntimeError("Premises: asked after the end of `with premises`; ask inside")
        self._solver.add(*[z3.simplify(h, som=True) for h in self.given[self._held :]])
        self._held = len(self.given)
        return self._solver


@contextmanager
def premises(given: list[Formula]) -> Generator[Premises]:
    """Yield premises to ask about. Questions about other premises inside have a separate solver."""
    if _shared().num_scopes():  # in use further out, or left so by a time limit that struck between two instructions
        _shared.cache_clear()
    with scope(_shared()) as solver:
        known = Premises(given, solver)
        try:
            yield known
        finally:
            known._solver = None


@contextmanager
def scope(solver: Solver) -> Generator[Solver]:
    """Forget assertions that are added inside, also after an exception."""
    depth = solver.num_scopes()
    try:
        solver.push()
        yield solver
    finally:
        solver.pop(solver.num_scopes() - depth)


def refute(claim: str, formula: Formula, given: Iterable[Formula], sizes: Iterable[Number]) -> Failure:
    """Return a failure, with a model of `given` and not `formula` if one is found at small, distinct sizes."""
    given, sizes = list(given), list(sizes)
    for small in (SMALL, SMALL[::-1], SMALL[3:] + SMALL[:3]):
        concrete = [(size, z3.IntVal(small[i % len(small)])) for i, size in enumerate(sizes)]
        solver = new_solver()
        solver.add(*[z3.substitute(h, *concrete) for h in given], z3.Not(z3.substitute(formula, *concrete)))
        if answer(solver) == z3.sat:
            model = solver.model()
            values = {str(size): str(value) for size, value in concrete}
            values |= {str(d): str(model[d]) for d in model.decls() if d.arity() == 0}
            return Failure(claim, values)
    return Failure(claim)


def is_satisfiable(formulas: Iterable[Formula]) -> bool:
    """Return whether the formulas may hold together; True also if Z3 does not know."""
    with premises(list(formulas)) as known:
        return known.hold()
