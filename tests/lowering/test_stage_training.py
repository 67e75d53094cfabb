"""What people do with a model in pipeline stages: optimizers, losses, clipping, frozen parts, buffers, checkpoints."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional as F

import shardwright as sw
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.random.exact import seed_exactly
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime.spec import check_stages
from shardwright.lowering.trial import dryrun
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.pipelining import ScheduleName
from shardwright.pcg.types import TensorType
from tests.each import in_whole_grids, some
from tests.lowering.parallelize import follow
from tests.lowering.pipelines import (
    Outcome,
    evenly,
    gradients,
    in_one_process,
    in_stages,
    of_one_stage,
    step,
    worst_error,
)
from tests.lowering.runs import Case, load_backends, whole

SEED, HIDDEN = 3, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN), nn.Dropout(0.2)

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        kept = x.new_empty(len(x), 1, 1).bernoulli_(0.9) if self.drop.p else 1.0  # as stochastic depth draws
        return x + kept * self.drop(self.down(torch.tanh(self.up(x)))) + 0.1 * start


class Net(nn.Module):
    """A tied head, a connection from the embedding to every block, a choice that is made once (integers)."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.tok, self.last = nn.Embedding(12, HIDDEN), nn.LayerNorm(HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(HIDDEN, 12, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        start = x = self.tok(ids)
        chosen, sign = x.argmax(-1), x > 0  # of what depends on parameters: integers and booleans are sent
        for block in self.blocks:
            x = block(x, start)
        x = self.last(x + F.one_hot(chosen, HIDDEN) + sign)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


def case(model: nn.Module | None = None) -> Case:
    """The net, captured once in this process, which nothing may change; or another model on its batch."""
    return usual() if model is None else fresh(model)


@cache
def usual() -> Case:
    torch.manual_seed(0)
    return fresh(Net())


def fresh(model: nn.Module) -> Case:
    torch.manual_seed(0)
    return Case(model.double(), {"ids": torch.randint(12, (8, 3)), "targets": torch.randint(12, (8, 3))})


PLANS: list[tuple[int, tuple[str, ...], int, dict[str, Any]]] = [
    (4, (), 4, {}), (2, ("zero",), 2, {"schedule": "interleaved", "chunks": 2}), (2, ("data",), 4, {}),
    (3, ("zero",), 4, {"sizes": (2, 1, 1)}), (3, ("tensor",), 2, {"sizes": (1, 2, 1), "schedule": "zero-bubble"}),
]  # fmt: skip
"""Stages, roles of the axes of a stage, microbatches, and the rest of the execution: all for four ranks."""


def plans(found: Case, which: Sequence[Any] = tuple(some(PLANS, 3))) -> list[tuple[Graph, Execution]]:
    made = list[tuple[Graph, Execution]]()
    for stages, roles, many, options in which:
        graph = of_one_stage(found, roles, many, "zero-3")
        made.append((graph, evenly(graph, stages, **options)))
    return made


def under_all(*runs: tuple[Case, Callable[[ParallelModule], Any]]) -> list[list[Any]]:
    """Bodies on every rank of every plan of their nets: results by run and plan, and by rank."""
    todo = [(found, body, plan) for found, body in runs for plan in plans(found)]
    results = run_ranks(lambda: [body(found.lower(*plan)) for found, body, plan in todo], 4, 240)
    return [list(of_plan) for of_plan in zip(*results, strict=True)]


def in_one(found: Case, body: Callable[[nn.Module], Any]) -> Any:
    """`body` of the model in one process."""
    return run_ranks(lambda: body(copy.deepcopy(found.model)), 1, 60)[0]


def backward(model: nn.Module, found: Case) -> Tensor:
    if isinstance(model, ParallelModule):
        return model.forward_backward(**found.batch)
    loss = model(**found.batch)["loss"]
    loss.backward()
    return loss.detach()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def assert_equal(by_rank: list[dict[str, Tensor | None]], expected: dict[str, Tensor | None], rtol: float) -> None:
    """On every rank what it has; every name is on some rank."""
    assert {name for found in by_rank for name in found} == expected.keys()
    for found in by_rank:
        for name, value in found.items():
            wanted = expected[name]
            if wanted is None:
                assert value is None or not value.any(), name
            else:
                assert value is not None, name
                torch.testing.assert_close(value, wanted, rtol=rtol, atol=rtol, msg=lambda m, name=name: f"{name}: {m}")


