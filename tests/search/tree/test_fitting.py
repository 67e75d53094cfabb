"""Plans that keep what memory allows, of models whose blocks are not the plain kind."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.zoo import GPT
from shardwright import fake
from shardwright.cost.timeline.memory import SAFE_SHARE, Memory
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.again import made_again
from shardwright.pcg.step.execution import DEFAULT
from shardwright.pcg.step.parameters import module_block
from shardwright.reports.facts import fits
from shardwright.search.check import check_plan
from shardwright.search.exact.folding import Folded, fold
from shardwright.search.exact.keeping import Keeping, Solved
from shardwright.search.exact.solving import Candidate
from shardwright.search.plan import Plan
from shardwright.search.request.anytime import Stop
from shardwright.search.tree.fitting import Fitted, Fitter, Walk, by_block
from shardwright.search.tree.whole import WholeGraph
from tests.each import each, some
from tests.search import graphs
from tests.search.graphs import branched, every_choice
from tests.search.tree.test_ways import limited, planner


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Around(nn.Module):
    """Part of a block is the model's own code: it lies between two modules of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList((Mlp(), Mlp())) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.layers:  # type: ignore[misc]
            x = second(torch.tanh(first(x) + x))
        return torch.tanh(x).square().mean()


class Backwards(nn.Module):
    """Blocks that run the last one first, with nothing between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x.square().mean()


class Named(nn.Module):
    """Names in which a pattern would see more than they are."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({"1-2": nn.ModuleList(Mlp() for _ in range(5)), "a[b]": Mlp()})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.stages["1-2"]:  # type: ignore[union-attr]
            x = layer(x)
        return self.stages["a[b]"](x).square().mean()


@pytest.mark.parametrize("model", some([Around, Backwards, Named], 1))
def test_any_blocks_are_made_again_as_memory_asks_for(model: type[nn.Module]) -> None:
    graph = capture(model(), {"x": torch.randn(4, 64, 16)}).graph
    assert fold(graph).repeats
    search, way = planner(), {"mesh": Mesh.of(x=2), "roles": ("data",), "microbatches": 1}
    least, most = (
        search.plan(graph, **way, recompute=mode).prediction.memory.total_bytes  # type: ignore[arg-type]
        for mode in ("full", "none")
    )
    made = list[int]()
    for share in (0.9, 0.3):
        plan = limited(search, least + share * (most - least)).plan(graph, **way)  # type: ignore[arg-type]
        assert fits(plan)
        check_plan(plan, graph, every_choice)
        again = made_again(plan.graph, plan.execution).regions
        made.append(len({module_block(f"{plan.graph.by_name[name].source.module}.") for name in again} - {""}))
    assert 0 < made[0] <= made[1] == 5


def candidate(name: str, step_s: float, num_bytes: int = 0) -> Candidate:
    """As much of one as is looked at."""
    memory, device_bytes = Memory(parameters_bytes=num_bytes), planner().cluster.device.memory_bytes
    prediction = SimpleNamespace(step_s=step_s, exposed_s=0.0, memory=memory, device_bytes=device_bytes)
    own = {
        "name": name,
        "solved": object(),
        "mesh": Mesh.of(x=2),
        "identity": (name, Mesh.of(x=2), DEFAULT, ()),
        "prediction": prediction,
        "fits": True,
        "execution": DEFAULT,
        "rewrites": (),
        "lifetimes": "zero-3",
        "folded": True,
    }
    return cast("Candidate", SimpleNamespace(**own))


def test_plans_whose_weights_alone_are_too_much_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    search, asked = planner(), list[str]()
    fitter = Fitter(search.solver, fold(capture(Around(), {"x": torch.randn(4, 64, 16)}).graph), values=True)

    def walk(fitter: Fitter, own: Candidate) -> SimpleNamespace:
        asked.append(own.name)
        return SimpleNamespace(run=lambda best_s: None)

    monkeypatch.setattr("shardwright.search.tree.fitting.Walk", walk)
    most = search.limit_bytes - search.cluster.device.context_bytes
    assert not list(fitter.best([candidate("too much", 1.0, int(most) + 1), candidate("just fits", 2.0, int(most))]))
    assert asked == ["just fits"]
    asked.clear()
    far, near, kept = (candidate(name, 1.0, int(s * most)) for name, s in (("far", 1.8), ("near", 0.9), ("kept", 1.8)))
    for own in (far, near, kept):  # all but parameters is made again in these
        own.execution = replace(DEFAULT, recompute="full")  # type: ignore[misc]
        own.prediction.memory = Memory(activations_bytes=own.prediction.memory.parameters_bytes)  # type: ignore[misc]
    kept.lifetimes = "kept"  # type: ignore[misc]
    assert not list(fitter.best([far, near, kept]))
    assert asked == ["near", "kept", "far"]
    asked.clear()
    assert not list(fitter.best([far, near, kept], best_s=2.0))  # of a plan that fits
    assert asked == ["near", "kept"]


