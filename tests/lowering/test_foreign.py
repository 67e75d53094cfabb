"""Foreign parts on two ranks: equal to one process; what differs from capture is an error on every rank."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.api import compile
from shardwright.checking import check_capture
from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.trial.dryrun import dry_run
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import ForeignError
from shardwright.pcg.foreign import calls
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.offers import parse_choices
from shardwright.pcg.rows.declared import ROW_BY_ROW
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.foreign import MODELS, ROWS, WIDTH, Deep, Net, Slope, make
from tests.lowering.runs import (
    SEED,
    Case,
    Step,
    assert_all_train_as_serial,
    assert_same_step,
    outcome,
    parallel_step,
    run_all,
    serial_step,
)

TWO = Mesh.of(dp=2)
FOUND = ("boolean index", "gradient reversal", "quantizer", "python state", "ragged inside", "function", "derivative")
"""The models whose parts are found; of the others they are named, which takes less time."""


@cache
def case(name: str) -> Case:
    model, batch = make(name)
    options: dict[str, Any] = {"find": True} if name in FOUND else {"foreign": {MODELS[name][2]: "whole"}}
    return Case(model, batch, capture(model, batch, **options))


def data(found: Case) -> Graph:
    return found.graph(TWO, dict.fromkeys(found.batch, (S(0),)), data_axes=(0,))


def zero(found: Case) -> Graph:
    even = (name for name, p in found.model.named_parameters() if p.shape[0] % 2 == 0)
    storage: dict[str, Layouts] = dict.fromkeys([*found.batch, *even], (S(0),))
    return found.graph(TWO, storage, data_axes=(0,))


def test_steps_are_those_of_one_process() -> None:
    def step(name: str, graph: Graph) -> Step:
        return parallel_step(case(name).lower(graph), case(name).batch)

    jobs = {(name, layout): layout(case(name)) for name in MODELS for layout in (data, zero)}
    results = run_all([(2, partial(step, name, graph)) for (name, _), graph in jobs.items()])
    for (name, layout), steps in zip(jobs, results, strict=True):
        for found in steps:
            assert_same_step(found, serial_step(case(name)), 1e-11, f"{name}, {layout.__name__}")


def test_along_the_batch_devices_and_microbatches_have_rows_of_their_own() -> None:
    model, batch = make("lengths")
    one = Case(model, batch, capture(model, batch, foreign={"part": "batch"}))
    planner = Planner(Cluster.local(2), certified_choices())
    meshes = [(Mesh.of(x=2), "zero"), (Mesh.of(mb=2, x=2), "data")]
    graphs = [planner.solve(one.captured.graph, mesh, (role,), "test").graph for mesh, role in meshes]
    for graph in graphs:
        (node,) = (node for node in graph.nodes if node.op == ROW_BY_ROW)
        assert set(node.split) == set(parse_choices(["b"]))
    assert_all_train_as_serial(one, {str(graph.mesh): graph for graph in graphs})


def test_parts_are_found() -> None:
    for name in FOUND:
        (call,) = calls(case(name).captured.graph)
        assert call.name == MODELS[name][2], name
        assert call.why, name


def test_the_eager_step_is_compared() -> None:
    for name in ("boolean index", "python state"):
        assert check_capture(case(name).model, case(name).captured, (), case(name).batch).equal


@cache
def deep() -> Case:
    torch.manual_seed(0)
    model, batch = Deep().double(), {"x": torch.randn(ROWS, WIDTH).double()}
    return Case(model, batch, capture(model, batch, foreign={"h.0.part": "whole", "h.1.part": "whole"}))


def steps_of(module: nn.Module, batch: dict[str, Tensor]) -> list[Step]:
    """Three steps with updates, and with Python state that counts them."""
    optimizer, found = torch.optim.SGD(module.parameters(), 0.1), list[Step]()
    for number in range(3):
        optimizer.zero_grad()
        torch.manual_seed(number)
        if isinstance(module, ParallelModule):
            loss = module.forward_backward(**batch)
        else:
            loss = module(**batch)
            loss.backward()
        found.append(copy.deepcopy(outcome(module, loss)))
        optimizer.step()
    return found


def test_a_part_is_not_made_again() -> None:
    """Regions that backward makes again leave parts alone, which count their calls and draw."""
    found = deep()
    modes: list[Execution] = [DEFAULT, Execution(recompute="full")]
    planner = Planner(Cluster.local(2), certified_choices())
    graph = planner.solve(found.captured.graph, Mesh.of(x=2), ("zero",), "test").graph
    (expected,) = run_ranks(lambda: steps_of(found.model, found.batch), 1)
    by_mode = found.on_ranks_of([(graph, mode) for mode in modes], lambda module: steps_of(module, found.batch))
    for mode, ranks in zip(modes, by_mode, strict=True):
        for steps in ranks:
            for number, step in enumerate(steps):
                assert_same_step(step, expected[number], 1e-11, f"recompute {mode.recompute}, step {number}")


class Mixing(nn.Module):
    """A function of torch whose result and another value are multiplied, so that autograd saves both."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        return x + torch.corrcoef(y) @ y.tanh()