def test_five_steps_of_adamw() -> None:
    found = case()

    def train(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        losses = list[float]()
        with seed_exactly(SEED):
            for _ in range(5):
                losses.append(float(backward(model, found)))
                optimizer.step()
                optimizer.zero_grad()
        return losses, weights(model)

    losses, expected = in_one(found, train)
    for by_rank in under_all((found, train)):
        assert all(own == pytest.approx(losses, rel=1e-10) for own, _ in by_rank)
        assert_equal([after for _, after in by_rank], expected, 1e-8)


def test_losses_that_are_called_and_added_up() -> None:
    """Evaluation in inference mode; `parallel(**batch)`, twice, scaled; evaluation that leaves the gradients alone."""
    found = case()

    def add_up(model: nn.Module) -> tuple[list[float], dict[str, Tensor | None]]:
        with seed_exactly(SEED):
            with torch.inference_mode():
                model(**found.batch)
            first = model(**found.batch)
            first = first if isinstance(first, Tensor) else first["loss"]
            (0.5 * first).backward()
            second = backward(model, found)
            with torch.no_grad():
                third = model(**found.batch)
        third = third if isinstance(third, Tensor) else third["loss"]
        assert not third.requires_grad
        return [first.item(), second.item(), third.item()], gradients(model)

    losses, expected = in_one(found, add_up)
    for by_rank in under_all((found, add_up)):
        assert all(own == pytest.approx(losses, rel=1e-10) for own, _ in by_rank)
        assert_equal([got for _, got in by_rank], expected, 1e-10)


def test_clipping_counts_every_parameter_once() -> None:
    found, norm_types = case(), (2.0, float("inf"), 1.0)

    def clip(model: nn.Module) -> tuple[dict[float, float], dict[str, Tensor | None]]:
        norms, clipped = dict[float, float](), dict[str, Tensor | None]()
        for norm_type in norm_types:
            model.zero_grad()
            with seed_exactly(SEED):
                backward(model, found)
            if isinstance(model, ParallelModule):
                norms[norm_type] = float(model.clip_grad_norm_(0.1, norm_type))
            else:
                norms[norm_type] = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type))
            for name, gradient in gradients(model).items():
                clipped[f"{name} by norm {norm_type}"] = None if gradient is None else gradient.clone()
        return norms, clipped

    norms, expected = in_one(found, clip)
    for by_rank in under_all((found, clip)):
        assert all(own == by_rank[0][0] for own, _ in by_rank)
        assert by_rank[0][0] == pytest.approx(norms, rel=1e-10)
        assert_equal([got for _, got in by_rank], expected, 1e-10)


def only(*trained: str) -> Net:
    """A net of which everything else is frozen."""
    model = Net()
    model.head.weight = nn.Parameter(model.tok.weight.detach().clone())
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(trained))
    return model


def test_frozen_stages() -> None:
    """Some stages have no gradients, and clip all the same."""
    cases = [case(only(trained)) for trained in ("head", "tok", "blocks.1", "blocks.3")]

    def run(found: Case, model: nn.Module) -> tuple[list[float], dict[str, Tensor | None]]:
        with seed_exactly(SEED):
            loss = backward(model, found)
        ours = isinstance(model, ParallelModule)
        norm = model.clip_grad_norm_(0.1) if ours else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return [float(loss), float(norm)], gradients(model)

    expected = [one for found in cases for one in [in_one(found, partial(run, found))] * len(plans(found))]
    by_plan = under_all(*((found, partial(run, found)) for found in cases))
    for (numbers, wanted), by_rank in zip(expected, by_plan, strict=True):
        assert all(own == pytest.approx(numbers, rel=1e-10) for own, _ in by_rank)
        assert_equal([got for _, got in by_rank], wanted, 1e-10)