@each("way", [(1, 8, 1, 0.8), (2, 6, 1, 0.8), (1, 12, 3, 0.3), (2, 8, 3, 0.25)])
def test_of_few_blocks_values_are_kept_one_by_one(way: tuple[int, int, int, float]) -> None:
    """No mixture of blocks serves them; branches that are made again apart need less than a whole block does."""
    *sizes, least = way
    graph = branched(*sizes)
    search = planner(1)
    free = search.plan(graph, microbatches=1).prediction
    again = search.plan(graph, microbatches=1, recompute="full").prediction
    taken_s = list[float]()
    for share in (0.95, 0.9, 0.85, 0.8, least):
        plan = limited(search, share * free.memory.total_bytes).plan(graph, microbatches=1)
        assert fits(plan)
        taken_s.append(plan.prediction.step_s)
    assert taken_s == sorted(taken_s)
    assert len(set(taken_s)) >= 3
    assert taken_s[0] < free.step_s + (again.step_s - free.step_s) / 3


def test_mixtures_are_about_as_fast_as_memory_allows() -> None:
    alone = Fitted(candidate("a", 10.0, 100), Keeping())
    assert alone.mixed_s(150) == 10.0
    mixed = replace(alone, larger=Keeping(), larger_s=8.0, larger_bytes=200)
    assert [mixed.mixed_s(limit) for limit in (90, 100, 150, 175, 200)] == [10.0, 10.0, 9.0, 8.5, 10.0]


def test_walks_judge_what_may_fit_and_win() -> None:
    """Of a hull of (bytes, seconds) with room for 100 bytes, where what is not kept takes 10 more by the timeline."""
    hull = [(1000.0, 1.0), (400.0, 1.2), (120.0, 3.0), (80.0, 3.5), (10.0, 6.0)]
    judged, judged_s = list[float](), dict[float, float]()

    class Counted(Walk):
        def __init__(self, fits: bool) -> None:
            self.candidate = candidate("own", 6.0)
            self.candidate.fits = fits  # type: ignore[misc]
            self.fitter = SimpleNamespace(
                solver=SimpleNamespace(limit_bytes=100, limit_of=lambda device_bytes: 100), folded=Folded(Graph((), ()))
            )
            self.num_blocks, self.problems, self.most = 1000, [SimpleNamespace(solve=solve)], None

        def fitted(self, solved: Solved) -> Fitted:
            judged.append(solved.num_bytes)
            own = candidate("", judged_s.get(solved.num_bytes, solved.seconds), int(solved.num_bytes) + 10)
            own.fits = solved.num_bytes + 10 <= 100  # type: ignore[misc]
            return Fitted(own, solved.keeping)

    def solve(price: float) -> Solved:
        num_bytes, seconds = min(hull, key=lambda point: point[1] + price * point[0])
        return Solved(Keeping(lifetimes={"w": str(num_bytes)}), seconds, num_bytes)  # type: ignore[arg-type]

    for alone, best_s, expected, steps in (
        (True, inf, [120, 80], (3.5, 3.0)),
        (False, inf, [10, 120, 80], (3.5, 3.0)),
        (True, 2.9, [120], None),
    ):
        judged.clear()
        found = Counted(alone).run(best_s)
        assert sorted(judged) == sorted(expected)
        assert (found and (found.candidate.prediction.step_s, found.larger_s)) == steps
    judged_s[10.0] = 2.0  # what keeps nothing is the fastest by the timeline
    found = Counted(False).run(2.9)
    assert found is not None
    assert (found.candidate.prediction.step_s, found.larger_s) == (2.0, 3.0)
    hull = [(1000.0, 2.99), (120.0, 2.998), (90.0, 2.9995), (80.0, 3.002), (10.0, 6.0)]
    staged, judged = Counted(True), []
    staged.candidate.execution = DEFAULT.having(num_stages=2)  # type: ignore[misc]
    found = staged.run(inf)
    assert judged == [80, 120], "no more is looked for where that could gain hardly anything"
    assert found is not None
    assert (found.candidate.prediction.step_s, found.larger_s) == (3.002, 2.998)


