"""The whole graph: the best candidates of folded graphs, with all blocks.

Candidates of folded graphs are close estimates. The best of them are laid out on the whole graph and judged there. Then
some blocks may keep more than others, and each stage may have its own blocks and lifetimes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.pcg.step.lifetimes import Zero
from shardwright.search.effort import LITTLE, MOST_WHOLE, ORDERS
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.solving import Candidate, Identity, rank
from shardwright.search.request.anytime import Stop
from shardwright.search.rewrites.rewriting import Rewriter
from shardwright.search.tree.fitting import Fitted, Fitter, by_block
from shardwright.search.tree.spreading import said_by_block, sent_in_pieces, spread_out, stored_by_stage
from shardwright.search.tree.ways import Progress, named


class WholeGraph:
    """Plans of the whole graph, until the search has to `stop`."""

    def __init__(self, rewriter: Rewriter, fitter: Fitter, stop: Stop, progress: Progress) -> None:
        self.rewriter, self.fitter, self.stop, self.progress = rewriter, fitter, stop, progress

    def best(
        self, fitted: Mapping[Identity, Fitted], ranked: Sequence[Candidate]
    ) -> tuple[Candidate, dict[Identity, Candidate]]:
        """Return the best plan, and all plans that were judged whose blocks keep the same.

        `fitted`: of some candidates, what they should keep; `ranked`: all candidates, the best one first.
        """
        mixed = list(self.stop.within(self.mixed(fitted, {}, ranked[0])))
        whole = {c.identity: c for c in self.stop.within(self._with_all_blocks(ranked, mixed), needed=not mixed)}
        best = min([*mixed, *whole.values()], key=rank)
        if not best.fits and any(c.fits for c in ranked):  # the estimate was too low
            fitter = self.fitter
            folded = Folded(self.rewriter.whole(best), effort=fitter.folded.effort)
            fits = Fitter(fitter.solver, folded, values=fitter.values, zeros=fitter.zeros, offload=fitter.offload).best(
                [best]
            )
            best = min([best, *(f.candidate for f in self.stop.within(fits))], key=rank)
        if best not in mixed:
            best = min([best, *self.stop.within(self.mixed(fitted, whole, best))], key=rank)
        return best, whole

    def _with_all_blocks(self, ranked: Sequence[Candidate], known: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield the best candidates for the whole graph.

        Once a plan fits, at most `MOST_WHOLE` plans are solved in all. They have to be estimated faster than the best
        of these and of the `known` ones.
        """
        by_identity: dict[Identity, Candidate] = {}
        for candidate in ranked:
            best = min([*known, *by_identity.values()], key=rank, default=None)
            if best and (_rank_to_beat(best) <= rank(candidate) or (best.fits and len(by_identity) >= MOST_WHOLE)):
                break
            if candidate.identity in by_identity:  # it keeps less
                continue
            new = self._whole(candidate)
            self.progress(f"{named(new)}, all blocks: {new.prediction.step_s * 1e3:.1f} ms")
            by_identity[new.identity] = new
            yield new

    def _whole(self, candidate: Candidate) -> Candidate:
        return self.rewriter.again_whole(candidate) if candidate.folded else candidate

    def mixed(
        self, fitted: Mapping[Identity, Fitted], whole: Mapping[Identity, Candidate], best: Candidate
    ) -> Iterator[Candidate]:
        """Yield plans some of whose blocks keep more; the most promising first.

        A plan that loses while all blocks keep the same may win where the memory that it leaves is enough for more
        blocks. Plans whose estimate is no better than the best by now are left out. The best plan itself is tried while
        none is faster, if it is no estimate.
        """
        if not best.fits:
            return
        limit_bytes, best_s = self.fitter.solver.limit_bytes, best.prediction.step_s
        estimates_s = {identity: fit.mixed_s(limit_bytes) for identity, fit in fitted.items()}
        for identity in sorted(estimates_s, key=lambda name: estimates_s[name])[:MOST_WHOLE]:
            is_plan = identity == best.identity and best_s == best.prediction.step_s and not best.folded
            if estimates_s[identity] >= best_s * (1 - LITTLE) and not is_plan:
                continue
            plain = whole.get(identity) or self._laid_out(fitted[identity].candidate)
            for mixed in by_block(self.fitter, fitted[identity], plain, best_s):
                self.progress(f"{named(mixed)}, blocks apart: {mixed.prediction.step_s * 1e3:.1f} ms")
                best_s = min(best_s, mixed.prediction.step_s)
                yield mixed

    def _laid_out(self, candidate: Candidate) -> Candidate:
        """Return the candidate with all blocks, and still with its estimate."""
        return self.rewriter.again_whole(candidate, judged=False) if candidate.folded else candidate

    def by_stage(
        self, best: Candidate, whole: Mapping[Identity, Candidate], ranked: Sequence[Candidate], zeros: Sequence[Zero]
    ) -> tuple[Identity, Candidate]:
        """Return how the best plan was run, and the plan once each stage has its own blocks and lifetimes.

        Plans in other orders that come near are looked at too: stages leave each other different room in each order.
        """
        orders, near = {best.order}, list[Candidate]()
        for other in ranked if best.fits else ():
            is_near = other.fits and other.prediction.step_s <= ORDERS * best.prediction.step_s
            if is_near and other.execution.schedule.num_stages > 1 and other.order not in orders:
                orders.add(other.order)
                near.append(other)
        del near[self.rewriter.folded.effort.orders :]
        wholes = (whole.get(c.identity) or self._whole(c) for c in near)
        improved = [(c.identity, self._improved(c, zeros)) for c in (best, *self.stop.within(wholes))]
        return min(improved, key=lambda item: rank(item[1]))

    def _improved(self, candidate: Candidate, zeros: Sequence[Zero]) -> Candidate:
        """Return the plan with blocks, lifetimes and messages of each stage's own."""
        solver = self.rewriter.solver
        by_block = said_by_block(solver, spread_out(solver, candidate))
        return sent_in_pieces(solver, stored_by_stage(solver, by_block, zeros))

    def rivals(self, best: Candidate, others: Sequence[Candidate]) -> dict[Identity, Candidate]:
        """Return plans beside the requested one, where an estimate says that they are faster."""
        faster = sorted((c for c in others if c.folded and rank(c) < _rank_to_beat(best)), key=rank)
        return {c.identity: self.rewriter.again_whole(c) for c in faster[:MOST_WHOLE]}


def _rank_to_beat(candidate: Candidate) -> tuple[bool, float]:
    """Return a candidate's rank, a little better."""
    unfit, measure = rank(candidate)
    return unfit, measure * (1 - LITTLE)