class Counting(nn.Module):
    """Batch norms, a counter that all blocks read, and running statistics of the batch itself, or of nothing."""

    def __init__(self, *, of_batch: bool = True) -> None:
        super().__init__()
        self.of_batch = of_batch
        self.first, self.last = nn.Linear(6, HIDDEN), nn.Linear(HIDDEN, 6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU()) for _ in range(4)
        )
        self.register_buffer("steps", torch.ones(()))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        steps, seen = self.get_buffer("steps"), self.get_buffer("seen")
        steps += 1
        seen.mul_(0.9).add_(x.mean(0) if self.of_batch else 1)
        h = self.first(x - seen)
        for layer in self.layers:
            h = h + layer(h) / steps
        return F.mse_loss(self.last(h) * seen.exp(), y)


def test_buffers() -> None:
    """They are the same on all stages that have them, step after step."""
    torch.manual_seed(0)
    found = Case(Counting().double(), {"x": torch.randn(8, 6).double(), "y": torch.randn(8, 6).double()})

    def run(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
        losses = list[float]()
        for _ in range(3):
            loss = model.forward_backward(**found.batch) if isinstance(model, ParallelModule) else model(**found.batch)
            losses.append(loss.item())
        return losses, {name: whole(b).clone() for name, b in model.named_buffers()}

    losses, expected = in_one(found, run)
    graph = of_one_stage(found, (), 1)
    by_rank = run_ranks(lambda: run(found.lower(graph, evenly(graph, 4))), 4, 60)
    assert_equal([buffers for _, buffers in by_rank], expected, 1e-10)
    assert all(own == pytest.approx(losses, rel=1e-10) for own, _ in by_rank)


def test_whole_checkpoints_are_loaded_on_every_stage() -> None:
    found = case()
    other = Net().double()
    state = other.state_dict()

    def loaded(parallel: ParallelModule) -> dict[str, Tensor | None]:
        parallel.load_state_dict(state, strict=True)
        with pytest.raises(ShardwrightError, match=r"unexpected keys \['more'\]"):
            parallel.load_state_dict({**state, "more": torch.zeros(1)})
        return {name: whole(value) for name, value in parallel.state_dict().items()}

    for by_rank in under_all((found, loaded)):
        assert_equal(by_rank, dict(state), 0.0)


def test_distributed_checkpoints_go_from_stages_to_other_plans_and_back() -> None:
    """Weights and the optimizer's states, by name: flat, as each stage has a list of its own parameters."""
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    found = case()
    stages = plans(found, PLANS[:3])
    flat = of_one_stage(found, ("zero", "tensor"), 1, "zero-3")
    todo = [stages[1], (flat, Execution()), stages[0], (flat, Execution()), stages[2]]

    def state_of(parallel: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        moments = get_optimizer_state_dict(parallel, optimizer, options=flattened)
        return {"model": parallel.state_dict(), "optimizer": moments}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model, found)
        optimizer.step()
        optimizer.zero_grad()

    def body() -> dict[str, Tensor]:
        folder, after = [tempfile.mkdtemp()], dict[str, Tensor]()
        dist.broadcast_object_list(folder)
        for number, plan in enumerate(todo):
            parallel = found.lower(*plan)
            optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2, fused=True)
            if number:
                with torch.no_grad():
                    for p in parallel.parameters():
                        p.zero_()
                state = state_of(parallel, optimizer)
                load(state, checkpoint_id=f"{folder[0]}/{number - 1}")
                parallel.load_state_dict(state["model"])
                set_optimizer_state_dict(parallel, optimizer, state["optimizer"], options=flattened)
            train(parallel, optimizer)
            save(state_of(parallel, optimizer), checkpoint_id=f"{folder[0]}/{number}")
            after = weights(parallel)
        return after

    def serial(model: nn.Module) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for _ in todo:
            train(model, optimizer)
        return weights(model)

    expected = in_one(found, lambda model: _exactly(serial, model))
    assert_equal(run_ranks(lambda: _exactly(lambda _: body(), None), 4, 120), expected, 1e-8)


