"""Rings in whole steps on gloo ranks: beside other axes, in microbatches and with recomputation, as one process."""

from __future__ import annotations

import copy
import random
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from bench.decoders import Decoder, decoder
from bench.plans import CERTIFIED, fast_links
from shardwright.cli.dryrun import DryRunReport
from shardwright.cost.predict import node_costs
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.steps import Steps
from shardwright.lowering.runtime.spec import check_stages
from shardwright.lowering.text.emit import emit
from shardwright.lowering.trial.dryrun import dry_run
from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.search.check import check_plan
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from tests.each import RANDOM_CASES, each
from tests.lowering.pipelines import evenly, in_one_process, in_stages, worst_error
from tests.lowering.rounding import allowed, error
from tests.lowering.runs import Case, Step, assert_same_step, parallel_step, run_all, serial_step
from tests.lowering.test_sequence import Way, in_fp64, splits

WAYS: list[Way] = [
    ({"cp": 2}, ("ring",)),
    ({"cp": 4}, ("ring",)),
    ({"cp": 2, "sp": 2}, ("ring", "ulysses")),
    ({"dp": 2, "cp": 2}, ("zero", "ring")),
    ({"cp": 2, "x": 2}, ("ring", "context")),
    ({"sp": 2, "cp": 2}, ("ulysses", "ring")),
]
STRIPED = [way for way in WAYS if way[1][-1] == "ring"]
"""The ways in which no axis behind that of the ring shares the sequence."""
ERRORS = {torch.float64: 1e-11, torch.float32: 2e-4}


KINDS = ("causal", "window", "even", "packed", "padded", "bias", "near", "held")
"""Of attention: causal; causal under a mask that a query sees few keys by; or with half of the keys for every query.

`near`: a query sees few keys before it and few after it; `held`: so it does by a buffer of large negative numbers.
"""