def test_products_with_what_a_part_gives_are_made_again() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList([Mixing(), Mixing()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.h:
                x = block(x)
            return x.square().mean()

    torch.manual_seed(0)
    model, batch = Stack().double(), {"x": torch.randn(ROWS, WIDTH).double()}
    one = Case(model, batch, capture(model, batch, find=True))
    modes = [DEFAULT, Execution(recompute="full")]
    for ranks in one.on_ranks_of([(data(one), mode) for mode in modes], lambda own: parallel_step(own, batch)):
        for step in ranks:
            assert_same_step(step, serial_step(one), 1e-10)


class Spiking(nn.Module):
    """A neuron whose state is the value of the step before, with its history."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = 0.0 if self.state is None else self.state.detach()
        self.state = y = self.lin(x) + 0.9 * before
        return torch.relu(y)


def test_state_that_an_earlier_forward_has_left_goes_on() -> None:
    model, batch = Net(Spiking()).double(), {"x": torch.randn(ROWS, WIDTH).double()}
    beside = copy.deepcopy(model)
    model(**batch)
    one = Case(model, batch, capture(model, batch, foreign={"part": "whole"}))

    def expected() -> Step:
        beside(**batch)
        torch.manual_seed(SEED)
        (loss := beside(**batch)).backward()
        return outcome(beside, loss)

    (wanted,) = run_ranks(expected, 1)
    for step in one.on_ranks(zero(one), lambda parallel: parallel_step(parallel, batch)):
        assert_same_step(step, wanted, 1e-11)


def test_programs_of_other_batches_and_modes_share_a_part() -> None:
    model, batch = make("python state")
    fewer = {"x": batch["x"][:4]}

    def steps(module: nn.Module) -> list[float]:
        found = list[float]()
        for mode, given in ((True, batch), (True, fewer), (False, batch), (True, batch)):
            module.train(mode)
            torch.manual_seed(SEED)
            found.append(float(module(**given).detach()))
        return found

    expected = steps(copy.deepcopy(model))

    def on_ranks() -> list[float]:
        return steps(compile(model, Cluster.local(2), kwargs=batch, mesh={"x": 2}, roles=["data"]))

    for found in run_ranks(on_ranks, 2):
        assert found == pytest.approx(expected, rel=1e-11)


def test_a_dry_run_calls_nothing() -> None:
    found = dry_run(zero(case("lengths")))
    assert found.misshapen == ()
    assert {message.collective for message in found.messages} >= {"all_gather", "reduce_scatter"}


def test_a_part_runs_in_the_precision_around_it() -> None:
    model, batch = make("lengths")
    model, batch["x"] = model.float(), batch["x"].float()
    captured = capture(model, batch, precision="amp_bf16", foreign={"part": "whole"})
    (call,) = calls(captured.graph)
    assert (call.autocast, call.results[0].dtype) == ("bfloat16", "bfloat16")
    assert check_capture(model, captured, (), batch).equal


# ---- errors ----

OFF = {"now": False}
"""Whether parts do by now what they did not do when they were captured; each rank sets it."""


class Given(nn.Module):
    """A part that does as the function says, once it is off."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.does, self.w = does, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x) if OFF["now"] else x * self.w


class Around(nn.Module):
    """A model around such a part."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.last = Given(does), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(x)).pow(2).mean()


def _written(part: Given, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.w.mul_(2)
    return x * part.w


def _overwritten(part: Given, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x * part.w


def _summed(part: Given, x: Tensor) -> Tensor:
    y = x * part.w
    dist.all_reduce(y.detach())
    return y


def _summed_in(part: Given, x: Tensor) -> Tensor:
    y = x * part.w
    dist.all_reduce(y.detach(), group=GROUP[0])
    return y


GROUP = list[Any]()
WRONG: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "shape": (lambda part, x: (x * part.w)[:4], "gives float64[4, 8]; when it was captured, it gave float64[8, 8]"),
    "parameter": (_written, "changes its parameter 'w'"),
    "argument": (_overwritten, "writes into a tensor that it is given"),
    "collective": (_summed, "calls a collective of its own"),
    "collective in a group": (_summed_in, "calls a collective of its own"),
    "values": (lambda part, x: x * part.w * random.random(), "gives other values on rank 1 than on rank 0"),
    "draws": (lambda part, x: x * part.w * torch.rand(()), "draws random numbers, and it drew none"),
}


def test_what_differs_from_capture_is_an_error_on_every_rank() -> None:
    cases = {name: Case(model := Around(does).double(), batch, capture(model, batch, foreign={"part": "whole"}))
             for name, (does, _) in WRONG.items() if (batch := {"x": torch.randn(ROWS, WIDTH).double()})}  # fmt: skip

    def fail(name: str) -> str:
        parallel = cases[name].lower(data(cases[name]))
        OFF["now"] = True
        GROUP[:] = [dist.new_group()]
        random.seed(dist.get_rank())
        try:
            parallel.forward_backward(**cases[name].batch)
        except ForeignError as error:
            return str(error)
        finally:
            OFF["now"] = False
        return ""

    for name, found in zip(WRONG, run_all([(2, partial(fail, name)) for name in WRONG]), strict=True):
        for told in found:
            assert "part is foreign" in told, name
            assert WRONG[name][1] in told, name


def test_derivatives_by_torch_func_are_refused_where_tensors_are_gathered_again() -> None:
    torch.manual_seed(0)
    model, batch = Net(Slope(by_func=True)).double(), {"x": torch.randn(ROWS, WIDTH).double()}
    found = Case(model, batch, capture(model, batch, find=True))
    assert [call.name for call in calls(found.captured.graph)] == ["part"]

    def step(graph: Graph) -> Step | str:
        try:
            return parallel_step(found.lower(graph), batch)
        except ForeignError as error:
            return str(error)

    whole, gathered = run_all([(2, partial(step, layout(found))) for layout in (data, zero)])
    for one in whole:
        assert not isinstance(one, str)
        assert_same_step(one, serial_step(found), 1e-11, "data")
    assert all("part is foreign and takes derivatives by torch.func" in str(told) for told in gathered)


def test_a_part_sees_one_process() -> None:
    """Packages sum up over ranks where there are several; a program computes what one process does."""

    def alone(part: Given, x: Tensor) -> Tensor:
        assert not dist.is_initialized()
        return 2 * x * part.w

    model, batch = Around(alone).double(), {"x": torch.randn(ROWS, WIDTH).double()}
    found = Case(model, batch, capture(model, batch, foreign={"part": "whole"}))

    def step(parallel: ParallelModule) -> tuple[Step, bool]:
        OFF["now"] = True
        return parallel_step(parallel, batch), dist.is_initialized()

    OFF["now"] = True
    try:
        expected = serial_step(found)
    finally:
        OFF["now"] = False
    for one, initialized in found.on_ranks(data(found), step):
        assert_same_step(one, expected, 1e-11)
        assert initialized


def test_a_result_that_has_a_gradient_by_now_is_an_error() -> None:
    model, batch = Around(lambda part, x: x * part.w).double(), {"x": torch.randn(ROWS, WIDTH).double()}
    model.part.forward = lambda x: (x * model.part.w).detach() if not OFF["now"] else x * model.part.w
    found = Case(model, batch, capture(model, batch, foreign={"part": "whole"}))

    def step(parallel: ParallelModule) -> Step:
        OFF["now"] = True
        return parallel_step(parallel, batch)

    with pytest.raises(Exception, match="its result 0 has a gradient; when it was captured, it had none"):
        found.on_ranks(found.graph(Mesh.of(only=1), {}), step)