def test_a_weight_that_stages_of_unlike_sizes_share_is_saved_once(capfd: pytest.CaptureFixture[str]) -> None:
    found = case()
    todo = [*plans(found, PLANS[3:4]), *plans(found, PLANS[4:]), *plans(found, PLANS[3:4])]

    def body() -> list[dict[str, Tensor]]:
        folder, seen = [tempfile.mkdtemp()], list[dict[str, Tensor]]()
        dist.broadcast_object_list(folder)
        for number, plan in enumerate(todo):
            parallel = found.lower(*plan)
            optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2, fused=True)
            backward(parallel, found)
            optimizer.step()
            if number:
                assert sw.load(folder[0], parallel, optimizer) == number
            sw.save(folder[0], parallel, optimizer, step=number + 1)
            of_states = {f"{name} exp_avg": whole(optimizer.state[p]["exp_avg"]) for name, p in
                         parallel.named_parameters() if p in optimizer.state}  # fmt: skip
            seen.append({**weights(parallel), **of_states})
        return seen

    results = run_ranks(body, 4, 120)
    first = {name: value for by_plan in results for name, value in by_plan[0].items()}
    for by_plan in zip(*results, strict=True):
        assert {name for values in by_plan for name in values} == first.keys()
        assert all(torch.equal(value, first[name]) for values in by_plan for name, value in values.items())
    assert "overlapping" not in capfd.readouterr().err


def _exactly(run: Callable[[Any], Any], argument: Any) -> Any:
    with seed_exactly(SEED):
        return run(argument)


@in_whole_grids
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in dynamo
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # so too
def test_compiled_stages() -> None:
    model = Net()
    for p in model.modules():
        if isinstance(p, nn.Dropout):
            p.p = 0.0
    found = case(model)
    todo = plans(found)[:1]
    load_backends()

    def run() -> list[tuple[float, dict[str, Tensor | None]]]:
        results = list[tuple[float, dict[str, Tensor | None]]]()
        for graph, execution in todo:
            parallel = found.lower(graph, execution)
            parallel.compile(backend="aot_eager")
            results.append((float(backward(parallel, found)), gradients(parallel)))
        return results

    loss, expected = in_one(found, lambda model: (float(backward(model, found)), gradients(model)))
    for by_rank in zip(*run_ranks(run, 4, 250), strict=True):
        assert all(own == pytest.approx(loss, rel=1e-10) for own, _ in by_rank)
        assert_equal([got for _, got in by_rank], expected, 1e-10)


@pytest.mark.slow
def test_masks_of_torchs_generator() -> None:
    """Without `seed_exactly`: other masks in each step, the same on all ranks; one number of the generator a step."""
    found = case()

    def run(model: ParallelModule) -> tuple[list[float], dict[str, Tensor | None]]:
        seeded = torch.get_rng_state()
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.0), list[float]()
        for number in range(5):
            losses.append(float(backward(model, found)))
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1 * (number > 2)
            if number < 4:
                optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float(model(**found.batch)))
        state = torch.get_rng_state()
        torch.set_rng_state(seeded)
        for _ in range(6):
            torch.randint(1 << 62, ())
        assert torch.equal(state, torch.get_rng_state())
        return losses, {**weights(model), **{f"gradient of {n}": g for n, g in gradients(model).items()}}

    def own_streams(model: ParallelModule) -> tuple[list[float], dict[str, Tensor | None]]:
        """Seeded differently: all draw from one stream, and none from its own generator."""
        torch.manual_seed(dist.get_rank())
        before, losses = torch.get_rng_state(), [float(backward(model, found)) for _ in range(3)]
        drawn = torch.get_rng_state()
        assert torch.equal(before, drawn)
        return losses, gradients(model)

    torch.manual_seed(5)
    for by_rank in under_all((found, run), (found, own_streams)):
        losses, first = by_rank[0][0], dict[str, Tensor | None]()
        assert len(set(losses)) == len(losses)
        for own, values in by_rank:
            assert own == losses
            for name, value in values.items():
                torch.testing.assert_close(value, first.setdefault(name, value), rtol=1e-12, atol=1e-14)


