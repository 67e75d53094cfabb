"""Exact randomness: one process and lowered programs draw the same masks, each rank its own part alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from bench.plans import CERTIFIED, fast_links
from examples.zoo import GPT
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.random.exact import fused_attention
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.runtime import kernels as rt
from shardwright.lowering.text.emit import emit
from shardwright.lowering.text.program import compile_source
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.search.tree.planner import Planner
from tests.each import each, some
from tests.lowering.runs import Case, Step, assert_same_step, outcome
from tests.lowering.text.test_emit import dropouts

SEED, NUM_STEPS = 2**40 + 5, 3
TORCH = rt.Draw()


@pytest.fixture(autouse=True)
def torch_draws_again() -> Iterator[None]:
    yield
    before = torch.get_rng_state()
    F.dropout(torch.ones(3), 0.5)
    assert not torch.equal(torch.get_rng_state(), before)


# ---- one process ----

X, IMAGES = torch.randn(6, 10), torch.randn(3, 4, 5, 5)
HEADS = torch.randn(2, 3, 4, 8)
DRAWING: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(X, 0.3),
    "module": lambda: nn.Dropout(0.3)(X),
    "in place": lambda: F.dropout(X.clone(), 0.3, inplace=True),
    "native": lambda: torch.native_dropout(X, 0.3, True)[0],
    "transposed": lambda: F.dropout(X.T, 0.3),
    "feature": lambda: F.dropout2d(IMAGES, 0.3),
    "alpha": lambda: F.alpha_dropout(X, 0.3, True),
    "feature alpha": lambda: F.feature_alpha_dropout(IMAGES, 0.3, True),
    "attention": lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS, dropout_p=0.3),
    "bernoulli": lambda: torch.empty(5, 5).bernoulli_(0.3),
}


@each("name", list(DRAWING))
def test_every_kind_of_dropout_draws_by_number(name: str) -> None:
    draw, state = DRAWING[name], torch.get_rng_state()
    with sw.seed_exactly(SEED) as random:
        first, second = draw(), draw()
        assert random.counter == 2
        random.load_state_dict({"seed": SEED, "counter": 0})
        assert torch.equal(draw(), first)
        assert not torch.equal(first, second)
    with sw.seed_exactly(SEED + 1):
        assert not torch.equal(draw(), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_masks_are_those_of_lowered_programs() -> None:
    expected = rt.dropout(torch.ones(6, 10), 0.3, rt.Draw(SEED, 2), None)
    alike = [
        lambda: F.dropout(torch.ones(6, 10), 0.3),
        lambda: torch.native_dropout(torch.ones(6, 10), 0.3, True)[0],
        lambda: F.dropout(torch.ones(6, 10, dtype=torch.float64), 0.3).float(),
        lambda: F.dropout(torch.ones(6, 1, 10), 0.3).squeeze(1),
        lambda: F.dropout(torch.ones(10, 6).T, 0.3).T.reshape(10, 6).new_tensor(expected.tolist()),
    ]
    for draw in alike:
        with sw.seed_exactly(SEED) as random:
            random.load_state_dict({"seed": SEED, "counter": 2})
            torch.testing.assert_close(draw(), expected)
    with sw.seed_exactly(SEED):  # places are numbered in the order of memory
        stored = F.dropout(torch.ones(10, 6).T, 0.3)
        assert torch.equal(stored.T, rt.dropout(torch.ones(10, 6), 0.3, rt.Draw(SEED, 0), None))


def test_what_drops_nothing_or_all_is_not_counted() -> None:
    generator = torch.Generator().manual_seed(3)
    expected = torch.empty(9).bernoulli_(0.5, generator=generator.manual_seed(3))
    with sw.seed_exactly(SEED) as random:
        assert torch.equal(F.dropout(X, 0.0), X)
        assert torch.equal(F.dropout(X, 0.3, training=False), X)
        assert torch.equal(torch.native_dropout(X, 0.3, False)[0], X)
        assert not F.dropout(X, 1.0).any()
        assert torch.equal(torch.native_dropout(X, 0.0, True)[0], X)
        F.scaled_dot_product_attention(HEADS, HEADS, HEADS)
        assert torch.equal(torch.empty(9).bernoulli_(0.5, generator=generator.manual_seed(3)), expected)
        with pytest.raises(RuntimeError, match="p"):
            torch.empty(3).bernoulli_(1.5)
        assert random.counter == 0


def test_gradients_of_a_single_process() -> None:
    x = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    for drop in (lambda: F.dropout(x, 0.3), lambda: torch.native_dropout(x, 0.3, True)[0]):
        with sw.seed_exactly(SEED):
            (gradient,) = torch.autograd.grad(drop().sum(), x)
        mask = rt.dropout(torch.ones_like(x), 0.3, rt.Draw(SEED, 0), None)
        torch.testing.assert_close(gradient, mask)


# ---- the state ----


def test_state_is_two_integers_that_go_into_a_checkpoint() -> None:
    random = sw.seed_exactly(SEED)
    F.dropout(X, 0.3)
    state = random.state_dict()
    assert state == {"seed": SEED, "counter": 1}
    expected = F.dropout(X, 0.3)
    random.close()
    with sw.seed_exactly(0) as other:
        other.load_state_dict(state)
        assert torch.equal(F.dropout(X, 0.3), expected)
        assert (other.seed, other.counter) == (SEED, 2)


def test_the_one_before_goes_on_after_a_block() -> None:
    with sw.seed_exactly(1) as outer:
        F.dropout(X, 0.3)
        with sw.seed_exactly(2):
            F.dropout(X, 0.3)
            outer.close()  # not the current one: nothing happens
            F.dropout(X, 0.3)
        F.dropout(X, 0.3)
        assert outer.counter == 2
    outer.close()


@each("seed", [-1, 2**64, 1.0, True, "7", None])
def test_bad_seeds(seed: Any) -> None:
    with pytest.raises(ShardwrightError, match=r"seed .*: expected an integer from 0 to 2\*\*64 - 1, got"):
        sw.seed_exactly(seed)


@each(
    ("state", "message"),
    [
        ({}, r"expected the keys 'seed' and 'counter', got \[\]"),
        ({"seed": 1, "counter": 2, "more": 3}, r"got \['counter', 'more', 'seed'\]"),
        ({"seed": 1, "counter": -2}, "counter -2: expected an integer"),
        ({"seed": 2**64, "counter": 2}, "seed 18446744073709551616: expected an integer"),
    ],
)
def test_bad_states(state: dict[str, int], message: str) -> None:
    with sw.seed_exactly(4) as random:
        with pytest.raises(ShardwrightError, match=message):
            random.load_state_dict(state)
        assert random.state_dict() == {"seed": 4, "counter": 0}


# ---- activation checkpoints of a single process ----


class Blocks(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.options = options

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + F.dropout(layer(F.dropout(x, 0.2)), 0.4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            run = checkpoint(self.block, layer, x, **self.options) if self.options else self.block(layer, x)
            assert isinstance(run, Tensor)
            x = run
        return x.pow(2).sum()


def two_steps(model: Blocks, plain: Blocks) -> list[Tensor]:
    model.load_state_dict(plain.state_dict())
    found = list[Tensor]()
    for _ in range(2):
        loss = model(X)
        found += [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    return found


def test_what_a_checkpoint_computes_again_draws_the_same() -> None:
    plain = Blocks()
    with sw.seed_exactly(SEED) as random:
        expected = two_steps(copy.deepcopy(plain), plain)
        after = random.counter
    with sw.seed_exactly(SEED) as random:
        found = two_steps(Blocks(use_reentrant=False, context_fn=random.checkpoint_contexts), plain)
        assert random.counter == after == 12
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_drawing_in_backward_says_what_to_do() -> None:
    with sw.seed_exactly(SEED), pytest.raises(ShardwrightError, match=r"context_fn=random\.checkpoint_contexts"):
        two_steps(Blocks(use_reentrant=False), Blocks())


def test_a_fused_attention_may_drop_nothing() -> None:
    name, operands = "_scaled_dot_product_efficient_attention", (HEADS, HEADS, HEADS, None, True)

    def original(*args: object, **kwargs: object) -> tuple[int, object]:
        return len(args), kwargs

    assert fused_attention(name, original, *operands) == (5, {})
    assert fused_attention(name, original, *operands, 0.0, scale=2.0) == (6, {"scale": 2.0})
    for given in (((0.1,), {}), ((), {"dropout_p": 0.1})):
        with pytest.raises(ShardwrightError, match="cannot run in the kernel _scaled_dot_product_efficient_attention"):
            fused_attention(name, original, *operands, *given[0], **given[1])


# ---- lowered programs ----


def test_a_rank_hashes_its_own_part_of_any_axes() -> None:
    """Time is an axis like others: microbatches are slices of the same mask."""
    x, draw = torch.randn(8, 6, 12), rt.Draw(SEED, 7)
    whole = rt.dropout(x, 0.4, draw, None)
    parts = []
    for microbatch in range(2):
        for rank in range(2):
            axes = Axis("mb", 2, microbatch), Axis("tp", 2, rank)
            shard = rt.Shard((8, 6, 12), (axes[0], 0, 1), (axes[1], 2, 3))
            parts.append((shard.take(x), shard.take(whole), shard))
    for mine, expected, shard in parts:
        assert torch.equal(rt.dropout(mine, 0.4, draw, shard), expected)
        assert torch.equal(rt.dropout(mine.permute(2, 0, 1).contiguous().permute(1, 2, 0), 0.4, draw, shard), expected)


def test_masks_do_not_depend_on_the_order_of_the_lines() -> None:
    x = torch.ones(64)
    for order in ((0, 1, 2), (2, 0, 1), (1, 0, 0)):
        masks = [rt.dropout(x, 0.5, rt.Draw(SEED, 30 + seed), None) for seed in order]
        program = compile_source(emit(dropouts(order)))
        state = torch.get_rng_state()
        found = program.forward({"x": x}, {}, {}, [], None, torch.device("cpu"), draw=rt.Draw(SEED, 30))["loss"]
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(found, (x + masks[0]) * masks[1] * masks[2])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in dynamo
def test_a_compiled_program_draws_the_same_and_is_not_compiled_for_every_step() -> None:
    x, program, graphs = torch.ones(64), compile_source(emit(dropouts((0, 1, 2)))), list[object]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(program.forward, backend=backend, fullgraph=True)
    for step in range(5):
        given = ({"x": x}, {}, {}, [], None, torch.device("cpu"))
        draw = rt.Draw(SEED, 3 * step)
        assert torch.equal(compiled(*given, draw=draw)["loss"], program.forward(*given, draw=draw)["loss"])
    assert len(graphs) == 2  # for the first number, then for any


def test_without_a_seed_torch_draws() -> None:
    torch.manual_seed(3)
    expected = torch.native_dropout(X, 0.3, True)[0]
    torch.manual_seed(3)
    assert torch.equal(rt.dropout(X, 0.3, TORCH, None), expected)


@pytest.fixture(scope="module")
def gpt() -> Case:
    torch.manual_seed(0)
    batch = {"ids": torch.randint(24, (4, 8)), "targets": torch.randint(24, (4, 8))}
    return Case(GPT(vocab=24, max_seq=8, hidden=16, num_heads=4, num_layers=2).double(), batch)


def planned(case: Case, roles: dict[str, str], **sizes: int) -> Graph:
    mesh = Mesh.of(**sizes)
    planner = Planner(fast_links(mesh.num_devices), CERTIFIED)
    return planner.plan(case.captured.graph, "GPT", mesh=mesh, roles=list(roles.values())).graph


def train(module: nn.Module, step: Callable[[], Tensor]) -> list[Step]:
    """Some steps of SGD, with gradients as whole tensors."""
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), list[Step]()
    torch.manual_seed(1)
    with sw.seed_exactly(SEED) as random:
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            found.append(copy.deepcopy(outcome(module, step())))  # the memory of gradients is used again
            optimizer.step()
        assert random.counter == NUM_STEPS * 7  # the embedding's, and in each block attention's and two more
    return found


def train_alone(case: Case) -> list[Step]:
    model = copy.deepcopy(case.model)

    def step() -> Tensor:
        loss = model(**case.batch)["loss"]
        loss.backward()
        return loss

    return train(model, step)


def train_on_a_rank(parallel: ParallelModule, case: Case) -> list[Step]:
    return train(parallel, lambda: parallel.forward_backward(**case.batch))


PLANS = [
    ({"dp": "data"}, {"dp": 2}),
    ({"tp": "tensor"}, {"tp": 2}),
    ({"cp": "context"}, {"cp": 2}),
    ({"dp": "zero"}, {"dp": 4}),
    ({"dp": "data", "tp": "tensor"}, {"dp": 2, "tp": 2}),
    ({"cp": "context", "tp": "tensor"}, {"cp": 2, "tp": 2}),
]


def test_training_equals_one_process(gpt: Case) -> None:
    """Also where values are made again in backward."""
    graphs = {"-".join(roles.values()): planned(gpt, roles, **sizes) for roles, sizes in some(PLANS, 2)}
    for name, graph in graphs.items():
        weights = [n for n in graph.nodes if n.op == "dropout" and len(graph.types[n.name].shape) == 4]
        # every rank draws its part of these alone
        assert all(choice != "R" for n in weights for choice in n.split), name
    zero = planned(gpt, {"dp": "zero"}, dp=2)
    runs = {name: (graph, DEFAULT) for name, graph in graphs.items()}
    runs |= {mode: (zero, Execution(recompute=mode)) for mode in ("full", "selective")}
    expected = train_alone(gpt)
    by_run = gpt.on_ranks_of(list(runs.values()), lambda parallel: train_on_a_rank(parallel, gpt))
    for name, by_rank in zip(runs, by_run, strict=True):
        for steps in by_rank:
            for found, one in zip(steps, expected, strict=True):
                assert_same_step(found, one, 1e-10, name)


def test_equal_blocks_are_one_function_that_counts_from_its_own_first_draw(gpt: Case) -> None:
    source = emit(planned(gpt, {"dp": "data"}, dp=2))
    block, _, forward = source.partition("def forward(")
    assert [f"draw + {n}" for n in range(3)] == re.findall(r"draw \+ \d+", block)
    assert [f"draw + {n}" for n in (0, 1, 4)] == re.findall(r"draw \+ \d+", forward)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, 2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].sum()


def test_capturing_draws_nothing(gpt: Case) -> None:
    with sw.seed_exactly(SEED) as random:
        assert Case(gpt.model, gpt.batch).captured.graph == gpt.captured.graph
        assert random.counter == 0


def test_a_draw_without_a_number_says_what_to_do() -> None:
    case = Case(Recurrent(), {"x": IMAGES[0]})

    def body(parallel: ParallelModule) -> None:
        with sw.seed_exactly(SEED) as random:
            with pytest.raises(ShardwrightError, match="draws a mask that has no number"):
                parallel.forward_backward(**case.batch)
            F.dropout(X, 0.3)  # outside of the program
            assert random.counter == 1
        parallel.forward_backward(**case.batch)

    case.on_ranks(case.graph(Mesh.of(only=1), {}), body)