def test_what_is_slower_with_more_blocks_than_fit_is_not_tried_with_fewer() -> None:
    whole = candidate("whole", 10.0, 100)
    whole.graph = capture(Around(), {"x": torch.randn(4, 64, 16)}).graph  # type: ignore[misc]
    found, tried = Fitted(candidate("few", 10.0, 100), Keeping(), Keeping(), 6.0, 300), list[Candidate]()

    def judged(whole: Candidate, keeping: Keeping) -> Candidate:
        tried.append(candidate("mixed", 9.0, 200))
        tried[-1].fits = False  # type: ignore[misc]
        return tried[-1]

    fitter = SimpleNamespace(judged=judged, solver=SimpleNamespace(limit_bytes=250))
    for best_s, number in ((inf, 3), (9.5, 3), (9.0, 1)):
        tried.clear()
        assert not list(by_block(fitter, found, whole, best_s))  # type: ignore[arg-type]
        assert len(tried) == number


def test_blocks_apart_are_tried_of_every_plan_that_may_win_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those whose estimate is below the best by now, best first; of the best in any case, while none is faster."""
    search = planner()
    limited(search, 150)
    fast, best, alone, late = (
        candidate(*own, 100) for own in (("fast", 10.0), ("best", 9.5), ("alone", 9.6), ("late", 9.9))
    )
    larger = {"larger": Keeping(), "larger_bytes": 200}
    fitted = [Fitted(best, Keeping()), Fitted(alone, Keeping())]
    fitted += [Fitted(c, Keeping(), larger_s=s, **larger) for c, s in ((fast, 6.0), (late, 9.0))]  # type: ignore[arg-type]
    mixtures = {"fast": [candidate("fast", 8.5), candidate("fast", 8.2)], "best": [candidate("best", 9.3)]}
    asked = list[str]()

    def mixed(fitter: object, found: Fitted, whole: Candidate, best_s: float) -> list[Candidate]:
        assert best_s in (by.prediction.step_s, *(c.prediction.step_s for own in mixtures.values() for c in own))
        asked.append(whole.name)
        return mixtures[whole.name]

    monkeypatch.setattr("shardwright.search.tree.whole.by_block", mixed)
    fitter = SimpleNamespace(solver=search.solver)
    rewriter = SimpleNamespace(again_whole=lambda c, judged: c)
    whole_graph = WholeGraph(rewriter, fitter, Stop(), search.progress)  # type: ignore[arg-type]
    whole = cast("Candidate", SimpleNamespace(**{**vars(best), "folded": False}))
    for own, by, names, steps_s in (
        (fitted, best, ["fast"], [8.5, 8.2]),
        (fitted, whole, ["fast"], [8.5, 8.2]),
        (fitted[:2], whole, ["best"], [9.3]),
        (fitted[:2], best, [], []),
    ):
        asked.clear()
        assert [
            mixed.prediction.step_s for mixed in whole_graph.mixed({f.candidate.identity: f for f in own}, {}, by)
        ] == steps_s
        assert asked == names
    unfit = cast("Candidate", SimpleNamespace(fits=False))
    assert not list(whole_graph.mixed({}, {}, unfit))


def test_values_wait_on_the_host_where_nothing_else_fits() -> None:
    """What blocks hand on, which is not made again; the last blocks keep it. With no link it does not fit."""
    with fake():
        model, ids = GPT(64, 64, 32, 4, 40), torch.zeros((2, 16, 64), dtype=torch.long)
    graph = capture(model, {"ids": ids[0], "targets": ids[1]}).graph
    asked: Any = {"mesh": {"x": 2}, "roles": "data", "microbatches": 1, "stages": 1, "compared": False}
    full = graphs.planner(2).plan(graph, "GPT", recompute="full", **asked).prediction
    memory_bytes = int(0.97 * full.memory.total_bytes / SAFE_SHARE)

    def plan(host_bytes_per_s: float, **more: Any) -> Plan:
        chosen = graphs.planner(2, memory_bytes=memory_bytes, host_bytes_per_s=host_bytes_per_s)
        return chosen.plan(graph, "GPT", **asked, **more)

    found = plan(1e9)
    assert fits(found)
    assert found.prediction.step_s < full.step_s
    (_, embedded), (blocks, handed_on) = found.execution.offload
    assert (embedded, handed_on) == (("drop:dropout",), (":add#2",))
    assert re.fullmatch(r"blocks\.0-\d+", str(blocks))
    assert blocks != "blocks.0-39"
    assert not fits(plan(0.0))
    assert not fits(plan(1e9, offload="none"))