class Odd(nn.Module):
    """What only reads the batch comes first; sequences lie otherwise in memory; every layer adds to the loss.

    Weights are penalised, so that the last stage reads all of them; a noise depends on the batch alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        noise = self.drop(x)
        h, losses = (x * mask[..., None]).transpose(0, 1), list[Tensor]()
        for layer in self.layers:
            h = torch.tanh(layer(h)) + noise.transpose(0, 1)
            losses.append(h.transpose(0, 1).reshape(-1, HIDDEN).pow(2).mean())
        return sum(losses[1:], losses[0]) + 0.1 * sum(p.pow(2).sum() for p in self.parameters())


def test_odd_models() -> None:
    torch.manual_seed(0)
    found = Case(Odd().double(), {"x": torch.randn(8, 3, HIDDEN).double(), "lengths": torch.randint(1, 4, (8,))})
    todo = list[tuple[Graph, Execution]]()
    for roles, stages in (((), 4), (("data",), 2), (("zero",), 2)):
        graph = of_one_stage(found, roles, 4)
        todo += [(graph, evenly(graph, stages)), (graph, evenly(graph, stages, "gpipe", recompute="full"))]
    many = sum(todo[0][1].schedule.split)
    todo.append((todo[0][0], Execution.of(num_stages=4, split=(1, 1, 1, many - 3))))

    def run(model: nn.Module) -> tuple[float, dict[str, Tensor | None]]:
        with seed_exactly(SEED):
            if isinstance(model, ParallelModule):
                loss = model.forward_backward(**found.batch)
            else:
                loss = model(**found.batch)
                loss.backward()
        return loss.item(), gradients(model)

    loss, expected = in_one(found, run)
    results = run_ranks(lambda: [run(found.lower(*plan)) for plan in todo], 4, 120)
    for by_rank in zip(*results, strict=True):
        assert all(own == pytest.approx(loss, rel=1e-10) for own, _ in by_rank)
        assert_equal([got for _, got in by_rank], expected, 1e-10)


def test_statistics_of_each_microbatch() -> None:
    """Running statistics are updated by one microbatch after the other."""
    torch.manual_seed(0)
    model, many = Counting(of_batch=False).double(), 2
    batch = {"x": torch.randn(8, 6).double(), "y": torch.randn(8, 6).double()}
    options: dict[str, Any] = {"num_microbatches": many, "per_microbatch": ("*",)}
    found = Case(model, batch, capture(model, batch, **options))
    graph = of_one_stage(found, (), many, per_microbatch=("*",))

    def run(model: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
        if isinstance(model, ParallelModule):
            model.forward_backward(**found.batch)
        else:
            for part in range(many):
                (model(**{key: value.chunk(many)[part] for key, value in batch.items()}) / many).backward()
        return gradients(model), {name: whole(b).clone() for name, b in model.named_buffers()}

    expected = in_one(found, run)
    split = evenly(graph, 4, per_microbatch=("*",))
    by_rank = run_ranks(lambda: run(found.lower(graph, split)), 4, 60)
    assert_equal([got for got, _ in by_rank], expected[0], 1e-10)
    assert_equal([buffers for _, buffers in by_rank], expected[1], 1e-10)


class Noise(nn.Module):
    """Noise, whose draws have no number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * torch.randn_like(x)
        return x.pow(2).mean()


