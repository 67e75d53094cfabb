"""The tuning of one space after the other: microbatches, recomputation, lifetimes of gathered weights.

More microbatches and more recomputation take less memory and more time. So on each mesh, for each kind of
recomputation, the fewest microbatches that fit are looked for; and while memory makes the layouts slower, more of them.
Blocks that repeat are folded, so that a try takes a fraction of a second. The plans that people choose by hand come
first, as they are quickly tuned: what they need is where the search on every mesh begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain, product
from math import inf, prod
from operator import itemgetter

from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.recompute import Recompute
from shardwright.pcg.step.time import check_time
from shardwright.pcg.types import ITEM_BYTES
from shardwright.search.choices.problem import NoLayoutsError, Prices
from shardwright.search.exact.folding import Folded, fold
from shardwright.search.exact.solving import Candidate, Solver, different, over_time, rank
from shardwright.search.exact.within import stored_bytes, time_and_bytes
from shardwright.search.request.asked import RecomputeMode
from shardwright.search.request.limits import Limits
from shardwright.search.request.pins import Pins
from shardwright.search.request.restrict import DATA, FREE, ZERO
from shardwright.search.request.spaces import Space, baselines, divided, microbatch_counts, sequence_baselines
from shardwright.search.tree.counts import Counts, Proposals
from shardwright.search.tree.fitting import LITTLE

Progress = Callable[[str], None]
MANY_NODES = 2**12
"""The number of nodes from which a folded graph is large: a try takes seconds, so each way to run it is tried once, and
again only where it does not fit.
"""
_MANY = 1024
"""The devices from which two axes are too coarse, and a mesh of three is tried; on fewer, none was found to gain."""
_MOST_MESHES = 2
"""The most meshes that are searched for a large model."""
_OF_BOUND = 0.5
"""The share of a mesh's bound that a rewritten plan may take: bounds are of operators as they are written."""
_NEAR = 1.15
"""The factor on the best step by now beyond which other layouts for the same way to run are not tried."""
UNTRIED = 0.95
"""The factor on its floor that a step may take while no step of the kind is known: floors are estimates, and the
largest error that was seen is 4.5 %.
"""
_BEHIND = 1.25
"""The factor on a plan by hand of another kind beyond which other degrees of this kind are not tried."""
_PATIENT = 4.0
"""The factor on the least bound of all meshes from which a mesh is tried last, while nothing fits."""
_MODES: dict[Recompute, str] = {
    "none": "", "selective": ", selective recomputation", "full": ", full recomputation",
}  # fmt: skip


def named(candidate: Candidate) -> str:
    """Return a candidate's name, with its recomputation."""
    mode = candidate.execution.recompute
    return candidate.name + (_MODES[mode] if isinstance(mode, str) else ", recomputation by block")


_Asked = tuple[Folded, Mesh, tuple[str, ...], Execution, Zero, Limits]
"""The arguments that identify a problem."""
_Found = tuple[Candidate, Space, Sequence[RecomputeMode]]
"""A plan, its space, and all recomputations that were tried there."""