class Masked(nn.Module):
    """Tokens that attend to each other, with a mask that forward makes."""

    def __init__(self, kind: str, width: int, heads: tuple[int, int], seq: int) -> None:
        super().__init__()
        self.kind, self.heads, own, shared = kind, heads, width, width // heads[0] * heads[1]
        self.embedding, self.head = nn.Embedding(80, width), nn.Linear(width, 80)
        self.blocks = nn.ModuleList(nn.Linear(width, own + 2 * shared) for _ in range(2))
        if kind == "held":
            far = (torch.arange(seq) - torch.arange(seq)[:, None]).abs() >= 3
            self.register_buffer("held", torch.zeros(seq, seq).masked_fill(far, -1e30))
        self.slopes = nn.Parameter(torch.randn(heads[0], 1, seq)) if kind == "bias" else None

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The loss of token ids and labels [batch, seq]."""
        x, mask, (many, few) = self.embedding(ids), self.mask(ids), self.heads
        for block in self.blocks:
            q, k, v = block(x).unflatten(2, (many + 2 * few, -1)).transpose(1, 2).split([many, few, few], 1)
            x = x + F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def mask(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        after = places.unsqueeze(1) - places
        if self.kind == "window":
            return (after >= 0) & (after < 5)
        if self.kind == "held":
            return self.get_buffer("held")
        if self.kind == "near":
            return after.abs() < 3
        if self.kind == "packed":
            sequence = (ids < 8).cumsum(1)
            return (after >= 0) & (sequence.unsqueeze(2) == sequence.unsqueeze(1)).unsqueeze(1)
        if self.kind == "padded":
            return (ids < 60)[:, None, None]
        assert self.slopes is not None
        return self.slopes.masked_fill(after < 0, float("-inf"))


class Cell(NamedTuple):
    way: Way
    many: int
    recompute: str
    heads: tuple[int, int]
    batch: int
    seq: int
    dtype: torch.dtype
    kind: str
    dropout: float


def drawn(rng: random.Random, kind: str) -> Cell:
    way, heads = rng.choice(WAYS), rng.choice([(4, 2), (4, 4), (2, 2)])
    recompute = rng.choice(["none", "selective", "full"])
    many, seq, dtype = rng.choice([1, 2]), rng.choice([8, 16, 24]), rng.choice(list(ERRORS))
    return Cell(way, many, recompute, heads, 2 * many, seq, dtype, kind, rng.choice([0.0, 0.3]))


def case(cell: Cell) -> Case:
    torch.manual_seed(0)
    with in_fp64():
        ids = torch.randint(80, (cell.batch, cell.seq))
        sizes = Decoder("llama", 1, 32, *cell.heads, 48, 80)
        plain = cell.kind in ("causal", "even")
        model = (
            decoder(sizes, cell.seq, even=cell.kind == "even") if plain else Masked(cell.kind, 32, cell.heads, cell.seq)
        )
        model.set_submodule("embedding", nn.Sequential(model.get_submodule("embedding"), nn.Dropout(cell.dropout)))
        return Case(model.to(cell.dtype), {"ids": ids, "labels": ids.clone()})


def planned(own: Case, cell: Cell) -> Plan:
    axes, roles = cell.way
    mesh = Mesh.of(**axes)
    planner = Planner(fast_links(mesh.num_devices), CERTIFIED)
    asked: dict[str, Any] = {"recompute": cell.recompute, "microbatches": cell.many}
    plan = planner.plan(own.captured.graph, mesh=mesh, roles=roles, compared=False, **asked)
    check_plan(plan, own.captured.graph, CERTIFIED)
    return plan


def stepped(own: Case, plan: Plan) -> Step:
    return parallel_step(own.lower(plan.graph, plan.execution), own.batch)


def counted(own: Case, plan: Plan) -> tuple[int, Step]:
    """How often a rank sends something around the ring in a step, and the step."""
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as shift:
        step = stepped(own, plan)
    return shift.call_count, step


def test_random_steps_are_those_of_one_process() -> None:
    rng = random.Random(5)
    cells = [drawn(rng, KINDS[i % len(KINDS)]) for i in range(RANDOM_CASES or len(KINDS))]
    cases = [case(cell) for cell in cells]
    plans = [planned(own, cell) for own, cell in zip(cases, cells, strict=True)]
    for plan, cell in zip(plans, cells, strict=True):
        size = plan.mesh.sizes[plan.mesh.index("cp")]
        ring = f"q@k/{cell.seq // size}" if cell.kind == "causal" and cell.way in STRIPED else "q@k"
        assert all(ring in split for split in splits(plan.graph)), cell
        assert plan.graph.mesh.num_microbatches == cell.many, cell
    runs = zip(cases, plans, strict=True)
    jobs = [(plan.graph.mesh.num_devices, partial(stepped, own, plan)) for own, plan in runs]
    for own, cell, steps in zip(cases, cells, run_all(jobs), strict=True):
        expected = serial_step(own)
        for step in steps:
            assert_same_step(step, expected, ERRORS[cell.dtype], str(cell))


def test_what_is_made_again_sends_no_keys_again() -> None:
    """A block that is made again as a whole keeps what its ring gave; a ring by its name is made again.

    Of two ranks, forward sends a block once, and backward its keys and its gradients.
    """
    own = case(cell := Cell(WAYS[0], 1, "none", (4, 2), 2, 8, torch.float64, "causal", 0.0))
    asked: list[Any] = ["none", "full", {"blocks.0": [":sdpa"]}]
    plans = [planned(own, cell._replace(recompute=recompute)) for recompute in asked]
    found = run_all([(2, partial(counted, own, plan)) for plan in plans])
    assert [[count for count, _ in ranks] for ranks in found] == [[3, 3], [3, 3], [4, 4]]
    for _, step in (rank for ranks in found for rank in ranks):
        assert_same_step(step, serial_step(own), 1e-11)


INNER: Way = ({"x": 2, "cp": 2}, ("context", "ring"))
"""Each rank of a ring has queries of both halves of the sequence."""


def test_a_window_says_which_keys_queries_see() -> None:
    """A query sees itself and four keys before it, of two or four on each rank."""
    cells = [(WAYS[0], 8, "sees=(-4, 0, 4)"), (WAYS[1], 8, "sees=(-4, 0, 2)"), (WAYS[1], 16, "sees=(-4, 0, 4)"),
             (WAYS[4], 16, "sees=(-4, 0, 8)"), (INNER, 16, "sees=(-4, 0, 4)")]  # fmt: skip
    kinds = [("window", *cell) for cell in cells] + [("held", WAYS[1], 16, "sees=(-2, 2, 4)")]
    for kind, way, seq, sees in kinds:
        own = case(cell := Cell(way, 1, "none", (4, 2), 2, seq, torch.float64, kind, 0.0))
        calls = [line for line in emit(planned(own, cell).graph).splitlines() if "ring=cp" in line]
        assert len(calls) == 2, cell
        assert all(f", {sees})" in call for call in calls), (calls, cell)


def changed(own: Case, plan: Plan) -> list[str]:
    """What steps say after the mask has been made narrower, wider, and what it was."""
    parallel, told = own.lower(plan.graph, plan.execution), list[str]()
    mask = own.model.state_dict()["held"]
    hidden = torch.full_like(mask, -1e30)
    for value in (mask, torch.where(torch.eye(len(mask)).bool(), mask, hidden), torch.zeros_like(mask), mask, hidden):
        parallel.load_state_dict({"held": value}, strict=False)
        try:
            assert parallel(**own.batch).isfinite()
            told.append("")
        except PlanError as error:
            told.append(str(error))
    return told


def test_a_mask_that_shows_more_than_the_plan_knows_is_refused() -> None:
    """Also where ranks have parts of it."""
    own = case(cell := Cell(WAYS[0], 1, "none", (4, 2), 2, 8, torch.float64, "held", 0.0))
    plan = planned(own, cell)
    for found in run_all([(2, partial(changed, own, plan))])[0]:
        assert [bool(told) for told in found] == [False, False, True, False, True]
        assert found[2] == (
            "buffer 'held' shows an element outside of the band -2 to 2, but the plan leaves out keys that its values "
            "hid when the model was captured; plan again, with these values"
        )
        assert "'held' hides a query from its own key by a number that is no -inf, but" in found[4]


def sent_bytes(own: Case, plan: Plan) -> int:
    """The bytes that a rank sends around the ring in a step."""
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as shift:
        stepped(own, plan)
    messages = (message for call in shift.call_args_list for message in call.args[0])
    return sum(message.tensor.nbytes for message in messages if message.op is dist.isend)


def test_every_rank_sends_what_is_predicted() -> None:
    """Without a band, and under windows that reach one rank and two, of queries that another axis splits too."""
    cells = [Cell(way, 1, "none", (4, 2), 2, seq, torch.float64, kind, 0.0) for way, kind, seq in
             ((WAYS[1], "even", 16), (WAYS[1], "window", 16), (WAYS[1], "window", 8), (WAYS[1], "near", 16),
              (WAYS[1], "held", 16), (WAYS[4], "window", 16), (INNER, "near", 16))]  # fmt: skip
    cases = [case(cell) for cell in cells]
    plans = [planned(own, cell) for own, cell in zip(cases, cells, strict=True)]
    found = run_all([(4, partial(sent_bytes, own, plan)) for own, plan in zip(cases, plans, strict=True)])
    for cell, plan, by_rank in zip(cells, plans, found, strict=True):
        steps = Steps(plan.graph, plan.cluster, plan.execution)
        rings = [node for node in plan.graph.nodes if plan.graph.exchanges(node)]
        for rank, num_bytes in enumerate(by_rank):
            dry = dry_run(plan.graph, rank, plan.execution)
            report = DryRunReport(plan, dry)
            assert not any(" times, the dry run" in own for own in report.findings), (cell, rank)
            around = [m for m in dry.messages if m.collective == "send"]
            assert sum(m.num_bytes * dry.messages[m] for m in around) == num_bytes, (cell, rank)
            assert report.program.messages() == report.messages, (cell, rank)
        messages = program(plan.graph, plan.cluster, plan.execution).messages().items()
        busiest = sum(n * message.num_bytes for message, n in messages if message.collective == "send")
        assert busiest >= max(by_rank) > 0, cell
        assert sum(node_costs(steps)[node.name].communication_bytes for node in rings) == busiest, cell


def test_a_ring_of_one_rank_is_attention() -> None:
    cells = [Cell(({"cp": 1}, ("ring",)), 1, "none", (4, 2), 2, 8, torch.float64, kind, 0.0) for kind in KINDS[:2]]
    cases = [case(cell) for cell in cells]
    plans = [planned(own, cell) for own, cell in zip(cases, cells, strict=True)]
    assert all(splits(plan.graph) == {("q@k",)} for plan in plans)
    runs = run_all([(1, partial(stepped, own, plan)) for own, plan in zip(cases, plans, strict=True)])
    for own, (step,) in zip(cases, runs, strict=True):
        assert_same_step(step, serial_step(own), 1e-11)


@each("kind", KINDS)
def test_rings_in_stages(kind: str) -> None:
    """Each stage has a ring for each of two microbatches; masks are made where they are read, or sent there."""
    own = case(cell := Cell(WAYS[0], 2, "none", (4, 2), 4, 8, torch.float64, kind, 0.3))
    graph = planned(own, cell).graph
    assert all(any(choice.startswith("q@k") for choice in split) for split in splits(graph))
    run = evenly(graph, 2, "zero-bubble" if kind == "bias" else "1f1b")
    check_stages(graph, run, None)
    assert worst_error(in_stages(own, [(graph, run)])[0], in_one_process(own)) < 1e-11


def test_steps_in_bfloat16_are_as_near_to_the_exact_step_as_one_process() -> None:
    cells = [Cell(way, 1, "full", (4, 2), 2, 16, torch.bfloat16, kind, 0.0)
             for way, kind in zip(cycle(WAYS[:4]), KINDS, strict=False)]  # fmt: skip
    cases = [case(cell) for cell in cells]
    plans = [planned(own, cell) for own, cell in zip(cases, cells, strict=True)]
    runs = zip(cases, plans, strict=True)
    jobs = [(plan.graph.mesh.num_devices, partial(stepped, own, plan)) for own, plan in runs]
    for own, cell, steps in zip(cases, cells, run_all(jobs), strict=True):
        with in_fp64():
            exact = serial_step(Case(copy.deepcopy(own.model).double(), own.batch, own.captured))
        most = allowed(error(serial_step(own), exact), None)
        for step in steps:
            off = error(step, exact)
            assert off.loss <= most.loss, (cell, off, most)
            assert off.gradients <= most.gradients, (cell, off, most)