class Stochastic(nn.Module):
    """Stochastic depth in every layer by numbers of torch's generator, beside dropout; and noise on the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            kept = torch.floor(torch.rand((x.shape[0], 1), dtype=x.dtype) + 0.7)
            x = x + kept * self.dropout(layer(x))
        return (x * torch.randn(HIDDEN, dtype=x.dtype)).pow(2).mean()


def test_every_stage_draws_what_one_process_draws() -> None:
    found = Case(Stochastic().double(), {"x": torch.randn(8, HIDDEN, dtype=torch.float64)})
    graph, split = of_one_stage(found, (), 2), of_one_stage(found, ("data",), 2)
    plans = [
        (graph, evenly(graph, 2)),
        (graph, evenly(graph, 2, "interleaved", 2)),
        (graph, evenly(graph, 2, recompute="full")),
    ]

    def body(parallel: ParallelModule) -> tuple[list[Outcome], Tensor]:
        torch.manual_seed(SEED)
        steps = [copy.deepcopy(step(parallel, found.batch)) for _ in range(2) if not parallel.zero_grad()]
        return steps, torch.get_rng_state()

    torch.manual_seed(SEED)
    expected, state = [in_one_process(found) for _ in range(2)], torch.get_rng_state()
    assert worst_error([expected[0]], expected[1]) > 1e-3
    for by_rank in [*found.on_ranks_of(plans, body), *found.on_ranks_of([(split, evenly(split, 2))], body)]:
        for number, wanted in enumerate(expected):
            assert worst_error([steps[number] for steps, _ in by_rank], wanted) < 1e-11
        assert all(torch.equal(own, state) for _, own in by_rank)


def test_all_ranks_make_the_same_groups() -> None:
    """The last stage alone sums over two axes: there its head reads other examples along both than the embedding."""
    model, mesh = Net(), Mesh.of(x=2, y=2)
    model.requires_grad_(False)
    model.tok.requires_grad_(True)
    found = case(model)
    serial = found.captured.graph
    usual = follow(serial, mesh, (0, 1))
    (head,) = (node.name for node in serial.nodes if node.op == "linear" and "tok_weight" in node.inputs)

    def choose(node: Node, axis: int, kinds: list[TensorType]) -> str:
        apart = {head: "_0"} | dict.fromkeys(serial.users[head], "R")
        return apart[node.name] if axis and node.name in apart else usual(node, axis, kinds)

    graph = found.graph(mesh, {"ids": (S(0), R), "targets": (S(0), R)}, choose)
    execution, made = evenly(graph, 4), list[list[str]]()
    for rank in range(0, 16, 4):
        with dryrun.as_rank(rank, 16):
            made.append([axis.name for axis in found.lower(graph, execution).ranks.all_axes])
    own = ["x", "y", "x_y", "stages"]
    tied = [*own, "stages"]  # the first and the last stage have a weight in common
    assert made == [tied, own, own, tied]


class Turn(nn.Module):
    """Its weights come from an operator that has no row and does not draw."""

    def __init__(self) -> None:
        super().__init__()
        self.angle, self.up = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x) @ torch.linalg.matrix_exp(self.angle - self.angle.T))


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turn() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_operators_without_a_row_run_in_stages(schedule: ScheduleName) -> None:
    found = Case(Turns().double(), {"x": torch.randn(8, HIDDEN).double()})
    graph = of_one_stage(found, (), 4)
    assert {node.op for node in graph.nodes} >= {"opaque"}
    check_stages(graph, execution := evenly(graph, 2, schedule), None)
    assert worst_error(in_stages(found, [(graph, execution)])[0], in_one_process(found)) < 1e-11


class Widening(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN).double()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x).double()).square().mean()


def test_what_stages_cannot_run_is_refused() -> None:
    found = Case(Noise(), {"x": torch.randn(8, HIDDEN, 2, HIDDEN)})
    graph = of_one_stage(found, (), 1)
    drawn = r"aten.randn_like.default at .*\.py:\d+\): it draws from torch's generator for a value of one stage"
    with pytest.raises(PlanError, match=drawn):
        check_stages(graph, evenly(graph, 2), None)
    graph = of_one_stage(case(), (), 1)
    for precision in ("amp_bf16", "amp_fp16"):
        check_stages(graph, evenly(graph, 2), precision)
    graph = of_one_stage(Case(Widening(), {"x": torch.randn(8, HIDDEN)}), (), 1)
    with pytest.raises(
        PlanError, match="amp_fp16 in pipeline stages: parameters are in float32 and float64; use amp_b"
    ):
        check_stages(graph, evenly(graph, 2), "amp_fp16")
    check_stages(graph, Execution(), "amp_fp16")
    frozen = Net()
    frozen.blocks.requires_grad_(False)
    graph = of_one_stage(case(frozen), (), 1)
    with pytest.raises(PlanError, match="amp_fp16: nothing is trained in stage 1; use amp_bf16, or no stages"):
        check_stages(graph, evenly(graph, 3), "amp_fp16")
    check_stages(graph, evenly(graph, 2, "interleaved", 2), "amp_fp16")  # one of the chunks of each is enough