class Tuner:
    """A search for ways to run one graph.

    Attributes:
        spaces: the meshes that are searched: all, the one that is given, or those that keep to the pins.
        obstacle: why the batch cannot be cut into microbatches, or "".
        tried: all candidates that were solved, also those that do not fit.
        known: the best candidate of each way that was tried: a space, a recomputation, a number of microbatches.
        refused: why the last way without layouts had none.
    """

    def __init__(self, solver: Solver, graph: Graph, execution: Execution, pins: Pins, progress: Progress) -> None:
        self.solver, self.execution, self.pins, self.progress = solver, execution, pins, progress
        self.folded = folded(graph, pins)
        self.modes = self._modes()
        self.spaces = pins.spaces
        self.obstacle = ""
        self.refused = NoLayoutsError(f"no mesh of {solver.cluster.num_devices} devices keeps to all that is asked for")
        self.counts = self._counts()
        self.fastest_s = inf
        self._like: dict[RecomputeMode, float] = {}  # the step of the fastest plan by what is made again
        self.tried: list[Candidate] = []
        self.known: dict[tuple[Space, RecomputeMode, int], Candidate] = {}
        self._start: dict[RecomputeMode, int] = {}  # the number of microbatches that fitted last
        self._ideal: dict[RecomputeMode, float] = {}
        self._over: dict[Hashable, float] = {}  # least step / floor; below 1 as shared moves count twice

    def _modes(self) -> list[RecomputeMode]:
        """Return the recomputations that may be tried. Raises `PlanError` where the requested one is not there."""
        found = list[RecomputeMode]()
        for mode in self.pins.recomputes:
            try:
                self.solver.again(self.folded.graph, replace(self.execution, recompute=mode))
            except PlanError:
                if self.pins.recompute is not None:
                    raise
                continue
            found.append(mode)
        return found

    def _counts(self) -> list[int]:
        """Return the numbers of microbatches to try. Raises `PlanError` where the requested one cannot be run."""
        if self.pins.microbatches == 1 or self.pins.size < 2:
            return [1]
        counts = microbatch_counts(self.pins.size) if self.pins.microbatches is None else [self.pins.microbatches]
        count = counts[min(1, len(counts) - 1)]
        in_turn = Mesh((TIME,), (count,))  # how devices share a microbatch is checked elsewhere, and takes longer
        try:
            check_time(self.solver.fastest_layouts(self.folded, in_turn, (), self.execution), self.execution)
        except PlanError as error:
            if self.pins.microbatches is not None:
                raise
            self.obstacle = str(error)
            return [1]
        return counts

    def baselines(self, *, able: bool = False) -> Iterator[Candidate]:
        """Yield plans that people choose by hand, each the best over its degrees, microbatches and recomputation.

        `able`: leave out those for which parameters, gradients and moments alone are too much. For large models they
        always are.
        """
        for spaces in baselines(self.solver.cluster):
            if (able or self.folded.is_large) and all(map(self._cannot_hold, spaces)):
                continue
            if (found := self._best(spaces)) is not None:
                yield self.told(found[0])

    def by_hand(self) -> Iterator[Candidate]:
        """Yield the best plan by hand on the given spaces. Raises `NoLayoutsError` where none has layouts to run."""
        if (found := self._best(self.spaces)) is None:
            raise self.refused
        yield self.told(found[0])

    def sequence_baselines(self) -> Iterator[Candidate]:
        """Yield plans by hand that share the sequence, to compare with; the search does not begin with them."""
        for spaces in sequence_baselines(self.solver.cluster, self.folded.graph):
            if (found := self._best(spaces, self.fastest_s)) is not None:
                yield self.told(self._between(*found))

    def _best(self, spaces: Sequence[Space], fastest_s: float = inf) -> tuple[Candidate, Space] | None:
        """Return the best plan on some spaces, and its space. The likeliest is tried first; others have to beat it.

        Of the spaces on which nothing can fit, one is tried if no other is. `fastest_s`: the step of a plan that the
        others have to beat too, once one of these plans is there to compare with it.
        """
        best: tuple[Candidate, Space] | None = None
        mode, is_large = self.modes[0], self.folded.is_large
        excess_bytes = [self._excess_bytes(space, mode) for space in spaces]
        outlook = [
            (e, 0.0 if e else self.floor_s(s, mode, self._fewest(s))) for e, s in zip(excess_bytes, spaces, strict=True)
        ]
        for i in sorted(range(len(spaces)), key=outlook.__getitem__):
            if best is not None and (excess_bytes[i] or is_large):
                break
            rival_s = min(best[0].prediction.step_s, fastest_s) if best is not None and best[0].fits else inf
            if best is not None and inf > rival_s and best[0].prediction.step_s > _BEHIND * rival_s:
                break
            ways = ((way, spaces[i]) for way in self.ways(spaces[i], rival_s=rival_s, once=is_large))
            best = min(chain([] if best is None else [best], ways), key=lambda found: rank(found[0]), default=None)
        return best

    def searched(self, known: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield the best plan of every mesh, or of the given one; on the best, every possible recomputation is tried.

        Raises `NoLayoutsError` where no mesh has layouts that can be run.
        """
        best = None if self.pins.guided else min(known, key=rank, default=None)
        if self.pins.guided:  # plans outside the request do not count
            self.fastest_s = inf
        found = list[_Found]()
        for own in self._over_meshes(best):
            found.append(own)
            yield self.told(own[0])
        if not found:
            if best is not None and best.fits:  # nothing can beat the known plan
                return
            raise self.refused
        own, space, tried = min(found, key=lambda entry: self._promise(entry[0]))
        if self.pins.size % space.mesh.num_devices and (between := self._between(own, space)) is not own:
            yield self.told(own := between)
        if self._has_room(own, space) or self._excess_bytes(space, tried[0]):
            return
        rest = list[RecomputeMode](m for m in self.modes if m not in tried and self.ideal_s(m) < own.prediction.step_s)
        if rest and (ways := list(self.ways(space, rest, self.fastest_s))):
            yield self.told(min(ways, key=rank))

    def _over_meshes(self, best: Candidate | None) -> Iterator[_Found]:
        """Yield the best plan of every mesh, the least bound first; meshes that cannot win are left out.

        Every mesh is tried with the recomputation of the best plan by then; while no plan fits, with the one that keeps
        the least. In that time, meshes whose bound is a few times the least one are left for when all others have been
        tried.
        """
        given, limits_s = set[int](), [inf]
        if not self._is_hopeless:
            limits_s.insert(0, _PATIENT * min(map(self._least_s, self.spaces), default=inf))
        for most_s in limits_s:
            for space in self._promising():
                modes = self.modes
                if best is not None:
                    modes = list[RecomputeMode]((best.execution.recompute,)) if best.fits else modes[-1:]
                if given and (self._is_hopeless or self._excess_bytes(space, modes[0])):  # nothing fits there either
                    continue
                if ways := list(self.ways(space, modes, self.fastest_s if self.fastest_s < inf else most_s)):
                    own = min(ways, key=rank)
                    best = own if best is None else min(best, own, key=rank)
                    if id(own) not in given:  # and it is not reported again
                        given.add(id(own))
                        yield own, space, modes
            if best is not None and best.fits:
                return

    def nested(self, likely: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield plans on meshes of three axes, cut from those of likely plans and run as the best plan tried there.

        A mesh is tried if it may win by its bound, and if it may take less than the floor of the mesh that it is cut
        from.
        """
        for like in likely:
            sizes = like.mesh.devices.sizes
            space = self.pins.nested.get(sizes)
            if like.mesh.num_devices < _MANY or space in (None, *self.spaces):
                continue
            tried = min((c for c in self.tried if c.mesh == like.mesh), key=rank)
            mode, count = tried.execution.recompute, like.mesh.num_microbatches
            wider = next(own for own in self.pins.spaces if own.mesh.sizes == sizes)
            least_s = self.over(wider) * self.floor_s(space, mode, count)
            if least_s >= self.floor_s(wider, mode, count) or self._least_s(space) >= self.fastest_s:
                continue
            self.spaces = (*self.spaces, space)
            with suppress(NoLayoutsError):
                yield self.told(self.tried_with(space, mode, count))

    def _promising(self) -> Iterator[Space]:
        """Yield the spaces that may win when their turn comes, even once rewritten; the least bound first.

        For large models, only the spaces of the least bounds, and of the same axes in two orders the first. All spaces,
        as they come, where nothing can fit.
        """
        if self._is_hopeless:
            yield from self.spaces
            return
        begun = set[Hashable]()
        for bound_s, space in sorted(((self._least_s(space), space) for space in self.spaces), key=itemgetter(0)):
            if self.fastest_s <= _OF_BOUND * bound_s < inf:
                continue
            axes = *sorted(zip(space.mesh.sizes, space.roles, strict=True)), space.limits
            if self.folded.is_large and (axes in begun or len(begun) == _MOST_MESHES):
                continue
            begun.add(axes)
            yield space

    def _least_s(self, space: Space) -> float:
        """Return a bound: no plan on these devices in the fewest microbatches takes less, nor much less in more."""
        mesh = over_time(space.mesh, self._fewest(space))
        return self._bound_s(space, mesh, replace(self.execution, recompute=self.modes[0]))

    def _between(self, best: Candidate, space: Space) -> Candidate:
        """Return the best plan with layouts for prices between no overlap and full overlap.

        With few examples a step is short, and what is summed at its end is much of it. Large models are left as they
        are.
        """
        if self.folded.is_large:
            return best
        beside, ways = prod(self.solver.besides) ** 0.5, list[Candidate]()
        for priced in _priced(space.zeros, best.mesh) if beside < 1 else ():
            with suppress(NoLayoutsError):
                ways.append(self.solver.solve(
                    self.folded, best.mesh, best.roles, best.name, best.execution, space.zeros, priced, beside=beside,
                    limits=space.limits,
                ))  # fmt: skip
        self.tried += ways
        return min([best, *ways], key=rank)

    def _promise(self, candidate: Candidate) -> tuple[bool, float]:
        """Return a key that is less for a likelier mesh: where others fit, the step of a plan that does not."""
        unfit, measure = rank(candidate)
        return unfit, candidate.prediction.step_s if self.fastest_s < inf else measure

    def told(self, candidate: Candidate) -> Candidate:
        """Report the candidate and return it."""
        p = candidate.prediction
        unfit = "" if candidate.fits else ", does not fit"
        self.progress(f"{named(candidate)} on {candidate.mesh}: {p.step_s * 1e3:.1f} ms{unfit}")
        return candidate

    def ways(
        self,
        space: Space,
        modes: Sequence[RecomputeMode] | None = None,
        rival_s: float = inf,
        *,
        once: bool = False,
    ) -> Iterator[Candidate]:
        """Yield, for each kind of recomputation that could be the best, the best number of microbatches that was found.

        The likeliest of all kinds and numbers is tried first. `rival_s`: the step of a plan that fits, which these have
        to beat. Where nothing can fit, only what keeps the least is tried, and nothing against a rival. `once`: at most
        one is tried.
        """
        modes, counts, fastest_s = modes or self.modes, divided(space, self.counts, self.pins.size), rival_s
        if self._excess_bytes(space, modes[0]):
            modes, counts = modes[-1:] if rival_s == inf else (), counts[-1:]
        if once:
            modes, counts = modes[:1], counts[:1]
        runs: list[tuple[RecomputeMode, Counts]] = [
            (m, self._microbatches(space, m, counts, m in modes[-1:] and rival_s == inf)) for m in modes
        ]
        ahead: list[tuple[float, int, Proposals | None]] = [(0.0, 0, None)] if runs else []
        while ahead:
            floor_s, i, floors = heappop(ahead)
            can_win = self._can_win(space, floor_s, fastest_s)
            if floors is None:
                if can_win:
                    _begin(ahead, [counts for _, counts in runs], i)
                continue
            try:
                following = floors.send(can_win)
            except StopIteration:
                following = None
            except NoLayoutsError as error:
                self.refused = error
                continue
            if can_win:
                newest = runs[i][1].newest
                fastest_s = min(fastest_s, newest.prediction.step_s if newest.fits else inf)
                if self._has_room(newest, space):
                    break
            if following is not None:
                heappush(ahead, (following, i, floors))
        yield from self._bests(runs)

    def _bests(self, runs: Sequence[tuple[RecomputeMode, Counts]]) -> Iterator[Candidate]:
        """Yield the best number of microbatches of each kind that has any; if it fits, another mesh begins with it."""
        for mode, counts in runs:
            if counts.found:
                number, best = min(counts.found.items(), key=lambda item: rank(item[1]))
                if best.fits:
                    self._start[mode] = number
                yield best

    def _has_room(self, found: Candidate, space: Space) -> bool:
        """Return whether a plan keeps all, with memory to spare, in the fewest microbatches: recomputing adds time."""
        if self.folded.is_large:
            return found.fits
        in_fewest = found.execution.recompute == "none" and found.mesh.num_microbatches == self._fewest(space)
        return in_fewest and found.fits and not found.is_tight

    @property
    def _is_hopeless(self) -> bool:
        """Return whether nothing can fit of a large model: then one mesh is tried."""
        return self.folded.is_large and self.nothing_fits

    @property
    def nothing_fits(self) -> bool:
        """Return whether an equal share of what is stored is too much for a device, however a step is run."""
        return self._share_is_too_much(self.solver.cluster.num_devices)

    def _share_is_too_much(self, num_shares: int) -> bool:
        """Return whether so many devices cannot store parameters, gradients and moments; False where devices differ."""
        solver = self.solver
        return not solver.cluster.parts and bool(solver.excess_bytes(self._stored_bytes / num_shares))

    @cached_property
    def _stored_bytes(self) -> float:
        return self.solver.all_stored_bytes(self.folded)

    def _cannot_hold(self, space: Space) -> bool:
        """Return whether parameters, gradients and moments alone are too much.

        For a large model, equal shares are checked first, which takes one problem for all spaces.
        """
        shared = prod(size for role, size in zip(space.roles, space.mesh.sizes, strict=True) if role != DATA)
        if self.folded.is_large and self._share_is_too_much(shared * space.pipeline.stages):
            return True
        return bool(self._excess_bytes(space, self.modes[0]))

    def _excess_bytes(self, space: Space, mode: RecomputeMode) -> float:
        """Return by how many bytes what is always there is too much for these devices; 0 where it may fit.

        `mode`: a recomputation whose problem is needed anyway.
        """
        try:
            problem, _ = self.solver.problem(*self._longest(space, mode, self._fewest(space)))
        except NoLayoutsError:
            return 0.0
        return self.solver.excess_bytes(stored_bytes(problem) + self._gathered_bytes(space))

    def _gathered_bytes(self, space: Space) -> float:
        """Return the least bytes of parameters beside the stored parts, where all have to stay gathered at once."""
        if "zero-3" in space.zeros or FREE in space.roles:
            return 0.0
        axes = list(zip(space.roles, space.mesh.sizes, strict=True))
        used = prod(size for role, size in axes if role not in (DATA, ZERO)) * space.pipeline.stages
        return self._parameter_bytes / used * (1 - 1 / prod(size for role, size in axes if role == ZERO))

    @cached_property
    def _parameter_bytes(self) -> float:
        """The bytes of all parameters in the dtype in which they are gathered, or less."""
        graph = self.folded.graph
        kinds = [(graph.types[leaf.name], self.folded.times(leaf.name)) for leaf in graph.leaves("parameter")]
        return sum(times * kind.num_elements * min(2, ITEM_BYTES[kind.dtype]) for kind, times in kinds)

    def _fewest(self, space: Space) -> int:
        """Return the fewest microbatches on these devices."""
        return divided(space, self.counts, self.pins.size)[0]

    def _microbatches(self, space: Space, mode: RecomputeMode, counts: Sequence[int], unrivalled: bool) -> Counts:
        """Return the numbers of microbatches, from where the space before it fitted."""
        return Counts(
            counts,
            lambda count: self.tried_with(space, mode, count),
            lambda count: self.floor_s(space, mode, count),
            lambda found: self._eased_s(space, mode, found),
            lambda count: self.crowding(space, mode, count),
            self.solver.limit_bytes,
            self._start.get(mode, 0),
            first=self.folded.is_large,
            unrivalled=unrivalled,
        )

    def _eased_s(self, space: Space, mode: RecomputeMode, found: Candidate) -> float:
        """Return an estimate of a plan's step with ample memory: less by the share that memory adds to the sum.

        0 where the longest lifetime has no layouts.
        """
        problem, solution, prices = found.solved
        own_s, _ = time_and_bytes(problem, solution, prices.beside)
        try:
            longest, eliminator = self.solver.problem(*self._longest(space, mode, found.mesh.num_microbatches))
        except NoLayoutsError:
            return 0.0
        return found.prediction.step_s * eliminator.solve(longest, Prices(beside=prices.beside)).bound / own_s

    def over(self, space: Space) -> float:
        """Return the least ratio of a step to its floor on these devices; 0 where none is known."""
        return self._over.get(_alike(space), 0.0)

    def _can_win(self, space: Space, floor_s: float, rival_s: float) -> bool:
        """Return whether a step of this floor may take less, by how steps on these devices compare with floors.

        An infinite floor says that the longest lifetime has no layouts.
        """
        return inf in (rival_s, floor_s) or floor_s * self.over(space) < rival_s

    def floor_s(self, space: Space, mode: RecomputeMode, count: int) -> float:
        """Return `Solver.floor_s`, or inf where the longest lifetime has no layouts."""
        try:
            return self.solver.floor_s(*self._longest(space, mode, count))
        except NoLayoutsError:
            return inf

    def crowding(self, space: Space, mode: RecomputeMode, count: int) -> float:
        """Return `Solver.crowding`, or 0, which says nothing, where the longest lifetime has no layouts."""
        try:
            problem, _ = self.solver.problem(*self._longest(space, mode, count))
        except NoLayoutsError:
            return 0.0
        return self.solver.crowding(problem, space.run(self.execution, mode))

    def _longest(self, space: Space, mode: RecomputeMode, count: int) -> _Asked:
        """Return the arguments of a way's problem with the longest lifetime that is likely.

        Stages seldom have room for what stays longest, as all are in use at once.
        """
        execution, mesh = space.run(self.execution, mode), over_time(space.mesh, count)
        own = different(space.zeros, mesh)
        likely = own[-1] if space.pipeline.stages > 1 else own[0]
        return self.folded, mesh, space.roles, execution, likely, space.limits

    def tried_with(self, space: Space, mode: RecomputeMode, count: int) -> Candidate:
        """Return the best plan of a way: at first with layouts without overlap, for the likeliest lifetime.

        If that comes near the best plan by now, layouts for full overlap are tried too. The better of the two is then
        tried with the other lifetime, if by their sum a faster plan is likely.
        """
        if (known := self.known.get((space, mode, count))) is not None:
            return known
        execution, mesh = space.run(self.execution, mode), over_time(space.mesh, count)
        best: Candidate | None = None
        besides = self.solver.besides
        zeros = _priced(space.zeros, mesh)
        is_large = self.folded.is_large
        if space.pipeline.stages > 1:  # stages seldom have room for the longest lifetime
            zeros = zeros[-1:]
        elif is_large:  # the floor's lifetime first
            zeros = list(dict.fromkeys((*different(space.zeros, mesh)[:1], *zeros)))
        besides = besides[-1:] if is_large else besides
        for priced, beside in product(zeros, besides):
            asked = self.folded, mesh, space.roles, execution, priced, space.limits
            if best is not None:
                if best.fits == is_large:  # small: only a fitting plan is improved; large: one is enough
                    break
                if priced != zeros[0] and beside != best.solved[2].beside:  # it was worse for the other lifetime
                    continue
                if not self._may_gain(best, asked, space, mode, beside):
                    continue
            found = self.solver.solve(
                *asked[:3],
                space.name,
                execution,
                space.zeros,
                priced,
                beside=beside,
                limits=space.limits,
                near=best.solved[2].byte if best is not None else 0.0,
            )
            best = found if best is None else min(best, found, key=rank)
            self.fastest_s = min(self.fastest_s, best.prediction.step_s if best.fits else inf)
            self._like[mode] = min(self._like.get(mode, inf), best.prediction.step_s if best.fits else inf)
        assert best is not None
        if 0 < (floor_s := self.floor_s(space, mode, count)) < inf:
            alike = _alike(space)
            self._over[alike] = min(self._over.get(alike, 1.0), best.prediction.step_s / floor_s)
        self.tried.append(best)
        self.known[space, mode, count] = best
        return best

    def _may_gain(self, best: Candidate, asked: _Asked, space: Space, mode: RecomputeMode, beside: float) -> bool:
        """Return whether layouts of another lifetime, or for another share of communication, may be faster.

        With stages, their floor alone decides: what stages send beside compute is often most of what a step waits for.
        """
        fastest_s = self._like.get(mode, inf)
        rival_s = best.prediction.step_s if beside == 1 else fastest_s
        if space.pipeline.stages > 1:
            return UNTRIED * self.floor_s(space, mode, asked[1].num_microbatches) < rival_s
        if best.prediction.step_s > _NEAR * fastest_s:
            return False
        return self.folded.is_large or self._expected_s(best, asked, beside) < rival_s * (1 - LITTLE)

    def _expected_s(self, found: Candidate, asked: _Asked, beside: float) -> float:
        """Return an estimate of a plan's step with layouts of another lifetime, or share of communication.

        It is less by the share of the plan's sum that these save at most, if they keep no more than the plan does.
        """
        problem, eliminator = self.solver.problem(*asked)
        _, solution, prices = found.solved
        own_s, own_bytes = time_and_bytes(problem, solution, beside)
        least_s = eliminator.solve(problem, Prices(prices.byte, beside)).bound - prices.byte * own_bytes
        return found.prediction.step_s * (least_s / own_s if 0 < own_s < inf else float(own_s == 0))

    def bound_s(self, num_microbatches: int, execution: Execution) -> float:
        """Return a step that no layouts of the operators as written beat, so run on the meshes that are searched.

        `Solver.least_s` has the conditions.
        """
        spaces = self.spaces_like(execution)
        return min(self._bound_s(space, over_time(space.mesh, num_microbatches), execution) for space in spaces)

    def spaces_like(self, execution: Execution) -> Sequence[Space]:
        """Return all spaces that are searched in as many stages."""
        if execution.schedule.num_stages == 1:
            return self.spaces
        staged = chain.from_iterable(self.pins.staged.values())
        return [space for space in staged if space.pipeline.stages == execution.schedule.num_stages]

    def _bound_s(self, space: Space, mesh: Mesh, execution: Execution) -> float:
        """Return `Solver.least_s`, or inf where the longest lifetime has no layouts."""
        try:
            return self.solver.least_s(self.folded, mesh, space.roles, execution, space.limits)
        except NoLayoutsError:
            return inf

    def ideal_s(self, mode: RecomputeMode) -> float:
        """Return a lower bound: every device has an equal part of all operators' work, and nothing is sent."""
        if mode not in self._ideal:
            execution = replace(self.execution, recompute=mode)
            self._ideal[mode] = self.solver.work_s(self.folded, execution) / self.solver.cluster.num_devices
        return self._ideal[mode]


def _begin(ahead: list[tuple[float, int, Proposals | None]], runs: Sequence[Counts], i: int) -> None:
    """Queue a kind of recomputation, and the next one, which takes no less, where the first begins.

    So no problem is built for a kind that is never likely enough. A kind that cannot fit makes room for the next at
    once.
    """
    floors = runs[i].proposals()
    floor_s = next(floors, None)
    if floor_s is not None:
        heappush(ahead, (floor_s, i, floors))
    if i + 1 < len(runs):
        heappush(ahead, (floor_s or 0.0, i + 1, None))


def _alike(space: Space) -> Hashable:
    """Return a key of how steps compare with floors: the roles, if they leave no choice, whatever the degrees."""
    return space if FREE in space.roles else space.roles


def folded(graph: Graph, pins: Pins) -> Folded:
    """Return the graph with its equal blocks folded, where all of them are run and pinned alike."""
    found = Folded(graph) if pins.by_block else fold(graph)
    found = Folded(graph) if pins.limits.tell_apart(graph, found.alike) else found
    return replace(found, is_large=len(found.graph.nodes) >= MANY_NODES)


def _priced(zeros: Sequence[Zero], mesh: Mesh) -> Sequence[Zero]:
    """Return the shortest and the longest lifetime, in the order in which they are likely to be the best."""
    own = different(zeros, mesh)
    ends = dict.fromkeys((own[0], own[-1]))
    return list(ends) if mesh.num_microbatches > 1 else list(reversed(ends))
